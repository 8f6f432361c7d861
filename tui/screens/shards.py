"""Shards on the host: a folder at the left, the tensors of the chosen file at the right."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, ClassVar

from textual.containers import Horizontal
from textual.widgets import Input

from tui.screens.base import Ticking, answer
from tui.widgets.chrome_rows import foot_row
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import clean, paragraph, spread
from tui.widgets.shard_rows import listing_rows, sort_entries, tensor_rows

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.config import Config
    from backend.fleet import HostState


def first_folder(host: HostState, config: Config) -> str:
    """Choose where to start: the newest run's output, a configured output, an allowed root, the home folder."""
    runs = sorted((run for run in list(host.runs.values()) if run.out_dir), key=lambda run: -run.started_at)
    outs = [
        stage.out for stage in config.stages.values() if stage.out and (not stage.hosts or host.name in stage.hosts)
    ]
    return next(iter([*(run.out_dir for run in runs), *outs, *host.config.roots]), "~")


class ShardScreen(Ticking):
    """A browser that reads headers on the host; no tensor data crosses the connection."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "back", "Back"),
        ("backspace", "up", "Folder above"),
        ("slash", "path", "Path"),
    ]

    def __init__(self, host: HostState, path: str = "") -> None:
        super().__init__()
        self.host, self.path = host, path
        self.entries: list[dict[str, Any]] = []
        self._asked = ""

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    def compose(self) -> ComposeResult:
        """Lay out the path, the folder and the tensors."""
        yield Painted(id="head")
        yield Input(id="path", placeholder="folder or shard on the host", compact=True)
        with Horizontal(id="browser"):
            yield RowList(id="folder", cursor=True)
            yield RowList(id="tensors")
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Open the first folder."""
        self.query_one("#folder").focus()
        self.open_folder(self.path or first_folder(self.host, self.console.fleet.config))
        self.tick()

    def on_resize(self) -> None:
        """Fit the width."""
        self.tick()

    def tick(self) -> None:
        """Paint the title and the keys."""
        width = self.size.width - 2
        mark = [("warn", "VIRTUAL")] if self.host.virtual else []
        title = [("strong", "Shards"), ("dim", f" on {clean(self.host.name)}")]
        self.query_one("#head", Painted).show([spread(title, mark, width)])
        keys = [("Enter", "open"), ("Backspace", "folder above"), ("/", "path"), ("Esc", "back")]
        self.query_one("#foot", Painted).show([foot_row(width, keys)])

    def open_folder(self, path: str, select: str = "") -> None:
        """Ask for a folder's files."""
        self._asked = path
        self.console.work_on(self._list(path, select), "shards")

    async def _list(self, path: str, select: str) -> None:
        try:
            listing = await answer(self.console.fleet.list_shards(self.host.name, path))
        except Exception as error:
            self._say_error(path, error)
            return
        if not self.is_running or self._asked != path:
            return
        self.path = str(listing.get("path") or path)
        self.entries = sort_entries(listing.get("entries") or [])
        self.query_one("#path", Input).value = self.path
        folder = self.query_one("#folder", RowList)
        folder.show(listing_rows(listing, self.entries, folder.size.width - 1 or 30))
        names = [entry.get("name") for entry in self.entries]
        folder.select(names.index(select) + 1 if select in names else min(1, len(names)))

    def _say_error(self, path: str, error: Exception) -> None:
        if self.is_running:
            tensors = self.query_one("#tensors", RowList)
            width = max(20, tensors.size.width - 2)
            rows = [
                (("bad", "cannot be read"),),
                *paragraph(path, width, "dim"),
                *paragraph(str(error), width),
            ]
            tensors.show(rows)

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        """Open a folder or a shard."""
        if event.rows.id != "folder":
            return
        if event.index == 0:
            self.action_up()
        elif event.index <= len(self.entries):
            entry = self.entries[event.index - 1]
            path = posixpath.join(self.path, str(entry.get("name", "")))
            if entry.get("kind") == "folder":
                self.open_folder(path)
            else:
                self.open_shard(path)

    def open_shard(self, path: str) -> None:
        """Ask for a shard's tensors."""
        self.query_one("#tensors", RowList).show([(("dim", "reading the header on the host"),)])
        self._asked = path
        self.console.work_on(self._show(path), "shards")

    async def _show(self, path: str) -> None:
        try:
            shard = await answer(self.console.fleet.show_shard(self.host.name, path))
        except Exception as error:
            self._say_error(path, error)
            return
        if self.is_running and self._asked == path:
            tensors = self.query_one("#tensors", RowList)
            tensors.show(tensor_rows({"path": path, **shard}, tensors.size.width - 2))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Open what was typed: a shard by its ending, else a folder."""
        path = event.value.strip()
        self.query_one("#folder").focus()
        if path.endswith((".pt", ".ckpt", ".safetensors", ".pth", ".bin")):
            self.open_folder(posixpath.dirname(path) or "/", posixpath.basename(path))
            self.open_shard(path)
        elif path:
            self.open_folder(path)

    def action_up(self) -> None:
        """Go to the folder above."""
        if self.path not in ("/", "~"):
            self.open_folder(posixpath.dirname(self.path.rstrip("/")) or "/", posixpath.basename(self.path.rstrip("/")))

    def action_path(self) -> None:
        """Type a path."""
        self.query_one("#path").focus()

    def action_back(self) -> None:
        """Leave the path, or the screen."""
        if self.query_one("#path").has_focus:
            self.query_one("#folder").focus()
        else:
            self.app.pop_screen()
