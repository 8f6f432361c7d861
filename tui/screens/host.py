"""One host: its GPUs above, everything about the one in focus below."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from tui.keys import HOST, bindings_of, foot_of
from tui.screens.base import Ticking
from tui.widgets.chrome_rows import foot_row, head_row
from tui.widgets.detail_rows import gpu_rows
from tui.widgets.host_panel import HostPanel
from tui.widgets.host_rows import LINES, make_form
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import BLANK

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.fleet import HostState


class HostScreen(Ticking):
    """A host's panel and the detail of one GPU."""

    KEYS = HOST
    BINDINGS: ClassVar[list[BindingType]] = [*bindings_of(HOST)]

    def __init__(self, host: HostState, cursor: int = 0) -> None:
        super().__init__()
        self.host, self.first = host, cursor

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    def compose(self) -> ComposeResult:
        """Lay out the panel and the detail."""
        yield Painted(id="head")
        yield HostPanel(self.host, self.console.fleet.config.thresholds)
        yield RowList(id="detail")
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Keep the GPU that was in focus."""
        panel = self.query_one(HostPanel)
        panel.cursor = self.first
        panel.focus()
        self.tick()

    def on_resize(self) -> None:
        """Fit the width."""
        self.tick()

    def tick(self) -> None:
        """Repaint what changed."""
        app, width = self.console, self.size.width - 2
        panel = self.query_one(HostPanel)
        panel.take(make_form(LINES, self.size.width - 1))
        panel.sync()
        limits = app.fleet.config.thresholds
        self.query_one("#head", Painted).show([head_row([self.host], limits, width, time.time(), app.paused)])
        self.query_one("#foot", Painted).show([foot_row(width, foot_of(HOST), self.host.name)])
        index = panel.gpu
        rows = [BLANK] if index is None else gpu_rows(self.host, index, width - 1, limits)
        self.query_one("#detail", RowList).show(rows)

    def action_page(self, step: int) -> None:
        """Scroll the detail while the GPUs have the focus."""
        detail = self.query_one("#detail", RowList)
        detail.action_move(step * max(1, detail.size.height - 1))

    def on_host_panel_moved(self) -> None:
        """Show the GPU that came into focus."""
        self.tick()
