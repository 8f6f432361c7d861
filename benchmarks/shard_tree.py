"""Open a folder of 37,312 shards in the browser: how long until all are listed, and how long the screen waits for it.

The host's pages are made first, by the agent's own operation on real (empty) files, and timed for themselves; the
console then gets each as the line that it is on the wire.
`python benchmarks/shard_tree.py [FILES]` prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FRAME_S = 0.25
"""The console paints four times a second: a loop that waits longer than this has lost a frame."""


async def lags(stop: asyncio.Event, found: list[float]) -> None:
    """Measure how late the loop wakes."""
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        found.append(time.perf_counter() - before - 0.01)


async def measure(folder: Path, files: int) -> dict[str, object]:
    """Open the browser on the folder and move in it."""
    from tests.shardfleet import ShardFleet
    from tui.app import EightZeros
    from tui.screens.shards import ShardScreen

    fleet, late, stop = ShardFleet(str(folder)), [], asyncio.Event()
    began, cpu, pages, offset = time.perf_counter(), time.process_time(), {}, 0
    while offset is not None:
        answer = fleet.list_shards("gpu-01", str(folder), offset).result()
        pages[offset] = json.dumps(answer).encode()
        offset = answer["next"]
    host_s, host_cpu_s = time.perf_counter() - began, time.process_time() - cpu

    def page(_host: str, _path: str, at: int = 0, _since: float = 0.0) -> object:
        return fleet._answer("list_shards", at, value=lambda: json.loads(pages[at]))

    # What the host does for one file or folder is measured elsewhere, and would stand in the loop here.
    fleet.show_shard = lambda *_: fleet._answer("show_shard", value={"entries": []})  # type: ignore[method-assign]
    fleet.shard_lengths = lambda *_: fleet._answer("lengths", value={"samples": 0})  # type: ignore[method-assign]
    fleet.list_shards = page  # type: ignore[method-assign]
    app = EightZeros(fleet)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.5)
        watch = asyncio.create_task(lags(stop, late))
        began = time.perf_counter()
        await pilot.press("S")
        screen = app.screen
        assert isinstance(screen, ShardScreen)
        while screen.shards.listed < files or screen.listing.todo:
            await pilot.pause(0.01)
        listed_s = time.perf_counter() - began
        widgets, keys = len(screen.query("*")), []
        for key in ["G", *["up"] * 20, "pageup", "g", *["down"] * 20]:
            at = time.perf_counter()
            await pilot.press(key)
            keys.append(time.perf_counter() - at)
        at = time.perf_counter()
        screen.shards.filter("data_373")
        filter_s = time.perf_counter() - at
        stop.set()
        await watch
        assert len(screen.query("*")) == widgets
    late.sort()
    p99 = late[int(len(late) * 0.99)]
    return {
        "files": files, "host_s": round(host_s, 2), "host_cpu_s": round(host_cpu_s, 2), "pages": len(pages),
        "largest_message_bytes": max(fleet.lines), "bytes_moved": sum(fleet.lines),
        "listed_s": round(listed_s, 2), "widgets": widgets,
        "loop_late_ms": {"p50": round(statistics.median(late) * 1e3, 1), "p99": round(p99 * 1e3, 1),
                         "most": round(late[-1] * 1e3, 1), "of_a_frame_ms": FRAME_S * 1e3},
        "key_ms": {"p50": round(statistics.median(keys) * 1e3, 1), "most": round(max(keys) * 1e3, 1)},
        "filter_ms": round(filter_s * 1e3, 1),
    }  # fmt: skip


def main() -> None:
    """Make the files, measure, print."""
    files = int(sys.argv[1]) if len(sys.argv) > 1 else 37_312
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(files):
            (folder / f"data_{number}.ckpt").touch()
        print(json.dumps(asyncio.run(measure(folder, files)), indent=1))


if __name__ == "__main__":
    main()
