"""The two widgets that paint rows: one of fixed height that repaints what changed, and one that scrolls."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from tui.widgets.rows import BLANK, FILLED, STYLES, pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.style import Style
    from textual import events
    from textual.binding import BindingType

    from tui.widgets.rows import Row, Run

CLASSES = {f"row--{name}" for name in STYLES}


def joined(row: Row) -> list[Run]:
    """Join spaces to the run before them: each run costs the terminal an escape sequence, and a space has no colour."""
    runs: list[Run] = []
    for run in row:
        if runs and (run[0] == runs[-1][0] or (run[1].isspace() and {run[0], runs[-1][0]}.isdisjoint(FILLED))):
            runs[-1] = (runs[-1][0], runs[-1][1] + run[1])
        else:
            runs.append(run)
    return runs


class RowStyles(Widget):
    """Looks up the colours of rows once per theme instead of once per line."""

    COMPONENT_CLASSES: ClassVar[set[str]] = CLASSES

    _row_styles: dict[str, Style] | None = None

    def notify_style_update(self) -> None:
        """Forget the colours when the theme or a pseudo class changes."""
        self._row_styles = None
        super().notify_style_update()

    def paint(self, row: Row, width: int, under: str = "") -> Strip:
        """Turn a row into a strip of exactly a width; `under` is a style laid over the whole row."""
        if self._row_styles is None:
            self._row_styles = {name: self.get_component_rich_style(f"row--{name}", partial=True) for name in STYLES}
        styles = self._row_styles
        # The line API paints no background for us, so every run starts from the widget's own style.
        base = self.rich_style + styles[under] if under else self.rich_style
        segments = [Segment(text, base + styles[name]) for name, text in joined(row)]
        return Strip(segments).adjust_cell_length(width, base)


class Painted(RowStyles):
    """Rows at a fixed place. `show` repaints only the rows that differ."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.rows: Sequence[Row] = ()

    def show(self, rows: Sequence[Row]) -> None:
        """Replace the rows and mark those dirty that changed."""
        old, self.rows = self.rows, rows
        if len(old) != len(rows):
            self.refresh()
            return
        dirty = [Region(0, y, self.size.width, 1) for y, row in enumerate(rows) if row != old[y]]
        if dirty:
            self.refresh(*dirty)

    def render_line(self, y: int) -> Strip:
        """Paint one row."""
        return self.paint(self.rows[y] if y < len(self.rows) else BLANK, self.size.width)


class RowList(ScrollView, RowStyles, can_focus=True):
    """A long list of rows, painted a line at a time, with a cursor where the rows can be chosen.

    Ten thousand rows cost no more than the ones on the screen; a DataTable of that size blocks for seconds.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = CLASSES  # Textual follows the first base only
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "move(-1)", "Up"),
        ("down,j", "move(1)", "Down"),
        ("pageup", "move(-10)", "Page up"),
        ("pagedown", "move(10)", "Page down"),
        ("g,home", "move(-1000000000)", "First"),
        ("G,end", "move(1000000000)", "Last"),
        ("enter", "choose", "Open"),
    ]

    class Chosen(Message):
        """A row was opened with Enter or a click."""

        def __init__(self, rows: RowList, index: int) -> None:
            super().__init__()
            self.rows, self.index = rows, index

        @property
        def control(self) -> RowList:
            """Return the list it happened in."""
            return self.rows

    class Moved(Chosen):
        """The cursor moved to another row."""

    def __init__(self, *, cursor: bool = False, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.lines: Sequence[Row] = ()
        self.choosing = cursor
        self.cursor = 0

    def show(self, lines: Sequence[Row], *, follow: bool = False) -> None:
        """Replace the rows; `follow` keeps the last one in sight."""
        if lines == self.lines and not follow:
            return
        self.lines = lines
        self.cursor = max(0, min(self.cursor, len(lines) - 1))
        self.virtual_size = Size(0, len(lines))
        if follow:
            self.scroll_end(animate=False, force=True, immediate=True)
        self.refresh()

    @property
    def at_end(self) -> bool:
        """Say whether the last row is in sight."""
        return self.scroll_offset.y >= self.max_scroll_y

    def select(self, index: int) -> None:
        """Put the cursor on a row and bring it into sight."""
        self.cursor = max(0, min(index, len(self.lines) - 1))
        if self.cursor < self.scroll_offset.y:
            self.scroll_to(y=self.cursor, animate=False, immediate=True, force=True)
        elif self.cursor >= self.scroll_offset.y + self.size.height:
            self.scroll_to(y=self.cursor - self.size.height + 1, animate=False, immediate=True, force=True)
        self.refresh()

    def centre(self, index: int) -> None:
        """Put the cursor on a row, with as much in sight before it as after it."""
        self.select(index)
        self.scroll_to(y=max(0, self.cursor - self.size.height // 2), animate=False, immediate=True, force=True)

    def action_move(self, step: int) -> None:
        """Move the cursor, or the window where there is none."""
        if not self.choosing:
            self.scroll_to(y=self.scroll_offset.y + step, animate=False, immediate=True)
            return
        self.select(self.cursor + step)
        self.post_message(self.Moved(self, self.cursor))

    def action_choose(self) -> None:
        """Open the row under the cursor."""
        if self.choosing and self.lines:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is; a second click opens."""
        index = event.y + self.scroll_offset.y
        if not self.choosing or index >= len(self.lines):
            return
        again = index == self.cursor
        self.select(index)
        self.post_message(self.Chosen(self, index) if again or event.chain > 1 else self.Moved(self, index))

    def render_line(self, y: int) -> Strip:
        """Paint the row that is `y` lines below the top of the window."""
        index = y + self.scroll_offset.y
        row = self.lines[index] if index < len(self.lines) else BLANK
        width = self.size.width
        under = ""
        if self.choosing and self.lines and index == self.cursor:
            under = "cursor" if self.has_focus else "chosen"
        return self.paint(pad(row, width), width, under)
