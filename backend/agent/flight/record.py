"""The record of one host on disk: a ladder of resolutions and the events, kept within a budget of bytes."""

from __future__ import annotations

import os
import time
from typing import Dict, List, Optional

from backend.agent.flight.coarse import Coarse
from backend.agent.flight.events import EventLog
from backend.agent.flight.level import Level
from backend.wire.flight import FlightEvent, Row, Value

LADDER = ((1, 60, 0.70), (10, 600, 0.20), (60, 3600, 0.10))
"""The steps in seconds, what a block of each covers, and its share of the budget. A block's span holds whole spans of
the next coarser step, so that a new recorder finds in the tails all that a coarse row still needs."""

MOST_BYTES = 256 << 20
SHARE_OF_FREE = 0.05
"""The record takes at most this part of what is free (with what it has): it is never what fills a disk."""

CHECK_EVERY_ROWS = 60


class Record:
    """Appends rows and events. What the disk does not take is lost and counted, and nothing else goes wrong."""

    def __init__(self, folder: str, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._levels = [Level(folder, step_s, span_s) for step_s, span_s, _ in LADDER]
        self._coarse = [Coarse(step_s) for step_s, _, _ in LADDER[1:]]
        self._log = EventLog(folder)
        self._unchecked = CHECK_EVERY_ROWS  # what is there already may be over a budget that shrank
        self._lost = 0
        self._last_at = self.newest_at
        self._unwritten: List[FlightEvent] = []
        for at, values in self._levels[0].rows:
            for coarse in self._coarse:
                coarse.feed(at, values)

    @property
    def newest_at(self) -> float:
        """Return when the newest row of the tail was, 0 where there is none."""
        rows = self._levels[0].rows
        return rows[-1][0] if rows else 0.0

    def append(self, at: float, values: Dict[str, Value]) -> None:
        """Add the row of a second, and the coarser rows that it completes."""
        at = round(at, 1)
        if at == self._last_at:  # what is known of new GPUs is told at once, within the tenth of the row before
            at = round(at + 0.1, 1)
        self._last_at = at
        self._write(self._levels[0], (at, values))
        for level, coarse in zip(self._levels[1:], self._coarse):
            self._write(level, coarse.feed(at, values))
        self._unchecked += 1
        if self._unchecked > CHECK_EVERY_ROWS:
            self._unchecked = 0
            self.keep_within_budget()

    def event(self, event: FlightEvent) -> None:
        """Add an event; on a full disk it waits."""
        self._unwritten = [*self._unwritten, event][-1000:]
        while self._unwritten:
            try:
                self._log.append(self._unwritten[0])
            except OSError:
                return
            self._unwritten.pop(0)

    def keep_within_budget(self) -> None:
        """Drop the oldest segments of each step that is over its share."""
        try:
            sizes = [level.size_bytes() for level in self._levels]
            budget = budget_bytes(self._folder, sum(sizes), self._most_bytes)
            for level, size, (_, _, share) in zip(self._levels, sizes, LADDER):
                while size > budget * share and (dropped := level.drop_oldest()):
                    size -= dropped
        except OSError:
            pass  # a segment that went meanwhile; it is looked at again in a minute

    def close(self) -> None:
        """Let go of the files; the newest rows stay in the tails."""
        for level in self._levels:
            level.close()

    def _write(self, level: Level, row: Optional[Row]) -> None:
        if row is None:
            return
        try:
            level.append(*row)
        except OSError as error:
            if not self._lost:
                text = "the flight record cannot be written: %s" % error.strerror
                self.event(FlightEvent(time.time(), "recorder", "warn", text))
            self._lost += 1
            self._levels[0].drop_oldest()
        else:
            if self._lost and level is self._levels[0]:
                text = "the flight record is written again; %d rows were lost" % self._lost
                self._lost = 0
                self.event(FlightEvent(time.time(), "recorder", "warn", text))


def budget_bytes(folder: str, used_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    """Return what the record may take on its disk at this moment."""
    room = os.statvfs(folder)
    return min(most_bytes, int((room.f_bavail * room.f_frsize + used_bytes) * SHARE_OF_FREE))
