"""Shards on the host: a tree of folders at the left, the chosen file's tensors and values at the right."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, ClassVar

from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from backend.wire import RUN_LIVE
from tui.keys import SHARDS, bindings_of, foot_of
from tui.listing import Listing
from tui.screens.base import Ticking
from tui.screens.retire import RetireDialog
from tui.shardreader import ShardReader
from tui.shardtree import PART
from tui.widgets.chrome_rows import foot_row
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import clean, spread
from tui.widgets.shard_rows import TreeRows
from tui.widgets.shard_view import ShardView

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.config import Config
    from backend.fleet import HostState
    from backend.wire import Run
    from tui.shardtree import Line, ShardTree

TENSOR_FILES = (".pt", ".ckpt", ".safetensors", ".pth", ".bin", ".gz", ".npy", ".npz")


def first_folder(host: HostState, config: Config) -> str:
    """Choose where to start: the newest run's output, a configured output, an allowed root, the home folder."""
    runs = sorted((run for run in list(host.runs.values()) if run.out_dir), key=lambda run: -run.started_at)
    outs = [
        stage.out for stage in config.stages.values() if stage.out and (not stage.hosts or host.name in stage.hosts)
    ]
    return next(iter([*(run.out_dir for run in runs), *outs, *host.config.roots]), "~")


class ShardScreen(Ticking):
    """A browser that reads names and headers on the host; values only where they are asked for."""

    KEYS = SHARDS
    BINDINGS: ClassVar[list[BindingType]] = [*bindings_of(SHARDS)]

    def __init__(self, host: HostState, path: str = "", inside: str = "") -> None:
        super().__init__()
        self.host, self.first, self.inside = host, path, inside
        self.following = False
        self._pending = self._at = ""
        self._listing: Listing | None = None
        self._reader: ShardReader | None = None

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    @property
    def folder(self) -> RowList:
        """Return the tree."""
        return self.query_one("#folder", RowList)

    @property
    def view(self) -> ShardView:
        """Return the right side."""
        return self.query_one("#shard", ShardView)

    def compose(self) -> ComposeResult:
        """Lay out the path, the tree, the tensors and the values."""
        yield Painted(id="head")
        yield Input(id="path", placeholder="folder or shard on the host", compact=True)
        with Horizontal(id="browser"):
            with Vertical(id="left"):
                yield RowList(id="folder", cursor=True)
                yield Input(id="filter", placeholder="filter", compact=True)
            yield ShardView(id="shard")
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Open the first folder."""
        self.folder.focus()
        self.open_path(self.first or first_folder(self.host, self.console.fleet.config), self.inside)
        self.tick()

    def on_resize(self) -> None:
        """Fit the width."""
        self.tick()
        if self._listing is not None:
            self.call_after_refresh(self._laid_out)
            self.call_after_refresh(self.read)

    # --- the tree ---

    def open_path(self, path: str, inside: str = "") -> None:
        """Open a folder with the cursor on what is named inside; of a shard its run or folder."""
        top, self._pending, self._at = path, inside, ""
        if not inside and path.endswith(TENSOR_FILES):
            top, name = posixpath.split(path)
            self._pending = name
            if PART.fullmatch(posixpath.basename(top)):
                self._pending = posixpath.join(posixpath.basename(top), name)
                top = posixpath.dirname(top)
            self.reader.want(path, folder=False)
        if self._listing is not None:
            self._listing.end()
        self._listing = Listing(self.console, self.host.name, top or "/", self)
        if "/" in self._pending:
            self._fold(posixpath.dirname(self._pending), True)
        self.query_one("#path", Input).value = self.shards.top
        self.query_one("#filter", Input).value = ""
        self.folder.show(TreeRows(self.shards, self._width))
        self.folder.select(0)
        self.listing.start()

    @property
    def listing(self) -> Listing:
        """Return what lists the tree."""
        assert self._listing is not None, "a screen that is shown has opened a folder"
        return self._listing

    @property
    def shards(self) -> ShardTree:
        """Return the tree that is shown."""
        return self.listing.tree

    def failed(self, path: str, error: Exception) -> None:
        """Say that a path cannot be listed or read."""
        self.view.say_error(path, error)

    def listed(self, *, land: bool = False) -> None:
        """Show what the host has told; a new top shows its first entry."""
        if land:
            self.query_one("#path", Input).value = self.shards.top
        if self.following:
            self._newest()
        self._laid_out(land=land)

    @property
    def _width(self) -> int:
        return max(20, self.folder.size.width - 1)

    def _laid_out(self, keep: str | None = None, *, land: bool = False) -> None:
        """Show the lines as they are now, the cursor on the entry where it was."""
        folder, last = self.folder, len(self.shards.lines) - 1
        folder.show(TreeRows(self.shards, self._width))
        found = self.shards.find(self._pending) if self._pending else None
        if found is None:
            found = 1 if land and not self._pending else self.shards.find(keep if keep is not None else self._at)
        else:
            self._pending = ""
        if found is None and self._at:
            found = 1 if self.shards.words else folder.cursor
        folder.select(min(found or 0, last))
        if not self._pending:
            self._look()

    @property
    def line(self) -> Line:
        """Return the line that the cursor is on."""
        return self.shards.lines[min(self.folder.cursor, len(self.shards.lines) - 1)]

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        """Show what came under the cursor."""
        if event.rows.id == "folder":
            self.following = False
            self._look()
        elif event.rows.id == "tensors":
            self.view.choose(event.index)

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        """Open a folder, go to a shard's tensors, or read a tensor's values."""
        if event.rows.id == "tensors":
            self.view.choose(event.index)
            self.action_values()
        elif event.index == 0:
            self.action_up()
        elif event.index < len(self.shards.lines):
            line = self.shards.lines[event.index]
            if self.shards.entry(line).get("kind") != "folder":
                self._look()
                self.view.tensors.focus()
            else:
                self._fold(self.shards.inside(line), not self._open(self.shards.inside(line)))

    def _fold(self, name: str, opened: bool) -> None:
        self.shards.unfold(name, opened)
        if opened and self.shards.folders[name].following is not None:
            self.listing.want(name)
        self._laid_out(name)

    def _open(self, name: str) -> bool:
        return name in self.shards.folders and self.shards.folders[name].open

    # --- the right side ---

    @property
    def reader(self) -> ShardReader:
        """Return what reads the path that the cursor is on."""
        if self._reader is None:
            self._reader = ShardReader(self.console, self.host.name, self)
        return self._reader

    def _look(self) -> None:
        """Show what the cursor is on: a folder's sums, or a file's tensors."""
        path, self._at = self.shards.path(self.line), self.shards.inside(self.line)
        folder = self.shards.entry(self.line).get("kind") == "folder"
        if path != self.reader.path:
            self.reader.want(path, folder)
            self.read()
        elif folder:
            self.read()  # its sums may have grown

    def read(self) -> None:
        """Paint the right side from what is known."""
        reader = self.reader
        if reader.shard:
            self.view.show_shard(reader.shard)
        elif reader.folder:
            self.view.show_folder(reader.path, self.shards.sums(self.shards.inside(self.line)), reader.lengths)
        elif not self.view.shard or reader.slow:
            self.view.say([(("dim", "reading the header on the host"),)])

    # --- following ---

    def writer(self) -> Run | None:
        """Return the live run that writes below the top."""
        for run in list(self.host.runs.values()):
            out = run.out_dir.rstrip("/")
            if run.state in RUN_LIVE and out and self.shards.top.rstrip("/") == out:
                return run
        return None

    def tick(self) -> None:
        """Ask for what a running extraction has written since, and paint the title and the keys."""
        if self._listing is None:
            return  # it is being put together
        if self.reader.waiting and self.view.shard and not self.reader.shard:
            self.read()
        run = self.writer()
        if run is not None:
            self.listing.follow(run)
        self._paint_chrome(run)

    def _newest(self) -> None:
        line = self.shards.newest
        if line is not None:
            if line.folder and not self._open(line.folder):
                self.shards.unfold(line.folder)
            self._pending = self.shards.inside(line)

    def _paint_chrome(self, run: Run | None) -> None:
        width = self.size.width - 2
        mark = [("warn", "VIRTUAL")] if self.host.virtual else []
        title = [("strong", "Shards"), ("dim", f" on {clean(self.host.name)}")]
        if self.shards.words:
            title.append(("accent", f"  {len(self.shards.lines) - 1:,} match"))
        if self.listing.todo:
            title.append(("dim", f"  listing, {self.shards.listed:,} so far"))
        if run is not None:
            title.append(("ok", f"  {clean(run.stage)} writes here"))
        mark += [("ok", " FOLLOWING")] if self.following and run is not None else []
        self.query_one("#head", Painted).show([spread(title, mark, width)])
        keys = foot_of(SHARDS, {"follow": "hold"} if self.following else {})
        self.query_one("#foot", Painted).show([foot_row(width, keys)])

    # --- keys ---

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Open what was typed, or go back to the tree with what matches."""
        self.folder.focus()
        if event.input.id == "path" and event.value.strip():
            self.open_path(event.value.strip())

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if event.input.id == "filter" and event.value.lower().split() != self.shards.words:
            self.shards.filter(event.value)
            self._laid_out()

    def action_up(self) -> None:
        """Go to the folder above."""
        top = self.shards.top.rstrip("/")
        if top not in ("", "~"):
            self.open_path(posixpath.dirname(top) or "/")
            self._pending = posixpath.basename(top)

    def action_filter(self) -> None:
        """Type what names must hold."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_path(self) -> None:
        """Type a path."""
        self.query_one("#path").focus()

    def action_follow(self) -> None:
        """Show the newest shard, and each that follows while a run writes here."""
        self.following = not self.following
        if self.following:
            self._newest()
            self._laid_out()

    def action_values(self) -> None:
        """Read a sample of the shown shard's values on the host."""
        self.reader.want_values()

    def action_retire(self) -> None:
        """Ask for the plan of deleting the folder under the cursor, an old cache."""
        if self.shards.entry(self.line).get("kind") != "folder":
            self.console.say("Only a whole folder is deleted: choose one.", "warning")
            return
        path = self.shards.path(self.line)
        above = posixpath.dirname(self.shards.top.rstrip("/")) if self.line.number < 0 else self.shards.top
        self.app.push_screen(RetireDialog(self.host, path, lambda: self.open_path(above or "/")))

    def action_into(self) -> None:
        """Unfold a folder, or go to the tensors."""
        line = self.line
        if self.folder.has_focus and self.shards.entry(line).get("kind") == "folder":
            if line.number >= 0:
                self._fold(self.shards.inside(line), True)
        else:
            self.view.tensors.focus()

    def action_out(self) -> None:
        """Go back to the tree, or fold the folder that the cursor is in."""
        if not self.folder.has_focus:
            self.folder.focus()
            return
        inside = self.shards.inside(self.line)
        name = inside if self._open(inside) else self.line.folder
        if name:
            self._fold(name, False)

    def action_back(self) -> None:
        """Leave a field, the tensors, the filter, then the screen."""
        field = self.query_one("#filter", Input)
        if not self.folder.has_focus:
            self.folder.focus()
        elif self.shards.words:
            field.value = ""
            field.display = False
        else:
            self.app.pop_screen()
