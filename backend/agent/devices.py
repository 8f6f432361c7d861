"""Which open files are NVIDIA devices, by device number: names under /dev may be anything in a container."""

from __future__ import annotations

import os
import stat as statmod
from typing import Dict, List, Optional, Tuple

from backend.agent import kernelgpus
from backend.agent.paths import state_dir
from backend.agent.procfs import read_bytes
from backend.agent.seam import DeviceTable
from backend.wire import GpuFacts

NVIDIA_MAJOR = 195
"""Fixed by the kernel's device list; minors 0 to 247 are GPUs, 254 is modeset, 255 is nvidiactl."""

LAST_GPU_MINOR = 247
DRIVER_NAMES = ("nvidia-uvm", "nvidia-caps", "nvidia-nvswitch", "nvidia-nvlink", "nvidia-caps-imex-channels")
"""Device families with dynamic majors, listed in /proc/devices (facts: reset, section 5)."""


class NvidiaDevices(DeviceTable):
    """The kernel's device numbers. Made anew for each scan, since a module may load later and get a major."""

    def __init__(self) -> None:
        self._majors = _dynamic_majors()
        self._render = _render_nodes()

    def hints(self) -> Tuple[str, ...]:
        """Return where device nodes may lie: under /dev, or named after the driver in a container's folder."""
        return ("/dev/", "nvidia")

    def gpus_of(self, st: os.stat_result) -> Optional[Tuple[int, ...]]:
        """Return the GPU minors behind an open file; None where it is no NVIDIA device."""
        if not statmod.S_ISCHR(st.st_mode):
            return None
        return self._of(os.major(st.st_rdev), os.minor(st.st_rdev))

    def gpus_of_map(self, device: Tuple[int, int], inode: int, path: str) -> Optional[Tuple[int, ...]]:
        """Return the minors behind a mapping. Maps give the filesystem's device, so the path is looked up."""
        if not path.startswith("/dev/"):
            return None
        try:
            return self.gpus_of(os.stat(path))
        except OSError:
            return () if path.startswith("/dev/nvidia") else None

    def faults(self, gpus: List[GpuFacts]) -> List[Tuple[str, str, str, bool]]:
        """Set the kernel module's list of GPUs and the device files against the driver's list."""
        return kernelgpus.faults(gpus)

    def scope(self) -> str:
        """Return nothing, for all GPUs of this machine; where its kernel has no driver there are none to share, and
        users need not wait for each other."""
        return "" if self._majors else state_dir()

    def withheld(self) -> List[str]:
        """Return the kernel module's GPUs that have no device file here."""
        return kernelgpus.withheld()

    def _of(self, major: int, minor: int) -> Optional[Tuple[int, ...]]:
        if major == NVIDIA_MAJOR:
            return (minor,) if minor <= LAST_GPU_MINOR else ()
        if major in self._majors:
            return ()
        return () if (major, minor) in self._render else None


def _dynamic_majors() -> Dict[int, str]:
    majors = {}
    for line in (read_bytes("/proc/devices") or b"").decode("ascii", "replace").split("\n"):
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and (name in DRIVER_NAMES or name.startswith("nvidia")):
            majors[int(number)] = name
    return majors


def _render_nodes() -> Dict[Tuple[int, int], str]:
    """Find the /dev/dri nodes of NVIDIA's PCI devices (vendor 0x10de)."""
    nodes = {}
    base = "/sys/class/drm"
    try:
        names = os.listdir(base)
    except OSError:
        return {}
    for name in names:
        vendor = read_bytes("%s/%s/device/vendor" % (base, name))
        number = (read_bytes("%s/%s/dev" % (base, name)) or b"").decode("ascii", "replace").strip()
        if vendor and vendor.strip() == b"0x10de" and ":" in number:
            major, minor = number.split(":")
            nodes[int(major), int(minor)] = name
    return nodes
