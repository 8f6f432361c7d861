"""A flight record as the console holds it: blocks of three steps, read a cell of the timeline at a time.

Everything here is plain data. Times are wall seconds of the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from backend.wire.flight import FAILED, Block, Value, as_number

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = (1, 10, 60)
MOST_BLOCKS = 600
"""Kept of one step: ten hours of seconds, 100 hours of 10 s. What is farthest from the newest asked goes first."""

LOW, HIGH = ":min", ":max"


class Cell(NamedTuple):
    """A column over one cell of a timeline, `rows` of it. Without a number: `failed`, or nothing was recorded."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    failed: bool = False
    rows: int = 0


NOTHING = Cell()

Layout = list[tuple[Block, list[tuple[int, int, int]]]]
"""Of each block the (cell, first row, row behind the last) that it gives to a window."""


class Recording:
    """The blocks that were fetched of one host's record. `revision` grows when there are more, `latest` is the
    newest row's time."""

    def __init__(self) -> None:
        self.revision = 0
        self.latest = 0.0
        self._names: set[str] = set()
        self._names_at = 0
        self._blocks: dict[int, dict[tuple[int, float], Block]] = {step: {} for step in STEPS}
        self._ordered: dict[int, list[Block]] = {step: [] for step in STEPS}
        self._known: dict[int, list[tuple[float, float]]] = {step: [] for step in STEPS}

    def take(self, step_s: int, blocks: Iterable[Block], start: float, end: float) -> None:
        """Keep blocks that were fetched for a span. One that has grown since replaces what it was."""
        for block in blocks:
            self._blocks[step_s][(block.head.serial, block.head.first)] = block
        ordered = sorted(self._blocks[step_s].values(), key=lambda block: block.head.first)
        if len(ordered) > MOST_BLOCKS:
            middle = (start + min(end, ordered[-1].head.last)) / 2
            ordered = sorted(ordered, key=lambda block: abs(block.head.first - middle))[:MOST_BLOCKS]
            ordered.sort(key=lambda block: block.head.first)
            self._blocks[step_s] = {(block.head.serial, block.head.first): block for block in ordered}
            kept = (ordered[0].head.first, ordered[-1].head.last)
            self._known[step_s] = [(max(a, kept[0]), min(b, kept[1])) for a, b in self._known[step_s]]
        self._ordered[step_s] = ordered
        self.latest = max(self.latest, self.newest(step_s) or 0.0)
        self._known[step_s] = _joined([*self._known[step_s], (start, min(end, self.latest))])
        self.revision += 1

    def knows(self, step_s: int, start: float, end: float) -> bool:
        """Say whether a span was fetched. The newest two rows of a step may still be on their way."""
        end = min(end, self.latest - 2 * step_s)
        return end <= start or any(a <= start and end <= b for a, b in self._known[step_s])

    def newest(self, step_s: int) -> float | None:
        """Return the time of the newest row of one step."""
        ordered = self._ordered[step_s]
        return max(block.head.last for block in ordered[-3:]) if ordered else None

    def span(self) -> tuple[float, float] | None:
        """Return the first and last time of all that is here."""
        ends = [(found[0].head.first, self.newest(step) or 0.0) for step, found in self._ordered.items() if found]
        return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def names(self) -> set[str]:
        """Return every column there is, the ends of coarse ones left out."""
        if self._names_at != self.revision:
            found = {name for step in STEPS for block in self._ordered[step] for name in block.names}
            self._names = {name for name in found if not name.endswith((LOW, HIGH))}
            self._names_at = self.revision
        return self._names

    def best_step(self, cell_s: float, start: float, end: float) -> int:
        """Choose the step to draw cells from: the coarsest that is fine enough, or the finest that is here."""
        wanted = [step for step in STEPS if step <= max(1.0, cell_s)]
        for step in [*reversed(wanted), *(step for step in STEPS if step not in wanted)]:
            if self.knows(step, start, end):
                return step
        return STEPS[-1]

    def layout(self, step_s: int, start: float, cell_s: float, count: int) -> Layout:
        """Say which rows of which blocks make up each of `count` cells; a cell shorter than a row takes the row that
        covers it."""
        found: Layout = []
        end, wide = start + cell_s * count, max(1, round(step_s / cell_s))
        for block in self._touching(step_s, start - step_s, end):
            times, slices = block.times, []
            # Rows of a second are up to a tenth late or early.
            row, last = bisect_left(times, start - step_s + 0.05), bisect_left(times, end - 0.05)
            while row < last:
                cell = int((times[row] + 0.05 - start) // cell_s)
                behind = max(row + 1, bisect_left(times, start + (cell + 1) * cell_s - 0.05, row, last))
                slices += [(at, row, behind) for at in range(max(0, cell), min(count, cell + wide))]
                row = behind
            if slices:
                found.append((block, slices))
        return found

    def cells(self, name: str, layout: Layout, count: int) -> list[Cell]:
        """Gather a column into cells."""
        cells = [NOTHING] * count
        for block, slices in layout:
            if not block.has(name):
                continue
            column = block.column(name)
            low = block.column(name + LOW) if block.has(name + LOW) else column
            high = block.column(name + HIGH) if block.has(name + HIGH) else column
            for at, row, behind in slices:
                cells[at] = _gathered(cells[at], column[row:behind], low[row:behind], high[row:behind])
        return cells

    def at(self, when: float) -> Moment | None:
        """Return the row at a time, of the finest step that has one; None where nothing was recorded."""
        for step in STEPS:
            for block in reversed(self._touching(step, when - step - 0.5, when + 0.5)):
                row = bisect_right(block.times, when + 0.5 * (step == 1)) - 1
                if row >= 0 and block.times[row] > when - step - 0.5:
                    return Moment(step, block, row)
        return None

    def _touching(self, step_s: int, start: float, end: float) -> list[Block]:
        return [block for block in self._ordered[step_s] if block.head.last >= start and block.head.first <= end]


class Moment(NamedTuple):
    """One row of a block."""

    step_s: int
    block: Block
    row: int

    @property
    def at(self) -> float:
        """Return the row's time."""
        return self.block.times[self.row]

    def value(self, name: str) -> Value:
        """Return a column's value in this row."""
        return self.block.column(name)[self.row]

    def number(self, name: str) -> float | None:
        """Return a column's value as a number, or None where it is none."""
        return as_number(self.value(name))

    def run_ids(self) -> list[str]:
        """List the runs that this row tells of."""
        names = (name for name in self.block.names if name.startswith("run.") and name.endswith(".log_bytes"))
        ids = (name[len("run.") : -len(".log_bytes")] for name in names)
        return [run_id for run_id in ids if self.value(f"run.{run_id}.log_bytes") is not None]


def _gathered(cell: Cell, values: list[Value], lows: list[Value], highs: list[Value]) -> Cell:
    """Add rows to a cell."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    failed = cell.failed or (len(numbers) < len(values) and FAILED in values)
    if not numbers:
        return cell._replace(failed=True) if failed else cell
    least = min([value for value in lows if isinstance(value, (int, float))], default=numbers[0])
    most = max([value for value in highs if isinstance(value, (int, float))], default=numbers[0])
    if lows is not values:
        least, most = min(least, *numbers), max(most, *numbers)
    count = cell.rows + len(numbers)
    if cell.mean is None or cell.low is None or cell.high is None:
        return Cell(sum(numbers) / count, least, most, failed, count)
    mean = (cell.mean * cell.rows + sum(numbers)) / count
    return Cell(mean, min(cell.low, least), max(cell.high, most), failed, count)


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans that touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(span for span in spans if span[0] <= span[1]):
        if found and start <= found[-1][1] + 1.5:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
