"""What the cursor is on: a shard's tensors and the values of one of them, or a folder in sums and lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.containers import Vertical

from tui.widgets.painted import RowList
from tui.widgets.rows import paragraph
from tui.widgets.shard_rows import folder_rows, shard_rows, value_rows

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from tui.widgets.rows import Row


class ShardView(Vertical):
    """A table above, values below. Nothing here asks a host."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.shard: dict[str, Any] = {}
        self._keys: dict[int, str] = {}
        self._key = ""

    def compose(self) -> ComposeResult:
        """Lay out table and values."""
        yield RowList(id="tensors", cursor=True)
        yield RowList(id="values")

    @property
    def tensors(self) -> RowList:
        """Return the table."""
        return self.query_one("#tensors", RowList)

    @property
    def _width(self) -> int:
        return max(20, self.size.width - 3)  # padding, and the scrollbar

    def show_shard(self, shard: dict[str, Any]) -> None:
        """Show a shard; the tensor that was chosen stays chosen where the next shard has it too."""
        self.shard = shard
        rows, self._keys = shard_rows(shard, self._width)
        keys = list(self._keys.values())
        if self._key not in keys:
            self._key = keys[-1] if keys else ""
        self._put(rows)
        at = next((row for row, key in self._keys.items() if key == self._key), 0)
        self.tensors.select(at)
        self._show_values()

    def show_folder(self, path: str, sums: tuple[int, int, bool], told: dict[str, Any] | str | None) -> None:
        """Show a folder's sums, and the lengths of its sequences where they were told."""
        self._leave(folder_rows(path, sums, told, self._width, self.size.height))

    def say(self, rows: list[Row]) -> None:
        """Show a few rows instead."""
        self._leave(rows)

    def say_error(self, path: str, error: Exception) -> None:
        """Say why there is nothing to show."""
        width = self._width
        self._leave([(("bad", "cannot be read"),), *paragraph(path, width, "dim"), *paragraph(str(error), width)])

    def choose(self, row: int) -> None:
        """Choose the tensor whose row is nearest."""
        if self._keys:
            at = min(self._keys, key=lambda one: abs(one - row))
            self._key = self._keys[at]
            self.tensors.select(at)
            self._show_values()

    def _leave(self, rows: list[Row]) -> None:
        self.shard, self._keys = {}, {}
        self._put(rows)
        self.tensors.select(0)
        self.tensors.styles.height = "1fr"
        self.query_one("#values", RowList).display = False

    def _put(self, rows: list[Row]) -> None:
        self.tensors.choosing = bool(self._keys)
        self.tensors.show(rows)

    def _show_values(self) -> None:
        values = self.query_one("#values", RowList)
        found = (self.shard.get("statistics") or {}).get("tensors", ())
        told = next((one for one in found if one["key"] == self._key), None)
        values.display = told is not None
        self.tensors.styles.height = "1fr"
        if told is None:
            return
        entry = next(one for one in self.shard["entries"] if one["key"] == self._key)
        table = min(len(self.tensors.lines) + 1, max(6, self.size.height * 2 // 5))
        self.tensors.styles.height = table
        height = min(24, self.size.height - table)
        values.show(value_rows(entry, told, self._width, height))
