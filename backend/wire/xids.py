"""XIDs as a console is told of them: what the GPU driver said of errors, since boot and as it says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class Xid:
    """One error that the driver told of, `count` times within a second, `at` wall seconds.

    `id` is the same for the same record of the kernel's log whoever reads it, so that a console which comes back tells
    old from new. `gpu` is None where it is none of the driver's list; `where` then names the device. `level` is info,
    warn or bad; `text` says what it means, `advice` what to do; `pid` and `name` are whom the line names.
    """

    id: str
    at: float
    gpu: Optional[int]
    where: str
    number: int
    level: str
    text: str
    advice: str = ""
    pid: Optional[int] = None
    name: str = ""
    count: int = 1

    def in_words(self) -> str:
        """Say it in one line."""
        times = "" if self.count == 1 else ", %d times" % self.count
        who = "" if self.pid is None else ", by process %d%s" % (self.pid, " (%s)" % self.name if self.name else "")
        return "%s: %s%s%s" % (self.where, self.text, times, who)
