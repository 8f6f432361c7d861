"""Readings that lag behind a release: utilisation for half a second, the reasons of the clocks for two.

A good reading is good at once, since both lag towards busy: a healthy host waits for nothing. Only a free GPU that
looks busy or held down is read again, from SETTLED_S after the clear, and every second while it still may be bad at
each of the moments. So a verdict comes within five seconds of the release also where a GPU is bad.
"""

from __future__ import annotations

import time
from typing import Dict, Iterable, List

from backend.agent.reset.rules import heat
from backend.agent.reset.rules.case import Readings
from backend.agent.reset.watch import Watch
from backend.wire import NOT_READ

SETTLED_S = 2.0
"""From when on utilisation and clocks count (DESIGN section 6.5; facts: reset, section 2)."""

EVERY_S = 1.0


def settle(watch: Watch, indices: Iterable[int], cleared_at: float) -> Dict[int, List[Readings]]:
    """Return the readings of each moment of those GPUs that looked bad at every one; `indices` are free GPUs."""
    bad = _bad(watch, indices)
    found: Dict[int, List[Readings]] = {}
    due = max(time.monotonic(), cleared_at + SETTLED_S)
    for moment in range(heat.SAMPLES):
        if not bad:
            break
        _wait(watch, due + moment * EVERY_S)
        bad = _bad(watch, bad)
        for index, readings in bad.items():
            found.setdefault(index, []).append(readings)
    return {index: found[index] for index in bad}


def _bad(watch: Watch, indices: Iterable[int]) -> Dict[int, Readings]:
    """Read GPUs, and return those that look busy or slowed down."""
    wanted = set(indices)
    seen = {index: lean for index, (lean, _) in watch.read("lean").items() if index in wanted} if wanted else {}
    return {index: lean for index, lean in seen.items() if _suspicious(lean)}


def _suspicious(lean: Readings) -> bool:
    reasons = int(lean.get("clock_reasons", NOT_READ).number() or 0)
    return bool(reasons & heat.SUSPECT or lean.get("utilisation_percent", NOT_READ).number())


def _wait(watch: Watch, due: float) -> None:
    while time.monotonic() < due:
        watch.step(due, [])
