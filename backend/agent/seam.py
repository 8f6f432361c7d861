"""The seam between the agent and the machine: a Driver and a DeviceTable, passed by whoever starts the agent.

A real host gets NVML and the kernel's device numbers; the virtual host passes its own pair. Nothing chooses between
them by an environment variable, so that a real host can never be shown virtual readings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple

from backend.wire import GpuFacts, Inventory, Reading

HEALTH = (
    "ecc_corrected_dram_lifetime",
    "ecc_corrected_sram_lifetime",
    "sram_threshold_exceeded",  # 0 or 1, as the next
    "memory_unrepairable",
    "remapped_corrected",  # rows, over the GPU's life
    "remapped_uncorrected",
    "retired_single_bit",  # pages, over the GPU's life: before Ampere
    "retired_double_bit",
    "retired_pending",  # 0 or 1, as the next four
    "ecc_mode",
    "ecc_mode_pending",
    "mig_pending",
    "inforom_valid",
    "compute_mode",  # nvmlComputeMode_t; 0 is the default
    "slowdown_offset_c",  # the thermal margin at which the hardware slows down, -2 on an H200
    "power_limit_default_w",
    "pcie_width_max",
    "pcie_gen_max",
    "pcie_replays",  # counts since the driver was loaded, as the next four
    "nvlink_crc_flit_errors",
    "nvlink_crc_data_errors",
    "nvlink_replays",
    "nvlink_recoveries",
    "nvlink_active",  # one bit a link
    "fabric_state",  # nvmlGpuFabricState_t; 3 is completed
    "fabric_status",  # nvmlReturn_t
    "fabric_health",  # NVML_GPU_FABRIC_HEALTH_SUMMARY_*; 1 is healthy
)
"""What a verdict asks for beside `wire.LEAN` and `wire.SLOW`: several milliseconds a GPU, so never once a second."""


class DriverError(Exception):
    """The driver as a whole cannot be used: no library, a version mismatch, no permission. Says why in words."""


@dataclass
class ContextList:
    """Who the driver says holds a context on one GPU: (pid, bytes, kind); `problem` where a list failed."""

    processes: List[Tuple[int, Reading, str]] = field(default_factory=list)
    problem: str = ""


class Driver:
    """What the agent asks of a GPU driver. Every method runs in a disposable child and may block for ever.

    One instance is opened once, in the child. A GPU is named by its index. A reading that fails is a failed
    Reading, never an exception; only `open` raises, with DriverError.
    """

    virtual = False

    skip: FrozenSet[int] = frozenset()
    """GPUs that `open` must list (with a problem) and not touch, because they hung before."""

    opening: Optional[Callable[[int], None]] = None
    """Where set, `open` calls it before it touches a GPU, so that a hang there is put down to that GPU."""

    def open(self) -> Inventory:
        """Initialise the driver and list its GPUs. Raises DriverError where nothing can be read at all."""
        raise NotImplementedError

    def lean(self, index: int) -> Tuple[Dict[str, Reading], ContextList]:
        """Read the 1 Hz set (`wire.LEAN`) and the compute list."""
        raise NotImplementedError

    def slow(self, index: int) -> Dict[str, Reading]:
        """Read the slow set (`wire.SLOW`)."""
        raise NotImplementedError

    def health(self, index: int) -> Dict[str, Reading]:
        """Read the error records, links and settings of `HEALTH`. A driver that has none of them says nothing."""
        return {}

    def listen(self, registered: Callable[[str], None], raised: Callable[[int, int], None]) -> None:
        """Tell each XID (GPU index, number) through `raised`, for ever, in a thread beside the readings.

        Calls `registered` once: with an empty text from when on XIDs are told, else with why there will be none, and
        then returns.
        """
        registered("this driver has no events")

    def occupancy(self, index: int) -> Tuple[Reading, ContextList]:
        """Read memory used (v2, bytes) and the union of the compute, graphics and MPS lists: what clearance polls."""
        raise NotImplementedError


class DeviceTable:
    """Which open files belong to which GPU.

    `gpus_of(st)` takes the os.stat_result of an open file and returns None where it is no GPU device, else the
    device minors of the GPUs it belongs to; an empty tuple stands for a device of the driver that belongs to no one
    GPU (nvidiactl, nvidia-uvm).
    """

    def hints(self) -> Tuple[str, ...]:
        """Return text of which some part stands in the path of every such file; empty: any path may be one.

        Numbers decide, not names: hints only spare a scan from asking files that cannot be devices, some of which
        may lie on a filesystem that no longer answers.
        """
        return ()

    def gpus_of(self, st: os.stat_result) -> Optional[Tuple[int, ...]]:
        """Return the minors behind an open file."""
        raise NotImplementedError

    def gpus_of_map(self, device: Tuple[int, int], inode: int, path: str) -> Optional[Tuple[int, ...]]:
        """Return the minors behind a line of /proc/PID/maps: (major, minor) of its device, inode and path."""
        raise NotImplementedError

    def faults(self, gpus: List[GpuFacts]) -> List[Tuple[str, str, str, bool]]:
        """Say what is wrong with the devices of the GPUs that the driver lists, or with one that it does not list:
        (reason, action, command, whether it stands in the way of use)."""
        return []

    def scope(self) -> str:
        """Return the folder of a host of its own that is reset by itself; empty: the real GPUs of this machine."""
        return ""

    def withheld(self) -> List[str]:
        """Return the PCI addresses of the host's GPUs that were not given to this container."""
        return []


@dataclass
class Machine:
    """The injected pair, and how to start this same program again in another role (argv before the role's name).

    `cuda_library` is what the CUDA test loads; empty: this machine has none, and its GPUs are not tested.
    `kernel_log` is the file with what the driver says to the kernel; empty: no driver here says anything to it.
    `smi` are the words that start nvidia-smi, which alone can reset a GPU; empty: the GPUs of this machine have none.
    `host_root` is where /proc, /sys and /dev lie that say what this host is.
    """

    driver: Callable[[], Driver]
    devices: Callable[[], DeviceTable]
    relaunch: List[str]
    virtual: bool = False
    cuda_library: str = ""
    kernel_log: str = ""
    smi: List[str] = field(default_factory=list)
    host_root: str = "/"
