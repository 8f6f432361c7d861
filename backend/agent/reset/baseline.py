"""What each GPU's memory reads when nobody uses it: recorded, never assumed.

An idle GPU reads 0 on one driver and 3 or 450 MiB on the next, so "free" is a number of this GPU under this
driver (facts: reset, section 2).
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Dict, List, NamedTuple, Optional

from backend.agent.files import read_json, write_json
from backend.agent.paths import state_dir
from backend.wire import MIB, SCHEMA, Inventory, Reading, Refused

MEMORY_API = "v2"
"""Which reading a baseline is of: v1 counts what the driver reserves, 615 MiB on an idle H200."""

SAMPLES = 5
SPAN_S = 3.0
LEAST_TOLERANCE_BYTES = 8 * MIB
MOST_TOLERANCE_BYTES = 16 * MIB
"""A bare context adds 22 MiB on an H200, so that a tolerance below it still notices one (facts: reset,
section 2)."""


class Limit(NamedTuple):
    """How much memory one GPU may show when it is clean; `baseline_bytes` None means nothing was recorded."""

    most_bytes: int
    baseline_bytes: Optional[int]
    said: str


def tolerance_bytes(jitter_bytes: int) -> int:
    """Return how far above its baseline a clean GPU may be."""
    return min(MOST_TOLERANCE_BYTES, max(LEAST_TOLERANCE_BYTES, 2 * jitter_bytes))


def path() -> str:
    """Return the file that holds this host's baselines."""
    return os.path.join(state_dir(), "baseline.json")


def load() -> Dict[str, Any]:
    """Return what was recorded: {schema, recorded_at, gpus: {uuid: {...}}}. Raises Refused on a file of no
    use."""
    empty: Dict[str, Any] = {"schema": SCHEMA, "recorded_at": 0.0, "gpus": {}}
    try:
        stored = read_json(path())
    except ValueError as error:
        raise Refused("baseline", str(error), "record it again: eightzeros baseline record") from None
    if stored is None:
        return empty
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or not isinstance(stored.get("gpus"), dict):
        text = "%s: not of schema %d" % (path(), SCHEMA)
        raise Refused("baseline", text, "record it again: eightzeros baseline record")
    return stored


def limit(stored: Dict[str, Any], uuid: str, driver: str) -> Limit:
    """Return the limit of one GPU. A baseline of another driver or another memory reading is void."""
    entry = stored["gpus"].get(uuid)
    why = ""
    if entry is None:
        why = "no baseline"
    elif entry["driver"] != driver:
        why = "no baseline (recorded under driver %s, now %s)" % (entry["driver"], driver)
    elif entry["memory_api"] != MEMORY_API:
        why = "no baseline (recorded with memory reading %s)" % entry["memory_api"]
    if entry is None or why:
        return Limit(MOST_TOLERANCE_BYTES, None, why)
    used, jitter = int(entry["used_bytes"]), int(entry["jitter_bytes"])
    return Limit(used + tolerance_bytes(jitter), used, "baseline %.1f MiB" % (used / MIB))


def in_words(stored: Dict[str, Any], inventory: Inventory) -> str:
    """Say whether the baseline covers this host's GPUs."""
    if not inventory.gpus:
        return "none: the driver lists no GPU"
    missing = [gpu.index for gpu in inventory.gpus if limit(stored, gpu.uuid, inventory.driver).baseline_bytes is None]
    if not missing:
        return "recorded " + time.strftime("%Y-%m-%d %H:%M", time.localtime(stored["recorded_at"]))
    which = "" if len(missing) == len(inventory.gpus) else " for GPU " + ", ".join(str(index) for index in missing)
    return "none%s: a GPU counts as free at %d MiB or less" % (which, MOST_TOLERANCE_BYTES // MIB)


def store(inventory: Inventory, samples: Dict[int, List[Reading]]) -> Dict[str, Any]:
    """Write the baseline from SAMPLES readings of each GPU. Raises Refused where one of them failed."""
    gpus = {}
    for gpu in inventory.gpus:
        values = [reading.number() for reading in samples.get(gpu.index, [])]
        known = [int(value) for value in values if value is not None]
        if len(known) < SAMPLES or len(known) != len(values):
            problem = next((reading.problem for reading in samples.get(gpu.index, []) if not reading.ok), "no answer")
            raise Refused("baseline", "GPU %d: its memory could not be read: %s" % (gpu.index, problem))
        gpus[gpu.uuid] = {
            "index": gpu.index, "driver": inventory.driver, "memory_api": MEMORY_API,
            "used_bytes": int(statistics.median(known)), "jitter_bytes": max(known) - min(known),
        }  # fmt: skip
    record = {"schema": SCHEMA, "recorded_at": time.time(), "gpus": gpus}
    write_json(path(), record)
    return record
