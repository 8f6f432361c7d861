"""The server's output: straight into the run's log, and read from there, so that nothing blocks the server."""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from collections import deque

from backend.extraction.serving.logtext import OUR_MARK, clean

KEPT_FIRST, KEPT_LAST = 500, 3000
"""Lines kept for finding a cause: how it began, and how it ended."""

LONGEST_BYTES = 8192
_UNPRINTABLE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[@-_])|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]")


class Log:
    """Where the server writes. `fd` is what it gets; only what comes after this start is read.

    Under a supervisor standard output is the run's log, a file. By hand it may be a terminal or a pipe: then the
    server writes to a temporary file, and what is read is passed on.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        here = os.fstat(1)
        self._echo = not stat.S_ISREG(here.st_mode)
        if self._echo:
            handle, self._path = tempfile.mkstemp(prefix="eightzeros-serve-", suffix=".log")
            self.fd = handle
        else:
            self.fd, self._path = 1, "/proc/self/fd/1"
        self._reader = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        if self._echo:
            os.unlink(self._path)
        os.lseek(self._reader, 0 if self._echo else here.st_size, os.SEEK_SET)
        self._rest = b""
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=KEPT_LAST)
        self.newest = ""

    @property
    def lines(self) -> list[str]:
        """Return the lines that were kept."""
        return [*self._first, *self._last]

    def read(self) -> None:
        """Take what is new."""
        while True:
            data = os.read(self._reader, 1 << 20)
            if not data:
                break
            if self._echo:
                sys.stdout.write(data.decode("utf-8", "replace"))
                sys.stdout.flush()
            *whole, rest = (self._rest + data).split(b"\n")
            self._rest = rest[-LONGEST_BYTES:]
            for line in whole:
                self._take(line)
        if self._rest:
            self._show(self._rest)

    def finish(self) -> None:
        """Take the last line too, which may have no end."""
        self.read()
        if self._rest:
            self._take(self._rest)
            self._rest = b""

    def _take(self, line: bytes) -> None:
        text = line[:LONGEST_BYTES].decode("utf-8", "replace")
        if text.startswith(OUR_MARK):
            return
        if len(self._first) < KEPT_FIRST:
            self._first.append(text)
        else:
            self._last.append(text)
        self._show(line)

    def _show(self, line: bytes) -> None:
        text = _UNPRINTABLE.sub("", clean(line[-LONGEST_BYTES:].decode("utf-8", "replace"))).strip()
        if text and not text.startswith(OUR_MARK):
            self.newest = text[:300]

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._reader)
        if self._echo:
            os.close(self.fd)


def say(text: str) -> None:
    """Write a line of our own into the log."""
    print(OUR_MARK + text, flush=True)
