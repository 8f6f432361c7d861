"""Whether a GPU that is free may be used: what its own error records ask for (facts: reset, section 7)."""

from __future__ import annotations

from typing import Dict, List

from backend.agent.reset.finding import Finding
from backend.agent.reset.watch import Watch
from backend.wire import NOT_READ, Reading

Readings = Dict[str, Reading]

ACTIONS = {
    1: ("a GPU reset", "sudo nvidia-smi --gpu-reset -i {address}"),
    2: ("a reboot of the host", "reboot the host"),
    3: ("draining its peer-to-peer traffic", "stop every job that uses its peers, then verify again"),
    4: ("a drain, then a GPU reset", "stop every job on it, then sudo nvidia-smi --gpu-reset -i {address}"),
    5: ("recovery of IMEX", "restart the nvidia-imex service"),
    6: ("a bus reset", "reboot the host"),
    7: ("a system reboot", "reboot the host"),
}
"""nvmlDeviceGpuRecoveryAction; a number that is not known here is never taken for healthy."""


def means_gone(problem: str) -> bool:
    """Say whether a failed reading means that the GPU as a whole is gone (the words of NVML codes 15 and 16)."""
    return "GPU is lost" in problem or "reset required" in problem


def read(watch: Watch) -> Dict[int, Readings]:
    """Read the health of every GPU that answers."""
    found: Dict[int, Readings] = {index: dict(values) for index, values in watch.read("slow").items()}
    for index, (lean, _contexts) in watch.read("lean").items():
        found.setdefault(index, {})["ecc_uncorrected"] = lean.get("ecc_uncorrected", NOT_READ)
    return found


def findings(address: str, before: Readings, after: Readings) -> List[Finding]:
    """Say what is wrong with a GPU: its records now, and what grew since before the reset."""
    found = []
    gone = [reading.problem for reading in after.values() if means_gone(reading.problem)]
    if gone:
        found.append(Finding(gone[0], "reboot the host; if it stays away, have it serviced", "nvidia-smi -L"))
    action = after.get("recovery_action", NOT_READ)
    number = action.number()
    if number:
        unknown = ("action %d, which this version does not know" % number, "reboot the host")
        what, how = ACTIONS.get(int(number), unknown)
        found.append(Finding("the driver asks for %s" % what, how.format(address=address),
                             "nvidia-smi -q -i %s" % address))  # fmt: skip
    rows = "nvidia-smi --query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure --format=csv"
    if after.get("remapped_failed", NOT_READ).number():
        found.append(Finding("a row of its memory could not be remapped", "have the GPU replaced", rows))
    if after.get("remapped_pending", NOT_READ).number():
        text = "sudo nvidia-smi --gpu-reset -i %s, while nobody uses it" % address
        found.append(Finding("a row of its memory waits to be remapped", text, rows))
    grown = _grown(before, after)
    if grown:
        shown = "nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv -i %s" % address
        found.append(Finding("%d uncorrectable memory errors during the reset" % grown,
                             "sudo nvidia-smi --gpu-reset -i %s" % address, shown))  # fmt: skip
    return found


def unread(after: Readings) -> List[str]:
    """Name the records that should have been readable and were not. What a GPU does not offer is no gap."""
    names = ("recovery_action", "remapped_failed", "remapped_pending", "ecc_uncorrected")
    said = {"recovery_action": "recovery action", "remapped_failed": "failed row remaps",
            "remapped_pending": "pending row remaps", "ecc_uncorrected": "uncorrectable errors"}  # fmt: skip
    return [
        "%s: %s" % (said[name], after.get(name, NOT_READ).problem) for name in names if after.get(name, NOT_READ).failed
    ]


def _grown(before: Readings, after: Readings) -> int:
    old = before.get("ecc_uncorrected", NOT_READ).number()
    new = after.get("ecc_uncorrected", NOT_READ).number()
    return int(new - old) if old is not None and new is not None and new > old else 0
