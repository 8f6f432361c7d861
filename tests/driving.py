"""A console under test: the app on a made-up fleet, driven like the operator drives it."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.fakefleet import FakeFleet, config
from tui.app import EightZeros

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.pilot import Pilot

SMALL, MIDDLE, LARGE = (80, 24), (120, 40), (200, 60)


class Driven:
    """A console under test: its pilot, its fleet, and what its screen shows."""

    def __init__(self, pilot: Pilot[None], app: EightZeros, fleet: FakeFleet) -> None:
        self.pilot, self.app, self.fleet = pilot, app, fleet

    @property
    def text(self) -> str:
        """Return the text on the screen."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    async def until(self, condition: Callable[[], object], timeout_s: float = 8.0) -> None:
        """Wait until something is so."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.text
            await self.pilot.pause(0.02)

    async def sees(self, *words: str) -> None:
        """Wait until every word is on the screen."""
        await self.until(lambda: all(word in self.text for word in words))

    async def press(self, *keys: str) -> None:
        """Press keys."""
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def shows(self, kind: type) -> None:
        """Wait until a screen of a kind is on top."""
        await self.until(lambda: isinstance(self.app.screen, kind))

    def asked(self, name: str) -> list[tuple[object, ...]]:
        """Return what the fleet was asked of one kind."""
        return [call for call in self.fleet.calls if call[0] == name]


@asynccontextmanager
async def console(
    size: tuple[int, int] = SMALL, hosts: int = 1, fleet: FakeFleet | None = None
) -> AsyncIterator[Driven]:
    """Open a console on a made-up fleet."""
    fleet = fleet or FakeFleet(config(hosts))
    fleet.tick()
    app = EightZeros(fleet)
    async with app.run_test(size=size, notifications=True) as pilot:
        shown = Driven(pilot, app, fleet)
        await shown.sees("eightzeros", "gpu-01")
        yield shown
