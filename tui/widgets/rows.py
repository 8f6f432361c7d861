"""Rows of styled text: what every painted widget shows, and the small parts that rows are made of.

A row is a tuple of runs, a run is (style, text); the style names are in `STYLES` and get their colours in theme.tcss.
Functions that make rows are pure, so they are tested without a terminal. Widths are terminal cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells, set_cell_size

from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Run = tuple[str, str]
Row = tuple[Run, ...]

STYLES = (
    "text", "dim", "faint", "strong", "title", "accent", "ok", "warn", "bad", "unknown", "bar", "track", "spark",
    "cursor", "chosen", "mark", "ok-fill", "warn-fill", "bad-fill", "unknown-fill", "key",
)  # fmt: skip
FILLED = frozenset(("mark", "cursor", "chosen", "ok-fill", "warn-fill", "bad-fill", "unknown-fill"))
"""The styles with a background of their own."""
SPARKS = "▁▂▃▄▅▆▇"
"""Without the full block, so that the lines of two rows never touch."""
BLANK: Row = ()


def clean(text: str, limit: int = 4096) -> str:
    """Make remote text safe to paint on one line."""
    return printable(text, limit)


def fit(text: str, width: int) -> str:
    """Cut text to a width with an ellipsis and pad it to exactly that width."""
    if width <= 0:
        return ""
    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    return text + " " * (width - cell_len(text))


def right(text: str, width: int) -> str:
    """Cut text to a width and align it to the right."""
    return " " * (width - cell_len(text)) + text if cell_len(text) <= width else fit(text, width)


def row_width(row: Row) -> int:
    """Measure a row in cells."""
    return sum(cell_len(text) for _, text in row)


def pad(row: Iterable[Run], width: int) -> Row:
    """Cut or fill a row to exactly a width."""
    result: list[Run] = []
    left = width
    for style, text in row:
        cells = cell_len(text)
        if cells > left:
            result.append((style, fit(text, left)))
            return tuple(result)
        result.append((style, text))
        left -= cells
    if left:
        result.append(("text", " " * left))
    return tuple(result)


def fill(runs: Iterable[Run], width: int) -> list[Run]:
    """Take whole runs while they fit; only the first one is ever cut."""
    result: list[Run] = []
    for run in runs:
        cells = cell_len(run[1])
        if cells > width:
            return result or [(run[0], fit(run[1], width))]
        result.append(run)
        width -= cells
    return result


def spread(left: Sequence[Run], tail: Sequence[Run], width: int) -> Row:
    """Set one part at the left edge and one at the right; the left part gives way where both do not fit."""
    end = row_width(tuple(tail))
    if not end:
        return pad(left, width)
    if end >= width:
        return pad(tail, width)
    return (*pad(left, width - end - 1), ("text", " "), *tail)


def bar(fraction: float | None, width: int, style: str = "bar") -> Row:
    """Draw a horizontal bar in half cells; an unknown fraction is a dotted track, never an empty bar.

    The filled part and the track differ in shape too, so that the bar reads without colour.
    """
    if width <= 0:
        return BLANK
    if fraction is None:
        return (("unknown", "┄" * width),)
    halves = round(max(0.0, min(1.0, fraction)) * width * 2)
    if fraction > 0:
        halves = max(1, halves)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return ((style, filled), ("track", "─" * (width - len(filled))))


def spark(values: Sequence[float | None], cells: int, last: int, span: int = 60) -> str:
    """Draw the last `span` samples (0 to 100) in `cells` cells; a gap in the samples is a gap in the line.

    `last` is the running number of the newest sample. Cells end on multiples of it, so that the line moves only when
    a cell is complete and does not shimmer in between.
    """
    each = max(1, -(-span // max(1, cells)))
    end = len(values)
    marks: list[str] = []
    step = (last + 1) % each or each
    while end > 0 and len(marks) < cells:
        part = [value for value in values[max(0, end - step) : end] if value is not None]
        level = max(0, min(6, int(sum(part) / len(part) * 7 / 100.001))) if part else None
        marks.append(" " if level is None else SPARKS[level])
        end, step = end - step, each
    return "".join(reversed(marks)).rjust(cells)


def wrap(text: str, width: int) -> list[str]:
    """Break text at spaces into lines of at most a width; a word that is longer is cut into pieces."""
    lines, line = [], ""
    # Only at plain spaces: a no-break space holds a number and its unit together.
    for word in filter(None, clean(text).split(" ")):
        for piece in chop_cells(word, width) if cell_len(word) > width else [word]:
            if line and cell_len(line) + 1 + cell_len(piece) > width:
                lines.append(line)
                line = piece
            else:
                line = f"{line} {piece}".strip()
    return [*lines, line] if line or not lines else lines


def paragraph(text: str, width: int, style: str = "text", indent: int = 0) -> list[Row]:
    """Break text into rows of one style."""
    return [((style, " " * indent + line),) for line in wrap(text, max(8, width - indent))]
