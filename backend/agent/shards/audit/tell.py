"""How far an audit is: progress.json for the run's supervisor, and a line now and then for who looks at its output."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Deque, Dict, Tuple

from backend.agent.progress import write_progress
from backend.agent.runtree import RUN_DIR_ENV
from backend.wire import Progress

FILE_EVERY_S = 0.5
LINE_EVERY_S, LOG_EVERY_S = 2.0, 30.0
WINDOW_S = 60.0
"""Rates are over the last minute (wire.Progress)."""

MAX_KINDS = 4


class Teller:
    """Counts files, and tells. The lines go to stderr where stdout is to hold one JSON object."""

    def __init__(self, quiet: bool) -> None:
        self._dir = os.environ.get(RUN_DIR_ENV, "")
        self._lines = sys.stderr if quiet else sys.stdout
        self.progress = Progress(at=time.time(), state="starting")
        self._history: Deque[Tuple[float, int]] = deque()
        self._looked = 0
        self._file_at = self._line_at = 0.0
        self._faults: Dict[str, int] = {}

    def begin(self, files: int, cached: int) -> None:
        """Set what there is to do: files seen earlier, which have not changed, are done."""
        self.progress.samples_total, self.progress.samples_done = files, cached
        self.progress.samples_resumed = cached
        self.tell("running", force=True)

    def looked(self, codes: Dict[str, None]) -> None:
        """Count one file and the kinds of faults in it."""
        self._looked += 1
        self.progress.samples_done += 1
        self.progress.advanced_at = time.time()
        if codes:
            self.progress.samples_failed += 1
        for code in codes:
            self._faults[code] = self._faults.get(code, 0) + 1
        self.tell()

    def say(self, text: str) -> None:
        """Print one line now."""
        print(text, file=self._lines, flush=True)

    def tell(self, state: str = "", message: str = "", force: bool = False) -> None:
        """Bring file and lines up to date, each in its own time."""
        now, progress = time.monotonic(), self.progress
        force = force or (bool(state) and state != progress.state)
        if not force and now - self._file_at < FILE_EVERY_S:
            return
        self._file_at = now
        progress.state, progress.at = state or progress.state, time.time()
        progress.message = message or self._words()
        self._history.append((now, self._looked))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        before, seconds = self._history[0][1], now - self._history[0][0]
        progress.samples_per_s = (self._looked - before) / seconds if seconds > 0 else 0.0
        if self._dir:
            problem = write_progress(self._dir, progress)
            if problem:
                self.say(problem)
        if force or now - self._line_at >= (LOG_EVERY_S if self._dir else LINE_EVERY_S):
            self._line_at = now
            self.say(self._line())

    def _words(self) -> str:
        """Name the kinds of faults so far."""
        if not self._faults:
            return "no fault so far"
        kinds = sorted(self._faults.items(), key=lambda item: -item[1])
        named = ", ".join("%d %s" % (number, code) for code, number in kinds[:MAX_KINDS])
        return "faults so far: " + named + (" ..." if len(kinds) > MAX_KINDS else "")

    def _line(self) -> str:
        p = self.progress
        eta = p.eta_s()
        parts = ["%s: %d of %d files" % (p.state, p.samples_done, p.samples_total), "%.0f files/s" % p.samples_per_s]
        parts += ["%.0f s left" % eta] if eta else []
        return " | ".join([*parts, p.message])
