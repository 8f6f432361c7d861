"""One second of a host as named numbers: every GPU's readings, the host's own, and each live run's progress."""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterable

from backend.agent.flight.coarse import rounded
from backend.wire import LEAN, NOT_READ, SLOW, UNSUPPORTED, Progress, Reading, Run, Telemetry
from backend.wire.flight import FAILED, Value

FRESH_S = 3.5
"""A reading of the 1 Hz set that is older failed for now: three missed ticks (DESIGN section 4)."""

FRESH_SLOW_S = 35.0
MOST_RUNS = 16
PROGRESS = tuple(f.name for f in dataclasses.fields(Progress) if f.name not in ("state", "shard", "message"))


def columns_of(telemetry: Telemetry, runs: Iterable[Run]) -> Dict[str, Value]:
    """Name every number of one second: `gpu0.power_w`, `gpu0.holders`, `host.load1`, `run.ID.tokens_done`."""
    values: Dict[str, Value] = {}
    for gpu in telemetry.gpus:
        group = "gpu%d." % gpu.index
        for name in LEAN:
            values[group + name] = _value(name, gpu.readings.get(name), FRESH_S, bool(gpu.problem))
        for name in SLOW:
            values[group + name] = _value(name, gpu.readings.get(name), FRESH_SLOW_S, bool(gpu.problem))
        unknown = gpu.problem or "holders" in gpu.readings
        values[group + "holders"] = FAILED if unknown else len(gpu.holders)
    for name, number in vars(telemetry.host).items():
        values["host." + name] = None if number is None else rounded(name, number)
    for run in sorted(runs, key=lambda run: -run.started_at)[:MOST_RUNS]:
        group = "run.%s." % run.id
        values[group + "log_bytes"] = run.log_bytes
        for name in PROGRESS if run.progress is not None else ():
            number = getattr(run.progress, name)
            values[group + name] = None if number is None else rounded(name, number)
    return values


def _value(name: str, reading: "Reading | None", fresh_s: float, problem: bool) -> Value:
    """Return a reading as it may be kept; one that is too old, or whose GPU has a problem, has failed."""
    if reading is None:
        return FAILED if problem else None
    if reading.unsupported:
        return UNSUPPORTED
    number = reading.number()
    if number is None:
        return FAILED if problem or (reading.failed and reading.problem != NOT_READ.problem) else None
    return FAILED if reading.age_s > fresh_s else rounded(name, number)
