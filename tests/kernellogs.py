"""A file in the kernel log's place: records as /dev/kmsg has them, written while the program under test reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

KERNEL, USER = 4, 12
"""Priority and facility as one number: a warning of the kernel's, and one of a user's."""


def record(seq: int, text: str, priority: int = KERNEL, at_s: float = 1.0) -> str:
    """Write one record with what the kernel adds to it."""
    return f"{priority},{seq},{int(at_s * 1e6)},-,caller=T30111;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:9d:00.0\n"


def xid(number: int, rest: str = "x", bus: str = "0000:1a:00") -> str:
    """Write the driver's words for an XID; the first GPU of the NVML double is at 0000:1a:00."""
    return f"NVRM: Xid (PCI:{bus}): {number}, {rest}"


class KernelLogFile:
    """Such a log, which begins with what a kernel says at boot."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        self.newest = -1
        self.say("Linux version 6.18")

    def say(self, *texts: str, priority: int = KERNEL) -> None:
        """Let the kernel say something now."""
        with self.path.open("a", encoding="utf-8") as file:
            for text in texts:
                self.newest += 1
                file.write(record(self.newest, text, priority, time.monotonic()))
