"""What the set of GPUs says: one that is missing is of no GPU that could be judged, but of the host."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.seam import DeviceTable
from backend.wire import Inventory

MISMATCH = "does not match the loaded kernel module"
"""The words of nvmlerrors.at_open for NVML code 18."""


def findings(stored: Dict[str, Any], inventory: Inventory, devices: DeviceTable) -> List[Finding]:
    """Say what is wrong with the host's set of GPUs. Where the driver lists none, only whether it is mismatched."""
    if MISMATCH in inventory.problem:
        return [Finding(inventory.problem, "reboot, or reload the NVIDIA modules", "cat /proc/driver/nvidia/version")]
    if not inventory.gpus:
        return []
    faults = [Finding(text, action, command, FAIL if fails else WARN)
              for text, action, command, fails in devices.faults(inventory.gpus)]  # fmt: skip
    return [*_against_baseline(stored, inventory), *faults]


def _against_baseline(stored: Dict[str, Any], inventory: Inventory) -> Iterator[Finding]:
    """Compare with the GPUs of the baseline. One whose UUID cannot be read is there, and judged by itself."""
    here = {gpu.uuid for gpu in inventory.gpus}
    nameless = sum(not gpu.uuid for gpu in inventory.gpus)
    missing = [(uuid, entry) for uuid, entry in sorted(stored["gpus"].items()) if uuid not in here]
    for uuid, entry in missing[nameless:]:
        text = "GPU %s is missing: it was GPU %s at the baseline, and the driver lists %d of %d" % (
            uuid, entry["index"], len(inventory.gpus), len(stored["gpus"]))  # fmt: skip
        action = "see dmesg | grep NVRM, then reboot the host; if it was taken out, record the baseline again"
        yield Finding(text, action, "nvidia-smi -L")
    for gpu in inventory.gpus if stored["gpus"] else ():
        if gpu.uuid and gpu.uuid not in stored["gpus"]:
            text = "GPU %d (%s) is not in the baseline" % (gpu.index, gpu.uuid)
            yield Finding(text, "record it again: eightzeros baseline record", "nvidia-smi -L", WARN)
