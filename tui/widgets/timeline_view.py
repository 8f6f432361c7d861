"""What part of a flight the timeline shows, in cells of the same length, and where its cursor is. No terminal here."""

from __future__ import annotations

from dataclasses import dataclass

ZOOMS_S = (
    1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200,
    10800, 14400, 28800, 43200, 86400, 172800, 604800,
)  # fmt: skip
LEAST_S = 120.0
"""A record that is younger is shown as if it were this long, so that its first seconds do not fill the screen."""


@dataclass
class View:
    """A window of `count` cells from `start` on, and the cursor. Times are wall seconds; `first` to `last` is known."""

    count: int = 50
    cell_s: int = 1
    start: float = 0.0
    cursor: float = 0.0
    first: float = 0.0
    last: float = 0.0
    following: bool = True

    @property
    def end(self) -> float:
        """Return the time at which the window ends."""
        return self.start + self.count * self.cell_s

    @property
    def column(self) -> int:
        """Return the cell that the cursor is in."""
        return min(self.count - 1, max(0, self.cell(self.cursor)))

    def cell(self, at: float) -> int:
        """Return the cell of a time; it may lie outside the window."""
        return int((at - self.start) // self.cell_s)

    def resize(self, count: int) -> None:
        """Take another width, with the cursor in sight."""
        if count != self.count:
            self.count = max(1, count)
            self._keep_in_sight()

    def knows(self, first: float, last: float) -> None:
        """Take how far the record reaches; a cursor that follows goes along."""
        self.first, self.last = first, last
        if self.following:
            self.cursor = last
        self._keep_in_sight()

    def fit(self, first: float, last: float) -> None:
        """Show a span whole, as large as it can be; the cursor stays in it."""
        last = max(last, first + LEAST_S)
        wanted = (last - first) / max(1, self.count - 1)
        self.cell_s = next((zoom for zoom in ZOOMS_S if zoom >= wanted), ZOOMS_S[-1])
        self.start = first // self.cell_s * self.cell_s
        self.cursor = min(max(self.cursor, first), last, max(self.last, first))

    def zoom(self, step: int) -> None:
        """Look closer (negative) or from farther away, with the cursor's cell where it is."""
        at = min(len(ZOOMS_S) - 1, max(0, ZOOMS_S.index(self.cell_s) + step))
        column, self.cell_s = self.column, ZOOMS_S[at]
        self.start = (self.cursor // self.cell_s - column) * self.cell_s
        self._keep_in_sight()

    def move(self, cells: int) -> None:
        """Move the cursor by cells, within what is known."""
        self.go(self.cursor + cells * self.cell_s)

    def go(self, at: float) -> None:
        """Put the cursor at a time. At the newest row it follows again."""
        self.following = at >= self.last > 0
        self.cursor = min(max(at, self.first), self.last)
        self._keep_in_sight()

    def _keep_in_sight(self) -> None:
        column = self.cell(self.cursor)
        if column < 0 or column >= self.count:
            # Following, most of the window is the past; else half a window to either side.
            share = 0.9 if self.following else 0.5
            self.start = (self.cursor // self.cell_s - int(self.count * share)) * self.cell_s
