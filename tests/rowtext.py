"""What tests of rows share: reading rows as text, and a host that has told something for two minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakefleet import FakeFleet, config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tui.widgets.rows import Row


def text(rows: Iterable[Row]) -> str:
    """Join rows into what is read."""
    return "\n".join("".join(part for _, part in row) for row in rows)


def styles(rows: Iterable[Row], word: str) -> set[str]:
    """Return the styles of the runs that hold a word."""
    return {style for row in rows for style, part in row if word in part}


def busy_fleet() -> FakeFleet:
    """Make a fleet of one host that has told of its busy GPUs for two minutes."""
    made = FakeFleet(config(1))
    for _ in range(130):
        made.tick()
    return made
