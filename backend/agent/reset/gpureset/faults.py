"""What a GPU reset would be for, and whether this boot has had one for the same.

A fault is known by its kind (`XID 48`, not one line of a log): where it comes again after a reset, a second reset is
no help, and facts section 7 says what is: a reboot, a power cycle, service.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, NamedTuple

from backend.agent import procfs
from backend.agent.files import read_json
from backend.agent.paths import state_dir
from backend.agent.reset.receipt import spare_folder
from backend.agent.reset.rules.case import Readings
from backend.agent.reset.rules.memory import ACTIONS
from backend.agent.xid.catalogue import FAIL, OFF_THE_BUS, RECOVERY_ACTION
from backend.agent.xid.lines import ADVICE, XID
from backend.wire import NOT_CLEAN, NOT_SUPPORTED, GpuVerdict, Receipt

HELD = "memory that no process holds"
REQUIRED = "the driver says that it must be reset"
POWER_CABLE = 54
INCURABLE_XIDS = (OFF_THE_BUS, POWER_CABLE)
INCURABLE_ACTIONS = (2, 6, 7)
"""What a GPU reset does not mend: a GPU off the bus or without its power cable, and what the driver wants more for."""

NOT_BEGUN = "in use"
"""The outcome that counts for nothing: nvidia-smi refused before it touched the GPU."""


class Earlier(NamedTuple):
    """A reset of a GPU that this boot has had."""

    receipt_id: str
    faults: List[str]
    outcome: str


def faults(verdict: GpuVerdict, receipt: Receipt, readings: Readings, held: bool) -> List[str]:
    """Name what asks for a reset of a GPU. `held` says that a process holds it, so that its memory is explained."""
    found = []
    if "reset required" in verdict.reason:
        found.append(REQUIRED)
    action = _number(readings, "recovery_action")
    if action:
        found.append("recovery action %d (%s)" % (action, ACTIONS.get(action, ("unknown",))[0]))
    rows = [row for row in receipt.xids if row.get("gpu") == verdict.index and row.get("level") == FAIL]
    found += sorted({"XID %d" % row["xid"] for row in rows
                     if row.get("kind") == XID and row["xid"] != RECOVERY_ACTION})  # fmt: skip
    if any(row.get("kind") == ADVICE for row in rows) and REQUIRED not in found:
        found.append(REQUIRED)
    if _number(readings, "remapped_pending") or _number(readings, "retired_pending"):
        found.append("a memory row or page that waits for a reset")
    for name, pending, said in (("ecc_mode", "ecc_mode_pending", "ECC"), ("mig", "mig_pending", "MIG")):
        now, then = _number(readings, name), _number(readings, pending)
        if now is not None and then is not None and now != then:
            found.append("%s mode that changes with a reset" % said)
    used, base = verdict.used_bytes.number(), verdict.baseline_bytes
    if verdict.verdict == NOT_CLEAN and not held and used is not None and used > (base or 0):
        found.append(HELD)
    return found


def incurable(found: List[str]) -> str:
    """Say why a reset would not help; empty where it may."""
    for number in INCURABLE_XIDS:
        if "XID %d" % number in found:
            return "XID %d is not mended by a reset" % number
    for number in INCURABLE_ACTIONS:
        if any(one.startswith("recovery action %d " % number) for one in found):
            return "the driver asks for %s, not for a GPU reset" % ACTIONS[number][0]
    return ""


def earlier(uuid: str) -> List[Earlier]:
    """Return the resets of a GPU that this boot has had, those that were interrupted too."""
    return [
        Earlier(str(data.get("id")), list(row.get("faults") or []), str(said.get("outcome") or ""))
        for data in _of_this_boot()
        for said in [data["gpu_reset"]]
        for row in said.get("gpus") or []
        if row.get("uuid") == uuid and said.get("begun") and said.get("outcome") != NOT_BEGUN
    ]


def newest_records() -> Dict[str, int]:
    """Return by bus address the kernel log's newest record before the last successful reset of a GPU in this boot."""
    found: Dict[str, int] = {}
    for data in _of_this_boot():
        said = data["gpu_reset"]
        for row in said.get("gpus") or []:
            if said.get("outcome") == "done" and row.get("bus"):
                found[row["bus"]] = max(found.get(row["bus"], -1), int(said.get("kernel_log_seq", -1)))
    return found


def _of_this_boot() -> Iterator[Dict[str, Any]]:
    boot = procfs.boot_id()
    for folder in filter(None, (state_dir("receipts"), spare_folder())):
        for name in sorted(os.listdir(folder)):
            if not name.endswith(".json"):
                continue
            try:
                data = read_json(os.path.join(folder, name))
            except (OSError, ValueError):
                continue  # `receipts list` says that it is unreadable
            if isinstance(data, dict) and boot and data.get("boot_id") == boot and data.get("gpu_reset"):
                yield data


def _number(readings: Readings, name: str) -> Any:
    value = readings.get(name, NOT_SUPPORTED).number()
    return None if value is None else int(value)
