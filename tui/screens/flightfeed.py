"""What the timeline asks a host for, one question at a time: first everything coarsely, then what is looked at."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backend.fleet import LinkState
from backend.fleet.flights import EVER
from backend.fleet.recording import Recording
from tui.screens.base import answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from backend.fleet import HostState
    from backend.fleet.flights import Flights
    from backend.wire.flight import FlightEvent
    from tui.widgets.timeline_view import View

NEWEST_EVERY_S = 1.0
EVENTS_EVERY_S = 3.0
AROUND_S = 90.0
"""How much is fetched to the second around a cursor that rests."""


class FlightFeed:
    """Fills a Recording with what the view needs. `ask_next` returns the next question to await, or None."""

    def __init__(self, host: HostState, flights: Flights) -> None:
        self.recording = Recording()
        self.events: list[FlightEvent] = []
        self.loaded = False
        self.problem = ""
        self.started = False
        self._host, self._flights = host, flights
        self._newest_at = self._events_at = 0.0

    def ask_next(self, view: View, resting: bool) -> Callable[[], Awaitable[None]] | None:
        """Choose what is missing most."""
        if self._host.link.state not in (LinkState.LIVE, LinkState.STALE):
            return None
        if not self.loaded:
            return self._all if self._host.caught_up else None  # the runs say which part is wanted
        now = time.monotonic()
        step = max((s for s in (1, 10, 60) if s <= view.cell_s), default=1)
        start, end = max(view.start - step, view.first - step), min(view.end, view.last)
        if not self.recording.knows(step, start, end):
            around = view.count * view.cell_s / 2
            return lambda: self._blocks(step, start - around, end + around)
        if resting and not self.recording.knows(1, view.cursor - 5, view.cursor + 5):
            return lambda: self._blocks(1, view.cursor - AROUND_S, view.cursor + AROUND_S)
        if now - self._newest_at >= NEWEST_EVERY_S:
            self._newest_at = now
            return self._newest
        if now - self._events_at >= EVENTS_EVERY_S:
            self._events_at = now
            return self._new_events
        return None

    async def _all(self) -> None:
        await answer(self._flights.info(self._host.name, start=True))
        self.events = await answer(self._flights.events(self._host.name))
        await self._blocks(60, 0.0, EVER)
        await self._blocks(1, self.recording.latest - 5, EVER)
        self.loaded = True

    async def _blocks(self, step: int, start: float, end: float) -> None:
        blocks = await answer(self._flights.blocks(self._host.name, step, start, end))
        self.recording.take(step, blocks, start, end)

    async def _newest(self) -> None:
        await self._blocks(1, self.recording.latest - 1, EVER)

    async def _new_events(self) -> None:
        since = self.events[-1].at if self.events else 0.0
        known = {(event.at, event.text) for event in self.events[-200:]}
        # A run's end may be told a moment late, with the time at which it was.
        found = await answer(self._flights.events(self._host.name, since - 60.0))
        fresh = [event for event in found if (event.at, event.text) not in known]
        if fresh:
            self.events = sorted([*self.events, *fresh], key=lambda event: event.at)
