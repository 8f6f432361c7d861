"""Histograms in block characters, and the axis below them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tui.widgets.rows import right

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.widgets.rows import Row

EIGHTHS = " ▁▂▃▄▅▆▇█"


def histogram_rows(
    counts: Sequence[int], ends: tuple[str, str], width: int, height: int, *, log: bool = False
) -> list[Row]:
    """Draw counts of equal parts, `height` rows tall, the greatest count at the left edge and the ends below.

    A part that holds anything shows at least an eighth of a row: a lone outlier is never lost. With `log` heights
    grow with the logarithm, for values whose tails matter.
    """
    most = max(counts, default=0)
    if not most or not height:
        return []
    label = max(len(f"{most:,}"), 5)
    cells = max(8, width - label - 2)
    scaled = [math.log1p(count) / math.log1p(most) if log else count / most for count in spread_counts(counts, cells)]
    levels = [max(1, round(part * height * 8)) if part > 0 else 0 for part in scaled]
    rows: list[Row] = []
    for row in range(height - 1, -1, -1):
        marks = "".join(EIGHTHS[max(0, min(8, level - row * 8))] for level in levels)
        said = f"{most:,}" if row == height - 1 else ""
        rows.append((("dim", right(said, label)), ("faint", " │"), ("bar", marks)))
    low, high = ends
    gap = max(1, len(levels) - len(low) - len(high))
    rows.append((("faint", " " * label + " └" + "─" * len(levels)),))
    return [*rows, (("dim", " " * (label + 2) + low + " " * gap + high),)]


def spread_counts(counts: Sequence[int], cells: int) -> list[int]:
    """Give each part the same number of cells, as many as fit; more parts than cells are joined."""
    if len(counts) <= cells:
        each = cells // len(counts)
        return [count for count in counts for _ in range(each)]
    joined = -(-len(counts) // cells)
    return [sum(counts[at : at + joined]) for at in range(0, len(counts), joined)]
