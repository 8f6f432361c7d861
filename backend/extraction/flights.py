"""The samples of a concurrent extraction: which is next, which are under way, and how often each was tried."""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backend.extraction.corpus import Row
    from backend.extraction.staging import Staged

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Before a sample is tried again: doubled each time."""

SUSPECT_CRASHES = 2
"""So often may a server go away with a sample in flight by chance: whoever starts servers stops them too."""


@dataclass
class Flight:
    """One sample. `row` and `rid` are set while it is under way; `answered_at` is 0 while the server works on it.

    `attempts` numbers the requests, so that no rid is used twice; `failures` counts those that were nobody
    else's fault, and only they are limited. `broken` is why its connection broke, until it is known whether the
    server went away; `crashes` counts how often it did with this sample in flight.
    """

    index: int
    tokens: int
    staged_bytes: int
    file_bytes: int
    attempts: int = 0
    failures: int = 0
    reason: str = ""
    rid: str = ""
    row: Row | None = None
    sent_at: float = 0.0
    answered_at: float = 0.0
    staged: Staged | None = None
    written: bool = False
    broken: str = ""
    crashes: int = 0

    @property
    def suspect(self) -> bool:
        """Say whether this sample may be what the server dies of: then it is sent alone, to know."""
        return self.crashes >= SUSPECT_CRASHES


class Flights:
    """Every sample of a run, in the order of the run. For one thread."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.under_way: dict[str, Flight] = {}
        self._next = deque(indices)
        self._again: list[tuple[float, int, Flight]] = []
        self._asked: set[str] = set()

    @property
    def asked(self) -> int:
        """Return how many requests the server has not answered."""
        return len(self._asked)

    @property
    def staged_bytes(self) -> int:
        """Return what everything under way takes in the staging folder, at most."""
        return sum(flight.staged_bytes for flight in self.under_way.values())

    @property
    def file_bytes(self) -> int:
        """Return what everything under way still needs of the disk."""
        return sum(flight.file_bytes for flight in self.under_way.values() if not flight.written)

    @property
    def left(self) -> bool:
        """Say whether there is a sample that is not ended."""
        return bool(self.under_way or self._next or self._again)

    def ready(self) -> bool:
        """Say whether a sample could be sent now."""
        return bool(self._next) or bool(self._again and self._again[0][0] <= time.monotonic())

    def peek(self) -> int | Flight:
        """Return what would be sent next: one to be tried again, or the index of a new one."""
        if self._again and self._again[0][0] <= time.monotonic():
            return self._again[0][2]
        return self._next[0]

    def begin(self, flight: Flight, rid: str, row: Row) -> None:
        """Take what `peek` returned and count it as under way."""
        if self._again and self._again[0][2] is flight:
            heapq.heappop(self._again)
        else:
            self._next.popleft()
        flight.attempts += 1
        flight.rid, flight.row, flight.sent_at, flight.answered_at = rid, row, time.monotonic(), 0.0
        flight.staged, flight.written, flight.broken = None, False, ""
        self.under_way[rid] = flight
        self._asked.add(rid)

    def answered(self, rid: str) -> Flight | None:
        """Note that the server has answered; return the sample where it is still under way."""
        self._asked.discard(rid)
        flight = self.under_way.get(rid)
        if flight is not None:
            flight.answered_at = time.monotonic()
        return flight

    def end(self, flight: Flight) -> None:
        """Take a sample from what is under way."""
        self.under_way.pop(flight.rid, None)
        flight.row = flight.staged = None

    def again(self, flight: Flight, excused: bool) -> None:
        """Try a sample again after a while; `excused` where it was not its own fault."""
        self.end(flight)
        flight.failures += not excused
        pause = min(FIRST_PAUSE_S * 2 ** max(0, flight.failures - 1), LONGEST_PAUSE_S)
        heapq.heappush(self._again, (time.monotonic() + pause, flight.index, flight))

    def alone(self, flight: Flight) -> bool:
        """Say whether this sample must wait until the server has no other, or another is there alone."""
        asked = [self.under_way[rid] for rid in self._asked if rid in self.under_way]
        return bool(self._asked) and (flight.suspect or any(other.suspect for other in asked))

    def broken(self) -> list[Flight]:
        """Return what was in flight when the connection broke, and left no states."""
        return [flight for flight in self.under_way.values() if flight.broken and flight.staged is None]

    def waiting(self) -> Iterator[Flight]:
        """Return what the server has or has just answered, and nothing was staged of."""
        return (flight for flight in self.under_way.values() if flight.staged is None)
