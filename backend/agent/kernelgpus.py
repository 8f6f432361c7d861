"""The kernel module's own list of GPUs against the driver's: one that it has and NVML does not list is lost.

In a container /proc/driver/nvidia may show GPUs that were not given to it. Those have no device file there, and are
none of ours.
"""

from __future__ import annotations

import os
import re
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from backend.agent import procfs
from backend.agent.procfs import read_bytes
from backend.wire import GpuFacts

Fault = Tuple[str, str, str, bool]
Address = Tuple[int, int, int, int]
"""A PCI address: domain, bus, device, function."""


def faults(gpus: List[GpuFacts], root: str = "/") -> List[Fault]:
    """Return (what is wrong, what to do, the command that shows it, whether it stands in the way of use)."""
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    known = {_minor(os.path.join(folder, name, "information")): name for name in names}
    return [*_unlisted(gpus, known, root), *_without_file(gpus, root), *_with_nouveau(root)]


def withheld(root: str = "/") -> List[str]:
    """Return the addresses of the kernel module's GPUs that have no device file here: not given to this container."""
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    minors = {name: _minor(os.path.join(folder, name, "information")) for name in names}
    return [name for name, minor in minors.items() if minor >= 0 and not _exists(root, "nvidia%d" % minor)]


def _minor(path: str) -> int:
    found = re.search(rb"Device Minor:\s*(\d+)", read_bytes(path) or b"")
    return int(found.group(1)) if found else -1


def _unlisted(gpus: List[GpuFacts], known: Dict[int, str], root: str) -> Iterator[Fault]:
    """Find GPUs of the kernel module that NVML does not list. One that it lists without an address may be any."""
    listed = {address(gpu.bus_id) for gpu in gpus}
    lost = [(minor, bus) for minor, bus in sorted(known.items())
            if address(bus) not in listed and minor >= 0 and _exists(root, "nvidia%d" % minor)]  # fmt: skip
    for minor, bus in lost[sum(not gpu.bus_id for gpu in gpus) :]:
        text = "the kernel module has a GPU at %s (/dev/nvidia%d) that the driver does not list" % (bus, minor)
        yield text, "see dmesg | grep NVRM, then reboot the host", "ls /proc/driver/nvidia/gpus; nvidia-smi -L", True


def _without_file(gpus: List[GpuFacts], root: str) -> Iterator[Fault]:
    wanted = ["nvidiactl"] + ["nvidia%d" % gpu.minor for gpu in gpus if gpu.minor >= 0]
    for name in wanted:
        if not _exists(root, name):
            yield "/dev/%s is missing" % name, "sudo nvidia-modprobe -c 0 -u", "ls -l /dev/nvidia*", True
    if not _exists(root, "nvidia-uvm"):
        yield "/dev/nvidia-uvm is missing, which CUDA needs", "sudo nvidia-modprobe -u", "ls -l /dev/nvidia*", False


def _with_nouveau(root: str) -> Iterator[Fault]:
    try:
        bound = [name for name in os.listdir(os.path.join(root, "sys/bus/pci/drivers/nouveau")) if address(name)]
    except OSError:
        return
    for bus in sorted(bound):
        text = "the GPU at %s is bound to nouveau, which CUDA cannot use" % bus
        yield text, "deny nouveau and reboot the host", "ls /sys/bus/pci/drivers/nouveau", False


def _exists(root: str, name: str) -> bool:
    return os.path.exists(os.path.join(root, "dev", name))


def address(bus: str) -> Optional[Address]:
    """Read a PCI address, however many digits its domain is written with; without a function it is function 0.

    Domains are never folded into one: 0009:01:00 and 0019:01:00 are two GPUs.
    """
    found = re.match(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)(?:\.([0-9a-fA-F]+))?\Z", bus)
    if not found:
        return None
    domain, number, device, function = (int(part or "0", 16) for part in found.groups())
    return domain, number, device, function


def foreign(bus: Optional[Address], withheld: Sequence[Address]) -> bool:
    """Say whether a GPU that the driver does not list belongs to others: the kernel's log is the whole host's.

    Outside of containers every GPU is ours, and one that is not listed is lost. `withheld` are those that the kernel
    module has and that have no device file here.
    """
    return bus is not None and (bus in withheld or not procfs.in_initial_pid_namespace())


def written(where: Address) -> str:
    """Write a PCI address as lspci does."""
    return "%04x:%02x:%02x.%x" % where
