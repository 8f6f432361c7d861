"""The first screen: every host, the run that progresses, the chain of stages, what happened, and the actions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from textual.containers import Horizontal, VerticalScroll

from backend.wire import RUN_LIVE
from tui.actions import ACTIONS
from tui.screens.base import Ticking
from tui.widgets.buttons import ActionButton
from tui.widgets.chrome_rows import event_rows, focus_row, foot_row, head_row
from tui.widgets.detail_rows import gpu_rows
from tui.widgets.host_panel import HostPanel
from tui.widgets.host_rows import choose_form
from tui.widgets.painted import Painted, RowList
from tui.widgets.run_rows import chosen_run, progress_rows, rail_row, stage_states

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult
    from textual.widgets import Button

TALL = 34
"""Rows from which parts stand apart by empty lines."""

LEAST_EVENTS = 4
ROOM_FOR_MORE = 32
"""Rows below the hosts from which the GPU in focus is shown in full beside the events."""


class FleetScreen(Ticking):
    """Everything an operator asks at 3 am, on one screen."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL, "-tall")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.panels: list[HostPanel] = []
        self._selected: HostPanel | None = None
        self._counts: list[int] = []
        self._events_seen: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """Lay out the screen from top to bottom."""
        limits = self.console.fleet.config.thresholds
        yield Painted(id="head")
        with VerticalScroll(id="hosts", can_focus=False):
            for host in self.console.fleet.hosts.values():
                yield HostPanel(host, limits)
        yield Painted(id="focus")
        yield Painted(id="band")
        yield Painted(id="rail")
        with Horizontal(id="bottom"):
            yield RowList(id="events")
            yield RowList(id="more")
        with Horizontal(id="actions"):
            for action in ACTIONS:
                if action.button:
                    yield ActionButton(action.label, key=action.key, id=f"do-{action.id}", danger=action.danger)
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Start at the first host."""
        self.panels = list(self.query(HostPanel))
        self._selected = self.panels[0] if self.panels else None
        if self._selected:
            self._selected.focus()
        self.lay_out()

    def on_resize(self, event: events.Resize) -> None:
        """Choose the layout that fits."""
        self.lay_out()

    @property
    def host_name(self) -> str:
        """Return the host whose panel had the focus last."""
        return self._selected.host.name if self._selected else ""

    def lay_out(self) -> None:
        """Give every host the roomiest layout in which all are in sight, and leave rows for what happened."""
        if not self.panels:
            return
        tall = self.size.height >= TALL
        counts = [len(panel.host.gpu_indices) for panel in self.panels]
        most = self.size.height - (15 if tall else 9) - LEAST_EVENTS
        # The last column stays free: a scroll bar must not cover a number.
        form = choose_form(self.size.width - 1, most, counts)
        needed = sum(form.height(count) for count in counts)
        apart = int(tall and needed + len(counts) <= most - 4)
        for panel in self.panels:
            panel.take(form)
            panel.styles.margin = (0, 0, apart if panel is not self.panels[-1] else 0, 0)
        self._counts = counts
        height = max(3, min(needed + apart * (len(counts) - 1), most))
        self.query_one("#hosts").styles.height = height
        self.set_class(self.size.height - height >= ROOM_FOR_MORE, "-roomy")
        self.tick()

    def tick(self) -> None:
        """Repaint what changed. Panels that are scrolled away are left alone: a dirty one costs a whole layout."""
        if [len(panel.host.gpu_indices) for panel in self.panels] != self._counts:
            self.lay_out()
            return
        app, width, now = self.console, self.size.width - 2, time.time()
        hosts, limits = app.fleet.hosts.values(), app.fleet.config.thresholds
        top = self.query_one("#hosts").scroll_offset.y
        bottom = top + self.query_one("#hosts").size.height
        for panel in self.panels:
            if panel.virtual_region.bottom > top and panel.virtual_region.y < bottom:
                panel.sync()
        self.query_one("#head", Painted).show([head_row(hosts, limits, width, now, app.paused)])
        pick = chosen_run(hosts, self.host_name)
        live = sum(run.state in RUN_LIVE for host in hosts for run in list(host.runs.values()) if run.stage != "reset")
        others = live - 1 if pick and pick[1].state in RUN_LIVE else 0
        self.query_one("#band", Painted).show(progress_rows(pick, width, limits, now, others))
        self.query_one("#rail", Painted).show([rail_row(stage_states(app.fleet.config, hosts), width)])
        self.query_one("#foot", Painted).show([foot_row(width, host=self.host_name)])
        self._show_focus()
        self._show_events()

    def _show_events(self) -> None:
        log, happened = self.query_one("#events", RowList), self.console.happened
        seen = (happened[-1].at if happened else 0.0, len(happened), log.size)
        if seen != self._events_seen:
            # The newest stays in sight, unless the operator reads further up.
            follow = log.at_end or not log.has_focus
            self._events_seen = seen
            log.show(event_rows(happened, len(self.panels) > 1), follow=follow)

    def _show_focus(self) -> None:
        panel = self._selected
        limits = self.console.fleet.config.thresholds
        row = focus_row(panel.host if panel else None, panel.gpu if panel else None, limits, self.size.width - 2)
        self.query_one("#focus", Painted).show([row])
        more = self.query_one("#more", RowList)
        if more.display and panel and panel.gpu is not None:
            more.show(gpu_rows(panel.host, panel.gpu, more.size.width - 1, limits))

    def on_host_panel_moved(self) -> None:
        """Say more about the GPU that came into focus."""
        if isinstance(self.focused, HostPanel):
            self._selected = self.focused
        self._show_focus()
        self.query_one("#foot", Painted).show([foot_row(self.size.width - 2, host=self.host_name)])

    def on_host_panel_edge(self, event: HostPanel.Edge) -> None:
        """Go on to the next host."""
        at = self.panels.index(event.panel) + event.step
        if 0 <= at < len(self.panels):
            panel = self.panels[at]
            panel.enter(event.step, event.panel.cursor % event.panel.form.across)
            panel.focus()

    def on_host_panel_opened(self, event: HostPanel.Opened) -> None:
        """Open the host's own screen."""
        self.console.open_host(event.host)

    async def on_button_pressed(self, event: Button.Pressed) -> None:
        """Do what the button's key does."""
        await self.app.run_action((event.button.id or "").removeprefix("do-"))
