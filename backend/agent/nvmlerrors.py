"""NVML's return codes in words: what a failed call means for a reading, and what to do where nothing can be read."""

from __future__ import annotations

import re

from backend.agent.procfs import read_bytes
from backend.wire import NOT_SUPPORTED, Reading, failed

UNSUPPORTED_CODES = (3, 13, 22)  # NOT_SUPPORTED, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED
VERSION_CODES = (13, 25)  # FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH
GONE_CODES = (15, 16)  # GPU_IS_LOST, RESET_REQUIRED
WORDS = {
    1: "NVML is not initialised",
    2: "NVML refuses the argument",
    3: "unsupported",
    4: "no permission",
    6: "not found",
    7: "the list grew while it was read",
    9: "the driver is not loaded",
    10: "the driver timed out",
    11: "the kernel reports an interrupt problem of the GPU",
    13: "unsupported",
    14: "the GPU's infoROM is corrupted",
    15: "GPU is lost",
    16: "reset required",
    17: "the operating system blocks the GPU",
    18: "library and kernel module are of different versions",
    19: "in use",
    20: "the driver is out of memory",
    21: "no data",
    22: "unsupported with virtual GPUs",
    27: "not ready",
    28: "GPU not found",
    999: "the driver reports an unknown error",
}
"""nvmlReturn_t (nvml.h). "lost" and "reset" are what the console's badges look for (backend/fleet/state.py)."""


def words(code: int) -> str:
    """Say what a code means, with the code."""
    return "%s (NVML %d)" % (WORDS.get(code, "the driver reports an error"), code)


def reading(code: int) -> Reading:
    """Return what stands for a reading that failed with a code."""
    return NOT_SUPPORTED if code in UNSUPPORTED_CODES else failed(words(code))


def gpu_is_gone(code: int) -> bool:
    """Say whether a code means the GPU as a whole, so that no other call to it will do better."""
    return code in GONE_CODES


def no_such_version(code: int) -> bool:
    """Say whether a code means that the library has no such version of a call."""
    return code in VERSION_CODES


def at_open(code: int) -> str:
    """Say why NVML could not be initialised and what to do."""
    module = kernel_module()
    if code == 12:
        return (
            "libnvidia-ml.so.1 was not found: install the NVIDIA driver's user libraries"
            + (" of version %s, as the kernel module" % module if module else "")
            + "; in a container, start it with the GPUs (docker run --gpus all)"
        )
    if code == 9:
        return "the NVIDIA kernel module is not loaded: run `modprobe nvidia` as root and see `dmesg | grep NVRM`"
    if code == 18:
        return (
            "the NVIDIA library does not match the loaded kernel module%s: the driver was upgraded under it; reboot, "
            "or stop every GPU process and reload the module (`rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia`, "
            "`modprobe nvidia`)" % (" (%s)" % module if module else "")
        )
    if code == 4:
        return "no permission to use the NVIDIA driver: check `ls -l /dev/nvidia*` and this user's groups"
    return "the NVIDIA driver cannot be initialised: %s; see `dmesg | grep -i nvrm`" % words(code)


def no_gpus(driver: str) -> str:
    """Say what it means that a driver answers and lists nothing."""
    return (
        "driver %s answers but lists no GPU: see `lspci -d 10de:` and `dmesg | grep NVRM`; in a container, "
        "check NVIDIA_VISIBLE_DEVICES" % (driver or "of unknown version")
    )


def kernel_module() -> str:
    """Return the version of the loaded kernel module; empty where none is loaded."""
    said = (read_bytes("/proc/driver/nvidia/version") or b"").decode("ascii", "replace")
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", said)
    return found.group(0) if found else ""
