"""How large is a day and a half of flight, and how quick is it to look at?

    python benchmarks/flight_record.py [--hours 30] [--out FILE]

Writes a made-up flight of the whole chain on eight GPUs at 1 Hz as the recorder does (benchmarks/flight_made.py), an
hour of nothing but extraction beside it, then connects to this machine as to any host, opens the timeline on a terminal
of 200x60, and scrubs. Printed are the bytes of each step and the CPU time of a row; the time from the key that opens
the timeline to its first full picture (limit: 1 s); and the time of a frame when the cursor moves by a cell, when the
window moves, and when it zooms to rows that are not fetched yet (limit: 50 ms, median and the slowest of 40; all
between the key and the strips for the terminal). Nothing passes or fails here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import LADDER, Record
from benchmarks.flight_made import make_flight
from tests.flights import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD_LIMIT_MS, FRAME_LIMIT_MS = 1000.0, 50.0
SIZE = (200, 60)


def sizes(folder: str) -> dict[str, int]:
    """Return the bytes of each step's segments."""
    return {
        f"{step}_s": sum(path.stat().st_size for path in (Path(folder) / str(step)).glob("*.seg"))
        for step, _, _ in LADDER
    }


def busy_hour() -> dict[str, Any]:
    """Record an hour in which everything that can move does, twice, since the last block is not full."""
    with tempfile.TemporaryDirectory() as folder:
        record, spent_s = Record(folder), 0.0
        for at, values in seconds(7200 + 61):
            began = time.process_time()
            record.append(at, values)
            spent_s += time.process_time() - began
        record.close()
        hour = {name: size // 2 for name, size in sizes(folder).items()}
    return {"bytes_an_hour": hour, "total_bytes_an_hour": sum(hour.values()), "cpu_ms_a_row": round(spent_s / 7.261, 3)}


async def look() -> dict[str, Any]:
    """Open the timeline on this machine's record, and measure."""
    from backend.config import Config, Host
    from backend.fleet import Fleet
    from tui.app import EightZeros
    from tui.screens.timeline import TimelineScreen

    fleet = Fleet(Config(hosts={"here": Host()}))
    app = EightZeros(fleet)
    async with app.run_test(size=SIZE) as pilot:
        while not fleet.hosts["here"].caught_up:
            await pilot.pause(0.05)
        began = time.perf_counter()
        await pilot.press("T")
        while not (isinstance(app.screen, TimelineScreen) and app.screen.feed.loaded and app.screen.lanes._cells):
            await pilot.pause(0.002)
        screen = app.screen
        screen._compositor.render_strips()
        found: dict[str, Any] = {"load_ms": round((time.perf_counter() - began) * 1000, 1)}
        await pilot.pause(1.0)
        found["scrub"] = await frames(pilot, lambda _: screen.action_scrub(-1))
        found["pan"] = await frames(pilot, lambda _: screen.action_scrub(-2 * screen.view.count // 3))
        found["zoom"] = await frames(pilot, lambda number: screen.action_zoom(-1 if number < 20 else 1))
    await asyncio.to_thread(fleet.stop)
    return found


async def frames(pilot: Any, act: Callable[[int], None]) -> dict[str, float]:
    """Time forty frames from the key to the strips; between two of them the screen may fetch what it wants."""
    spent: list[float] = []
    for number in range(40):
        began = time.perf_counter()
        act(number)
        pilot.app.screen._compositor.render_strips()
        spent.append((time.perf_counter() - began) * 1000)
        await pilot.pause(0.05)
    return {"median_ms": round(statistics.median(spent), 1), "slowest_ms": round(max(spent), 1)}


def main() -> None:
    """Write, look and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hours", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update(HOME=home, XDG_STATE_HOME=f"{home}/state", TEXTUAL_ANIMATIONS="none")
        made = make_flight(options.hours, time.time() - 5)
        size = sizes(flight_dir())
        result = {
            "what": f"{options.hours:g} h at 1 Hz of 8 GPUs, {made['rows']} rows; timeline of 200x60",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "load1": round(os.getloadavg()[0], 2),
            "bytes": size,
            "total_bytes": sum(size.values()),
            "extraction_only": busy_hour(),
            **asyncio.run(look()),
        }
    result["load_of_limit"] = round(result["load_ms"] / LOAD_LIMIT_MS, 2)
    result["scrub_of_limit"] = round(result["scrub"]["median_ms"] / FRAME_LIMIT_MS, 2)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
