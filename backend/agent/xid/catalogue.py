"""What each XID means, how bad it is, and what to do.

Numbers and meanings are those of NVIDIA's public XID catalogue and of nverror.h; how bad one is for a GPU that is to
start hours of work is weighed from NVIDIA's, DCGM's, AWS's and AzNHC's lists (facts: reset, section 6).
"""

from __future__ import annotations

from typing import Dict, Iterable, NamedTuple

FAIL, WARN, INFO = "fail", "warn", "info"
"""FAIL makes a GPU unhealthy; WARN is said beside its verdict; INFO is only written down."""

OWN_KILL = frozenset((13, 31, 43, 45, 174))
"""What ending a process in the middle of its kernels may leave behind; by nobody else's hand is it forgiven."""

SWITCH_TIMEOUT, OFF_THE_BUS, RECOVERY_ACTION = 109, 79, 154
"""109 may be left by a kill too, but only once, and only where the GPU computes afterwards."""

NVLINK5 = frozenset(range(144, 151))
"""Whose own line says whether it is fatal."""


class Meaning(NamedTuple):
    """One XID: how bad, what it is, what to do. `{address}` in the advice is what nvidia-smi takes after -i."""

    level: str
    text: str
    advice: str


RESTART = "restart the program that caused it; if other programs cause it on the same GPU too, run dcgmi diag -r 3"
WATCH = "nothing to do now; see whether it comes again"
RESET = "eightzeros reset --gpu-reset --gpu {address}, while nobody uses it; if it comes again, have the GPU serviced"
REBOOT = "reboot the host; if it comes again, have the GPU serviced"
LOST = "reboot the host, then try a power cycle; a GPU reset does not help; if it comes again, have it serviced"
LINKS = "reset every GPU that is linked to it; if it comes again, have the links serviced"
GSP = "eightzeros reset --gpu-reset --gpu {address}, once; where that is not enough, reboot, then power cycle"
REPORT = "keep the line for NVIDIA's support; if it comes again, have the GPU checked"
FOLLOW = "see nvidia-smi -q -i {address} for the recovery action that the driver asks for"

_TABLE: Dict[int, Meaning] = {}


def _add(level: str, advice: str, numbers: Iterable[int], text: str) -> None:
    _TABLE.update((number, Meaning(level, text, advice)) for number in numbers)


_add(WARN, RESTART, (13,), "exception in the graphics engine: a kernel did something illegal")
_add(WARN, RESTART, (31,), "MMU fault: a program touched memory that is not mapped")
_add(WARN, RESTART, (43,), "a program's channel was reset after an error of its own")
_add(WARN, RESTART, (45,), "a program's channels were removed, after another error or at its end")
_add(WARN, RESTART, (174,), "a channel was reset and its process ended")
_add(WARN, RESTART, (8,), "the GPU stopped working on a program's commands")
_add(WARN, RESTART, (11, 25, 32), "a program's command stream was invalid or damaged")
_add(WARN, RESTART, (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "fault of a copy engine")
_add(WARN, RESTART, (60, 68, 83, 84, 88, 89, 96, 97, 98), "fault of a video engine")
_add(WARN, RESTART, (69,), "a program gave the graphics engine an invalid class or method")
_add(WARN, RESTART, (80,), "damaged data was sent to the GPU")
_add(WARN, RESTART, (82, *range(99, 106)), "fault of a JPEG engine")
_add(WARN, RESTART, (86, 139), "fault of the optical flow engine")
_add(INFO, WATCH, (37, 38), "the driver's firmware took note of an error")
_add(INFO, WATCH, (44,), "fault of the graphics engine while it changed programs")
_add(INFO, WATCH, (66, 67), "the driver touched what it may not")
_add(INFO, WATCH, (93,), "the infoROM is written more often than planned")
_add(INFO, WATCH, (106, 107), "test message of the board's management interface")
_add(INFO, WATCH, (108, 141, 152, 153), "notice of the driver or its firmware")
_add(INFO, "look for the fault at its NVLink peers", (137,), "NVLink refused an access, often after a peer's fault")
_add(INFO, WATCH, (157, 160, 161), "notice of resources or channels taken out of use")
_add(INFO, WATCH, (162, 163, 164), "notice of the power smoothing circuit")
_add(WARN, WATCH, (165,), "fault of the power smoothing circuit")
_add(WARN, WATCH, (92,), "many single-bit memory errors")
_add(WARN, WATCH, (121,), "fault of the chip-to-chip link")
_add(WARN, "reset the GPU at the next pause, so that the row is replaced", (63,), "a memory row waits to be remapped")
_add(FAIL, RESET, (64,), "a memory row could not be remapped")
_add(FAIL, RESET, (48,), "double-bit memory error, which ECC cannot mend")
_add(FAIL, RESET, (171,), "uncorrectable error in the GPU's memory")
_add(FAIL, RESET, (172,), "uncorrectable error in the GPU's caches")
_add(WARN, "restart the program; reset the GPU at the next pause", (94,), "memory error, contained to one program")
_add(FAIL, RESET, (95,), "memory error that was not contained to one program")
_add(FAIL, RESET, (140,), "memory error from which the GPU could not recover")
_add(FAIL, RESET, (46,), "the GPU stopped answering in time")
_add(FAIL, RESET, (62,), "a microcontroller of the GPU halted")
_add(FAIL, RESET, (SWITCH_TIMEOUT,), "the GPU could not change programs in time")
_add(FAIL, RESET, (110,), "security fault")
_add(FAIL, RESET, (136,), "a link could not be trained")
_add(FAIL, RESET, (143,), "the GPU could not be initialised")
_add(FAIL, RESET, (155,), "NVLink error that the software reports")
_add(FAIL, RESET, (156,), "a resource of the GPU is taken out of use")
_add(FAIL, RESET, (158,), "fatal timeout in the GPU")
_add(FAIL, GSP, (119,), "the GPU's system processor (GSP) does not answer")
_add(FAIL, GSP, (120,), "error in the GPU's system processor (GSP)")
_add(FAIL, LINKS, (74,), "NVLink error")
_add(FAIL, LINKS, NVLINK5, "NVLink error")
_add(FAIL, "check the GPU's power cables", (54,), "auxiliary power is not connected")
_add(FAIL, LOST, (OFF_THE_BUS,), "the GPU has fallen off the bus")
_add(FAIL, "restart the virtual machine or the host", (151,), "error in the rotation of keys")
_add(FAIL, FOLLOW, (RECOVERY_ACTION,), "the driver changed the recovery action that it asks for")
_add(WARN, REPORT, (78,), "a virtual GPU could not be started")
_add(WARN, REPORT, (142,), "fault of a video encoder")
_add(WARN, "see dmesg | grep -i uvm", (159,), "error of the coherent interface to the processor")
_add(FAIL, RESET, (167,), "fatal PCIe timeout")
_add(FAIL, REBOOT, (168,), "less of the GPU's memory can be used than should be")
_add(FAIL, RESET, (169,), "a security processor of the GPU halted")
_add(FAIL, RESET, (173,), "fatal error of the chip-to-chip link")
_add(FAIL, RESET, (175,), "fault of the memory subsystem")
_add(WARN, WATCH, (176,), "PCIe fault that was mended")
_add(WARN, REPORT, (57, 58), "fault of the memory interface; the GPU may need service")
_add(WARN, REPORT, (125,), "fault of the infoROM; the GPU may need service")
_add(
    WARN, REPORT, (*range(1, 8), 56, 59, 61, 65, 73, 81, 87, 90, 91, *range(111, 119), 122, 123, 124, 138),
    "a number that NVIDIA leaves to its support",
)  # fmt: skip

SWITCH = "restart the fabric manager while every GPU is idle; if it comes again, reboot the host"
NVSWITCH_FATAL = Meaning(FAIL, "fatal error of an NVSwitch", SWITCH)
NVSWITCH_OTHER = Meaning(WARN, "error of an NVSwitch, not fatal", WATCH)
NEEDS_RESET = Meaning(FAIL, "the driver says that the GPU likely needs to be reset", GSP)
UNREADABLE = Meaning(WARN, "an XID whose line cannot be read", "see dmesg | grep NVRM")


def meaning(number: int) -> Meaning:
    """Say what an XID is. One that is not known is a warning, and called unknown."""
    return _TABLE.get(number, Meaning(WARN, "unknown XID", REPORT))
