"""A made-up flight of the whole chain on eight GPUs, written to disk as the recorder writes it, a row a second.

What it is for: the benchmark of the record, and looking at the timeline with a day and a half behind it.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import Record
from backend.agent.paths import state_dir
from backend.wire import GIB, MIB, SCHEMA
from backend.wire.flight import FAILED, FlightEvent

if TYPE_CHECKING:
    from backend.wire.flight import Value

GPUS = 8
LINE = 100
"""Bytes of a line of a log."""

MODEL_BYTES, LOADED_BYTES = 71 * GIB, 118 * GIB
LOST, HOT, STALLED = (5, 0.66, 0.669), (2, 0.74, 0.76), (0.30, 0.304)
"""A GPU that does not answer, one that runs hot, and a stall: (GPU,) from and to, as parts of the flight."""


class Stage(NamedTuple):
    """One run of the chain: from and to as parts of the flight, how busy the GPUs are, what they hold."""

    name: str
    begin: float
    end: float
    load: float = 0.0
    held: int = 0
    samples: int = 0
    tokens_per_s: float = 0.0
    code: int = 0


CHAIN = (
    Stage("prepare", 0.01, 0.05, samples=37_312),
    Stage("reset", 0.0505, 0.051),
    Stage("serve", 0.052, 0.57, 0.0, LOADED_BYTES),
    Stage("extract", 0.058, 0.20, 92, 0, 14_000, 2420.0, -9),
    Stage("extract", 0.205, 0.56, 92, 0, 37_312, 2420.0),
    Stage("audit", 0.571, 0.60, samples=37_312),
    Stage("reset", 0.6005, 0.601),
    Stage("train", 0.605, 0.99, 97, 96 * GIB, 6000, 0.0),
)


def make_flight(hours: float, end: float) -> dict[str, float]:
    """Write a flight that ends at a time into this user's state folder. Returns {rows, append_s, start}."""
    rng = random.Random(7)
    seconds = int(hours * 3600)
    start = float(int(end) - seconds)
    record, spent_s = Record(flight_dir()), 0.0
    runs = [(f"{stage.name}-{number:04d}", stage) for number, stage in enumerate(CHAIN)]
    for run_id, stage in runs:
        _leave_run(run_id, stage, start, seconds)
        for share, text in ((stage.begin, "running"), (stage.end, "done" if not stage.code else "exited with -9")):
            level = "bad" if stage.code and share == stage.end else "info"
            at = start + share * seconds
            record.event(FlightEvent(at, "run", level, f"{stage.name} {text} ({run_id})", run=run_id))
    index, begin, until = LOST
    for share, level, text in ((begin, "bad", "not answering for 4 s"), (until, "info", "answers again")):
        record.event(FlightEvent(start + share * seconds, "gpu", level, f"GPU {index}: {text}", gpu=index))
    for second in range(seconds):
        values = row(second / seconds, second, seconds, rng, runs)
        began = time.process_time()
        record.append(start + second + rng.random() * 0.02, values)
        spent_s += time.process_time() - began
    record.close()
    return {"rows": seconds, "append_s": spent_s, "start": start}


def row(share: float, second: int, seconds: int, rng: random.Random, runs: list[tuple[str, Stage]]) -> dict[str, Value]:
    """Make one second at a part of the flight."""
    live = [(run_id, stage) for run_id, stage in runs if stage.begin <= share < stage.end]
    stalled = STALLED[0] <= share < STALLED[1]
    load = 0.0 if stalled else max((stage.load for _, stage in live), default=0.0)
    held = max((stage.held for _, stage in live), default=0)
    values: dict[str, Value] = {}
    for gpu in range(GPUS):
        values.update(_gpu(gpu, share, load, held, rng))
    values.update({
        "host.load1": round(3 + load / 9 + rng.random(), 2), "host.cpu_percent": round(2 + load / 12 + rng.random(), 1),
        "host.memory_total_bytes": 2 << 40, "host.memory_available_bytes": (1 << 40) + rng.randrange(1 << 28),
        "host.shm_free_bytes": 1008 * GIB - rng.randrange(8) * 100_000_000 * bool(load),
    })  # fmt: skip
    for run_id, stage in live:
        values.update(_progress(run_id, stage, share, seconds, stalled, rng))
    return values


def _gpu(gpu: int, share: float, load: float, held: int, rng: random.Random) -> dict[str, Value]:
    busy = max(0.0, min(100.0, load + rng.gauss(0, 6))) if load else 0.0
    hot = HOT[0] == gpu and HOT[1] <= share < HOT[2]
    power = 78 + busy * 5.4 + rng.gauss(0, 9)
    found: dict[str, Value] = {
        "memory_used_bytes": held + gpu * 700 * MIB + rng.randrange(3) * 2 * MIB if held else 0,
        "memory_total_bytes": 143771 * MIB, "utilisation_percent": round(busy),
        "temperature_c": round(31 + busy / 3.1 + rng.gauss(0, 0.6) + (32 if hot else 0)), "power_w": round(power, 1),
        "sm_clock_mhz": 1980 - 15 * rng.randrange(6) if busy else 345, "clock_reasons": 4 if busy else 1,
        "ecc_uncorrected": 0, "memory_reserved_bytes": 615 * MIB, "power_limit_w": 700, "ecc_corrected": 0,
        "remapped_pending": 0, "remapped_failed": 0, "recovery_action": 0, "persistence": 1, "mig": 0, "pcie_gen": 5,
        "pcie_width": 16, "fan_percent": "unsupported", "thermal_margin_c": 50 - round(busy / 4), "holders": bool(held),
    }  # fmt: skip
    if LOST[0] == gpu and LOST[1] <= share < LOST[2]:
        found = dict.fromkeys(found, FAILED)
    return {f"gpu{gpu}.{name}": value for name, value in found.items()}


def _progress(
    run_id: str, stage: Stage, share: float, seconds: int, stalled: bool, rng: random.Random
) -> dict[str, Value]:
    part = (share - stage.begin) / (stage.end - stage.begin)
    done = int(part * stage.samples)
    rate = 0.0 if stalled else max(0.0, stage.tokens_per_s * (1 + rng.gauss(0, 0.06)))
    found: dict[str, Value] = {"log_bytes": int((share - stage.begin) * seconds) // 5 * LINE}
    if stage.samples:
        found.update({
            "samples_done": done, "samples_total": stage.samples, "tokens_done": int(done * 2353),
            "tokens_total": stage.samples * 2353, "bytes_written": done * 135_000_000, "bytes_total": 5_037_120_000_000,
            "samples_failed": 0, "samples_resumed": 0, "samples_in_flight": 32, "samples_per_s": round(rate / 2353, 3),
            "tokens_per_s": round(rate, 1), "bytes_per_s": round(rate * 57_000), "advanced_at": int(share * seconds),
            "disk_free_bytes": 7_500_000_000_000 - int(min(share, 0.56) * 8_800_000_000_000),
        })  # fmt: skip
    return {f"run.{run_id}.{name}": value for name, value in found.items()}


def _leave_run(run_id: str, stage: Stage, start: float, seconds: int) -> None:
    """Leave a run's folder as its supervisor would have: what it was, how it ended, and a log."""
    folder = Path(state_dir("runs")) / run_id
    folder.mkdir()
    begin, end = start + stage.begin * seconds, start + stage.end * seconds
    about = {"id": run_id, "stage": stage.name, "state": "running", "schema": SCHEMA, "started_at": begin,
             "host": socket.gethostname(), "boot_id": "made up", "argv": [stage.name]}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "spec.json").write_text(json.dumps({**about, "at": begin}))
    (folder / "exit.json").write_text(json.dumps({"schema": SCHEMA, "code": stage.code, "at": end}))
    lines = int(end - begin) // 5
    with (folder / "log").open("w", encoding="ascii") as log:
        for number in range(lines):
            text = time.strftime("%H:%M:%S", time.localtime(begin + number * 5 + 5)) + f" {stage.name} step {number}"
            log.write(f"{text}: loss 2.31, everything as it should be".ljust(LINE - 1)[: LINE - 1] + "\n")


if __name__ == "__main__":
    import sys

    os.environ["XDG_STATE_HOME"] = sys.argv[1]
    print(make_flight(float(sys.argv[2]), time.time() - 5))
