"""What the console asks of a host's flight record, whole answers put together from their pages."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from backend.wire import Refused
from backend.wire.flight import Block, FlightError, FlightEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

ANSWER_S = 70.0
MOST_PAGES = 2000
"""A host that never says that a page is the last does not keep us for ever; 300 MB are more than any record has."""

EVER = 1e12


class Page(msgspec.Struct):
    """One answer of `flight.blocks`."""

    blocks: list[str]
    next: tuple[str, int] | None = None


class EventPage(msgspec.Struct):
    """One answer of `flight.events`."""

    events: list[FlightEvent]
    next: int | None = None


class Flights:
    """The flight records of a Fleet's hosts. Safe from any thread; futures fail as the Fleet's do."""

    def __init__(
        self,
        request: Callable[[str, str, dict[str, Any], float], Awaitable[Any]],
        submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
    ) -> None:
        self._request, self._submit = request, submit

    def info(self, host: str, *, start: bool = False) -> Future[dict[str, Any]]:
        """Return what the record holds (docs/architecture.md, `flight.info`); with `start` see that it is written."""
        return self._submit(self._info(host, "flight.start" if start else "flight.info"))

    def blocks(self, host: str, step_s: int, start: float = 0.0, end: float = EVER) -> Future[list[Block]]:
        """Return the blocks of one step that touch a span, the newest rows too. A damaged one is left out."""
        return self._submit(self._blocks(host, {"step_s": step_s, "start": start, "end": end}))

    def events(self, host: str, start: float = 0.0, end: float = EVER) -> Future[list[FlightEvent]]:
        """Return what happened in a span, in the order of its times."""
        return self._submit(self._events(host, {"start": start, "end": end}))

    async def _info(self, host: str, op: str) -> dict[str, Any]:
        return msgspec.convert(await self._request(host, op, {}, ANSWER_S), dict[str, Any])

    async def _blocks(self, host: str, args: dict[str, Any]) -> list[Block]:
        found: list[Block] = []
        after: tuple[str, int] | None = None
        for _ in range(MOST_PAGES):
            answer = await self._request(host, "flight.blocks", {**args, "after": after}, ANSWER_S)
            page = msgspec.convert(answer, Page)
            found += [block for text in page.blocks if (block := _block(text)) is not None]
            after = page.next
            if after is None:
                return found
        raise Refused("bad-answer", f"{host} never said that a page of its flight record is the last")

    async def _events(self, host: str, args: dict[str, Any]) -> list[FlightEvent]:
        found: list[FlightEvent] = []
        skip: int | None = 0
        for _ in range(MOST_PAGES):
            page = msgspec.convert(
                await self._request(host, "flight.events", {**args, "skip": skip}, ANSWER_S), EventPage
            )
            found += page.events
            skip = page.next
            if skip is None:
                return sorted(found, key=lambda event: event.at)
        raise Refused("bad-answer", f"{host} never said that a page of its events is the last")


def _block(text: str) -> Block | None:
    try:
        return Block(base64.b64decode(text, validate=True))
    except (FlightError, binascii.Error):
        return None
