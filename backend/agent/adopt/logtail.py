"""The end of a log that somebody else writes: whole lines as they come, across truncation and rotation."""

from __future__ import annotations

import os
from typing import List

from backend.agent.runlog import shown

FIRST_BYTES = 256 * 1024
"""How much of what was there before is read: enough for the last minutes of batches."""

PIECE_BYTES = 1 << 20


class LogTail:
    """One log. `newest` is its last line that says something, safe to show.

    With `bars` a carriage return ends a line too, so that a progress bar that never ends its line is read as it moves.
    """

    def __init__(self, path: str, bars: bool = False) -> None:
        self.path = path
        self._bars = bars
        self.newest = ""
        self.problem = ""
        self.written_at = 0.0
        self._at = -1
        self._inode = 0
        self._rest = b""

    def read(self) -> List[str]:
        """Return the lines that are new; none where the log cannot be read."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                begin = self._begin(found)
                file.seek(begin)
                data = file.read(PIECE_BYTES)
        except OSError as error:
            self.problem = "%s: %s" % (self.path, error.strerror)
            return []
        self.problem, self._at, self._inode = "", begin + len(data), found.st_ino
        self.written_at = found.st_mtime
        if self._bars:
            data = data.replace(b"\r", b"\n")
        whole = (self._rest + data).split(b"\n")
        self._rest = whole.pop()[-PIECE_BYTES:]
        lines = [shown(line) for line in whole]
        for line in [*lines, shown(self._rest)]:
            self.newest = line.strip()[:300] or self.newest
        return lines

    def _begin(self, found: os.stat_result) -> int:
        if self._at < 0:
            return max(0, found.st_size - FIRST_BYTES)
        if found.st_ino != self._inode or found.st_size < self._at:
            self._rest = b""  # rotated or emptied: it begins anew
            return 0
        return self._at
