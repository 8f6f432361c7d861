"""How far an extraction is: a file for the run's supervisor, or lines for whoever started it by hand."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque

from backend.extraction.durable import DiskFull, replace_file
from backend.wire import GIB, Progress

RUN_DIR = "EIGHTZEROS_RUN_DIR"
"""Names the run's folder where a supervisor started this process; it reads progress.json there."""

FILE_EVERY_S = 0.5
LINE_EVERY_S, LOG_EVERY_S = 5.0, 30.0
WINDOW_S = 60.0
"""Rates are over the last minute (wire.Progress)."""


class Reporter:
    """Counts, and tells. `quiet` sends the lines to stderr, so that stdout holds one JSON object."""

    def __init__(self, out: str, quiet: bool = False) -> None:
        self.progress = Progress(at=time.time(), state="starting")
        self._out, self._lines = out, sys.stderr if quiet else sys.stdout
        self._folder = os.environ.get(RUN_DIR, "")
        self._history: deque[tuple[float, int, int, int]] = deque()
        self._done_now = (0, 0, 0)  # samples, tokens, bytes of this process: what was resumed has no rate
        self._file_at = self._line_at = 0.0

    def say(self, text: str) -> None:
        """Print one line now."""
        print(text, file=self._lines, flush=True)

    def advance(self, samples: int, tokens: int, size_bytes: int) -> None:
        """Count what was committed."""
        progress, now = self.progress, self._done_now
        progress.samples_done += samples
        progress.tokens_done += tokens
        progress.bytes_written += size_bytes
        progress.advanced_at = time.time()
        self._done_now = (now[0] + samples, now[1] + tokens, now[2] + size_bytes)

    def tell(self, state: str = "", message: str | None = None, force: bool = False) -> None:
        """Bring file or terminal up to date: at most twice a second, but at once where the state changes."""
        progress = self.progress
        force = force or bool(state and state != progress.state)
        progress.state = state or progress.state
        progress.message = progress.message if message is None else message
        now = time.monotonic()
        if force or now - self._file_at >= FILE_EVERY_S:
            self._file_at = now
            self._measure(now)
            if self._folder:
                self._write()
        if force or now - self._line_at >= (LOG_EVERY_S if self._folder else LINE_EVERY_S):
            self._line_at = now
            self.say(self._line())

    def _measure(self, now: float) -> None:
        progress = self.progress
        progress.at = time.time()
        self._history.append((now, *self._done_now))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        rates = [(last[i] - first[i]) / seconds if seconds > 0 else 0.0 for i in (1, 2, 3)]
        progress.samples_per_s, progress.tokens_per_s, progress.bytes_per_s = rates
        try:
            room = os.statvfs(self._out)
            progress.disk_free_bytes = room.f_bavail * room.f_frsize
        except OSError:
            progress.disk_free_bytes = None

    def _write(self) -> None:
        """Write progress.json. It is no evidence: it is not synced, and a failure here stops nothing."""
        try:
            data = json.dumps(vars(self.progress)).encode("ascii") + b"\n"
            replace_file(os.path.join(self._folder, "progress.json"), data, durable=False)
        except (OSError, DiskFull) as error:
            print(f"progress.json could not be written: {error}", file=sys.stderr, flush=True)

    def _line(self) -> str:
        p = self.progress
        eta = p.eta_s()
        parts = [
            f"{p.state}: {p.samples_done:,} of {p.samples_total:,} samples",
            f"{p.tokens_done:,} of {p.tokens_total:,} tokens",
            f"{p.tokens_per_s:,.0f} tokens/s",
            f"{p.bytes_written / GIB:.3f} GiB",
        ]
        parts += [f"{eta:,.0f} s left"] if eta else []
        parts += [f"{p.samples_failed} failed"] if p.samples_failed else []
        parts += [p.message] if p.message else []
        return " | ".join(parts)
