"""The kernel log's records of the GPU driver, read without waiting; where it cannot be read, it says why.

Only what the kernel itself wrote is believed: whoever may write to /dev/kmsg can write the driver's words, but not
with the kernel's facility.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import List, NamedTuple

DEVICE = "/dev/kmsg"
DEVICE_NUMBER = (1, 11)
"""Some containers put a console or /dev/null in its place, whose silence would look like a clean log."""

RECORD_BYTES = 1 << 16
"""Above the longest record, which the kernel limits to some kilobytes; a smaller buffer is refused."""

AT_ONCE = 2000
"""Records read in one call of `read`, some milliseconds of them."""

WHOLE_S = 2.0
"""How long `read_all` may take: a full ring of 16 MiB is read in well under a second."""

_HEAD = re.compile(rb"(\d+),(\d+),(\d+),[^;]*;(.*)\Z", re.S)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_OF_THE_DRIVER = (b"NVRM: ", b"nvidia-nvswitch")


class Record(NamedTuple):
    """One record: its number since boot, its time in seconds on the log's own clock since boot, and its text."""

    seq: int
    at_s: float
    text: str

    def wall(self) -> float:
        """Return its wall time. The log's clock may drift some seconds a day from the others (dmesg(1), -T)."""
        return time.time() - (time.monotonic() - self.at_s)


class KernelLog:
    """Reads the records in order, from the oldest that the kernel still has.

    `problem` says why it is unreadable, and then nothing is known. `since_s` is the log's time of the oldest record
    and `from_boot` whether that is the first since boot; `lost` is how often records went before they were read;
    `behind` says that there is more to read at this moment; `newest_seq` is the newest record read.
    """

    def __init__(self, path: str = DEVICE) -> None:
        self.path = path
        self.problem = ""
        self.since_s, self.from_boot = 0.0, False
        self.lost, self.newest_seq, self.behind = 0, -1, True
        self._fd, self._rest = -1, b""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError as error:
            self._give_up(_why(path, error))
            return
        number = (os.major(found.st_rdev), os.minor(found.st_rdev))
        if path == DEVICE and not (stat.S_ISCHR(found.st_mode) and number == DEVICE_NUMBER):
            self._give_up("%s is not the kernel's log here, but something else in its place" % path)

    def close(self) -> None:
        """Let go of the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, most: int = AT_ONCE) -> List[Record]:
        """Return the driver's records that have come since the last call, looking at so many records at most."""
        found: List[Record] = []
        looked = 0
        while self._fd >= 0 and looked < most:
            try:
                data = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                return self._caught_up(found)
            except OSError as error:
                if error.errno != errno.EPIPE:
                    self._give_up(_why(self.path, error))
                    return found
                self.lost += 1
                continue  # the ring went round: it goes on at the oldest that is left
            if not data:
                return self._caught_up(found)
            *lines, self._rest = (self._rest + data).split(b"\n")
            looked += len(lines)
            for line in lines:
                self._take(line, found)
        self.behind = self._fd >= 0
        return found

    def read_all(self) -> List[Record]:
        """Read up to the newest record, for WHOLE_S at the longest; `problem` says where that was not enough."""
        end = time.monotonic() + WHOLE_S
        found = self.read()
        while self.behind and time.monotonic() < end:
            found += self.read()
        if self.behind and not self.problem:
            self.problem = "the kernel log is read only in part, because it grows faster than it can be read"
        return found

    def _caught_up(self, found: List[Record]) -> List[Record]:
        self.behind = False
        if self.newest_seq < 0:
            self._give_up("%s is empty, which no kernel's log is" % self.path)
        return found

    def _take(self, line: bytes, found: List[Record]) -> None:
        """Take one line: a record, or (indented) what belongs to the one before."""
        head = _HEAD.match(line) if not line.startswith(b" ") else None
        if head is None:
            return
        number, at_s, text = int(head.group(2)), int(head.group(3)) / 1e6, head.group(4)
        if self.newest_seq < 0:
            self.since_s, self.from_boot = at_s, number == 0
        self.newest_seq = number
        if int(head.group(1)) >> 3 == 0 and text.startswith(_OF_THE_DRIVER):
            plain = _ESCAPE.sub(lambda escape: bytes((int(escape.group(1), 16),)), text)
            found.append(Record(number, at_s, plain.decode("utf-8", "replace")))

    def _give_up(self, why: str) -> None:
        self.problem = "the kernel log is unreadable, because %s" % why
        self.behind = False
        self.close()


def _why(path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "%s is for root, or for a process with CAP_SYSLOG (kernel.dmesg_restrict)" % path
    if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        return "there is no %s here (in a container, give it that device and CAP_SYSLOG)" % path
    return "%s: %s" % (path, error.strerror or error)
