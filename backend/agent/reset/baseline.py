"""What each GPU reads when nobody uses it: recorded, never assumed.

An idle GPU reads 0 on one driver and 3 or 450 MiB on the next, so "free" is a number of this GPU under this
driver (facts: reset, section 2). It holds for one driver, memory call, persistence, MIG and ECC mode: where one of
them is another now, the memory of the baseline is void, and why is said. Counters that the driver begins anew are
compared only within the boot in which they were recorded; what a GPU keeps over its life is compared always.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent import procfs
from backend.agent.files import read_json, write_json
from backend.agent.paths import state_dir
from backend.wire import MIB, GpuFacts, Inventory, Reading, Refused

BASELINE_SCHEMA = 2
"""Schema 1 had memory alone, and said "v2" of whatever memory call was used. Its memory still counts."""

KEYS = (("persistence", "persistence mode"), ("mig", "MIG mode"), ("ecc_mode", "ECC mode"))
VOLATILE = (
    "ecc_uncorrected", "ecc_corrected", "pcie_replays", "nvlink_crc_flit_errors", "nvlink_crc_data_errors",
    "nvlink_replays", "nvlink_recoveries",
)  # fmt: skip
LASTING = (
    "remapped_corrected", "remapped_uncorrected", "retired_single_bit", "retired_double_bit", "pcie_width",
    "nvlink_active", "compute_mode", "power_w", "power_limit_w",
)  # fmt: skip

SAMPLES = 5
SPAN_S = 3.0
AGAIN = "record it again: eightzeros baseline record"
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
    """Return what was recorded: {schema, recorded_at, boot_id, gpus: {uuid: {...}}}. Raises Refused on a file of no
    use.

    `kernel_log_seq` is the kernel log's newest record then, -1 where it could not be read, and absent from older files.
    A GPU's entry has index, bus_id, driver, memory_api, used_bytes and jitter_bytes (None where it does not report its
    memory), persistence, mig and ecc_mode (None where unknown), and `readings`: number by name, of VOLATILE and
    LASTING, what was read of them.
    """
    empty: Dict[str, Any] = {"schema": BASELINE_SCHEMA, "recorded_at": 0.0, "boot_id": "", "gpus": {}}
    try:
        stored = read_json(path())
    except ValueError as error:
        raise Refused("baseline", str(error), AGAIN) from None
    if stored is None:
        return empty
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if schema not in (1, BASELINE_SCHEMA) or not _whole(stored):
        raise Refused("baseline", "%s: not of schema %d" % (path(), BASELINE_SCHEMA), AGAIN)
    if schema == 1:
        stored.update(schema=BASELINE_SCHEMA, boot_id="")
        for entry in stored["gpus"].values():
            entry.update(dict.fromkeys((key for key, _ in KEYS), None), readings={})
    return dict(stored)


def _whole(stored: Dict[str, Any]) -> bool:
    """Say whether every entry has what a limit is made of."""
    gpus = stored.get("gpus")
    needed = {"index", "driver", "memory_api", "used_bytes", "jitter_bytes"}
    return isinstance(gpus, dict) and all(isinstance(one, dict) and needed <= set(one) for one in gpus.values())


def limit(stored: Dict[str, Any], inventory: Inventory, index: int) -> Limit:
    """Return the limit of one GPU, by its index in the inventory."""
    gpu = next((one for one in inventory.gpus if one.index == index), GpuFacts(index, "", ""))
    why = _why_none(stored, inventory, gpu)
    if why:
        return Limit(MOST_TOLERANCE_BYTES, None, why)
    entry = stored["gpus"][gpu.uuid]
    if entry["used_bytes"] is None:
        return Limit(MOST_TOLERANCE_BYTES, None, "no memory in the baseline")
    used, jitter = int(entry["used_bytes"]), int(entry["jitter_bytes"])
    return Limit(used + tolerance_bytes(jitter), used, "baseline %.1f MiB" % (used / MIB))


def _why_none(stored: Dict[str, Any], inventory: Inventory, gpu: GpuFacts) -> str:
    """Say why there is no baseline for a GPU; empty where there is one."""
    entry = stored["gpus"].get(gpu.uuid)
    void = "" if entry is None else _void(entry, inventory, gpu)
    return "no baseline" if entry is None else void and "no baseline (%s)" % void


def _void(entry: Dict[str, Any], inventory: Inventory, gpu: GpuFacts) -> str:
    """Say why a recorded memory does not hold any more; empty where it does. What is not known has not changed."""
    if entry["driver"] != inventory.driver:
        return "recorded under driver %s, now %s" % (entry["driver"], inventory.driver)
    if entry["memory_api"] != inventory.memory_api:
        return "recorded with memory reading %s, now %s" % (entry["memory_api"], inventory.memory_api)
    for key, said in KEYS:
        now = getattr(gpu, key).number()
        if entry.get(key) is not None and now is not None and entry[key] != now:
            return "recorded with %s %s, now %s" % (said, _switch(entry[key]), _switch(now))
    return ""


def _switch(value: float) -> str:
    return "on" if value else "off"


def in_words(stored: Dict[str, Any], inventory: Inventory) -> str:
    """Say whether the baseline covers this host's GPUs."""
    if not inventory.gpus:
        return "none: the driver lists no GPU"
    missing = [gpu.index for gpu in inventory.gpus if _why_none(stored, inventory, gpu)]
    if not missing:
        return "recorded " + time.strftime("%Y-%m-%d %H:%M", time.localtime(stored["recorded_at"]))
    which = "" if len(missing) == len(inventory.gpus) else " for GPU " + ", ".join(str(index) for index in missing)
    return "none%s: a GPU counts as free at %d MiB or less" % (which, MOST_TOLERANCE_BYTES // MIB)


def counters(stored: Dict[str, Any], uuid: str, boot_id: str) -> Dict[str, Reading]:
    """Return what was recorded of a GPU beside its memory, without what a new boot has begun anew."""
    entry = stored["gpus"].get(uuid) or {}
    readings = {**entry.get("readings", {}), **{key: entry[key] for key, _ in KEYS if entry.get(key) is not None}}
    same_boot = bool(boot_id) and stored.get("boot_id") == boot_id
    return {name: Reading(value) for name, value in readings.items() if same_boot or name not in VOLATILE}


def store(
    inventory: Inventory,
    samples: Dict[int, List[Reading]],
    health: Optional[Dict[int, Dict[str, Reading]]] = None,
    kernel_log_seq: int = -1,
) -> Dict[str, Any]:
    """Write the baseline from SAMPLES readings of each GPU's memory, and what its health reads. Raises Refused where
    a memory could not be read; a health reading that failed is left out, and nothing is compared with it.
    `kernel_log_seq` is the newest record of the kernel's log: what it says up to there is known."""
    gpus = {}
    for gpu in inventory.gpus:
        readings = (health or {}).get(gpu.index, {})
        used_bytes, jitter_bytes = _memory(gpu.index, samples.get(gpu.index, []))
        gpus[gpu.uuid] = {
            "index": gpu.index, "bus_id": gpu.bus_id, "driver": inventory.driver, "memory_api": inventory.memory_api,
            "used_bytes": used_bytes, "jitter_bytes": jitter_bytes,
            **{key: getattr(gpu, key).number() for key, _ in KEYS},
            "readings": {name: readings[name].value for name in VOLATILE + LASTING
                         if name in readings and readings[name].ok},
        }  # fmt: skip
    record = {"schema": BASELINE_SCHEMA, "recorded_at": time.time(), "boot_id": procfs.boot_id(),
              "kernel_log_seq": kernel_log_seq, "gpus": gpus}  # fmt: skip
    write_json(path(), record)
    return record


def _memory(index: int, samples: List[Reading]) -> Tuple[Optional[int], Optional[int]]:
    """Return the median and the jitter of a GPU's memory; None for both where it does not report any."""
    if len(samples) >= SAMPLES and all(reading.unsupported for reading in samples):
        return None, None
    known = [int(value) for value in (reading.number() for reading in samples) if value is not None]
    if len(known) < SAMPLES or len(known) != len(samples):
        problem = next((reading.problem for reading in samples if not reading.ok), "no answer")
        raise Refused("baseline", "GPU %d: its memory could not be read: %s" % (index, problem))
    return int(statistics.median(known)), max(known) - min(known)
