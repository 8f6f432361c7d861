"""When to try again: jitter that doubles, and the wake-up of a laptop."""

from __future__ import annotations

import asyncio
import random
import time

FIRST_S = 1.0
LONGEST_S = 60.0
SETTLED_S = 60.0
"""A connection that lived this long starts the delays anew."""

JUMP_S = 10.0
"""The wall clock running ahead of the monotonic one by this much means that the machine slept."""

wall = time.time
monotonic = time.monotonic


class Backoff:
    """Full jitter over a cap of 1 s doubling to 60 s: many hosts that were lost at once do not return at
    once."""

    def __init__(self) -> None:
        self._attempt = 0

    def next_s(self) -> float:
        """Return the next delay in seconds."""
        cap = min(LONGEST_S, FIRST_S * float(2**self._attempt))
        self._attempt = min(self._attempt + 1, 16)
        return float(random.uniform(0.1, 1.0) * cap)

    def ended(self, lived_s: float) -> None:
        """Take note of how long a connection lived."""
        if lived_s >= SETTLED_S:
            self._attempt = 0


class Sleeper:
    """Notices that the machine slept: the wall clock went on, the monotonic one did not."""

    def __init__(self) -> None:
        self._wall, self._monotonic = wall(), monotonic()

    def slept(self) -> bool:
        """Say whether the machine slept since this was asked last. A clock that is set forward looks the same."""
        wall_before, before = self._wall, self._monotonic
        self._wall, self._monotonic = wall(), monotonic()
        return (self._wall - wall_before) - (self._monotonic - before) > JUMP_S


async def pause(delay_s: float | None, kick: asyncio.Event) -> None:
    """Wait for a delay (None: for ever), until kicked, or until the machine wakes up from sleep."""
    start, sleeper = monotonic(), Sleeper()
    while True:
        passed_s = monotonic() - start
        if delay_s is not None and passed_s >= delay_s:
            return
        left_s = 1.0 if delay_s is None else min(1.0, delay_s - passed_s)
        try:
            await asyncio.wait_for(kick.wait(), left_s)
        except TimeoutError:
            pass
        if kick.is_set():
            kick.clear()
            return
        if sleeper.slept() and delay_s is not None:
            return
