"""The memory of each GPU while a reset frees it: how much is left of the most that it held, in columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui import format
from tui.widgets.rows import BLANK, bar, pad, right, row_width

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.wire import ResetEvent
    from tui.widgets.rows import Row, Run

BAR, GAP, AMOUNT = 8, 3, 8


def memory_rows(events: Iterable[ResetEvent], width: int) -> list[Row]:
    """Draw a bar for each GPU, from the most that it held since the reset began to nothing; none read, no rows."""
    most: dict[int, float] = {}
    now: dict[int, float] = {}
    for event in events:
        if event.kind == "memory" and "gpu" in event.data:
            gpu, used = int(event.data["gpu"]), float(event.data.get("used_bytes") or 0)
            now[gpu], most[gpu] = used, max(used, most.get(gpu, 0.0))
    if not now:
        return []
    cells = [_cell(gpu, now[gpu], most[gpu], len(str(max(now)))) for gpu in sorted(now)]
    wide = max(row_width(cell) for cell in cells)
    columns = max(1, min(len(cells), (width + GAP) // (wide + GAP)))
    tall = -(-len(cells) // columns)
    rows: list[Row] = [BLANK, (("dim", "memory of each GPU, of the most since the reset began"),)]
    for y in range(tall):
        row: list[Run] = []
        for cell in cells[y::tall]:
            row += [*pad(cell, wide), ("text", " " * GAP)]
        rows.append(tuple(row[:-1]))
    return rows


def _cell(gpu: int, now: float, most: float, digits: int) -> Row:
    drawn = bar(now / most if most else 0.0, BAR, "warn" if now < most else "bar")
    return (
        ("dim", f"{gpu:>{digits}} "), *drawn, ("strong", " " + right(format.size(now), AMOUNT)),
        ("dim", f" of {format.size(most)}"),
    )  # fmt: skip
