"""One host with all its GPUs as one widget, painted line by line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.message import Message

from tui.widgets.host_rows import LINES, Form, make_form, panel_rows
from tui.widgets.painted import Painted

if TYPE_CHECKING:
    from textual import events
    from textual.binding import BindingType

    from backend.config import Thresholds
    from backend.fleet import HostState


class HostPanel(Painted, can_focus=True):
    """A host's line and one pane a GPU. A tree of widgets per GPU could not keep up at 64 GPUs (DESIGN 3.8).

    `sync` is the only place that reads the host. The cursor is a position in the host's list of GPUs.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "move(0, -1)", "Up"),
        ("down,j", "move(0, 1)", "Down"),
        ("left,h", "move(-1, 0)", "Left"),
        ("right,l", "move(1, 0)", "Right"),
        ("enter", "open", "Open"),
        *((str(digit), f"choose({digit})", f"GPU {digit}") for digit in range(10)),
    ]

    class Moved(Message):
        """The GPU in focus is another one."""

    class Opened(Message):
        """The host was opened with Enter or a double click."""

        def __init__(self, host: str) -> None:
            super().__init__()
            self.host = host

    class Edge(Message):
        """The cursor left this host: -1 upwards, 1 downwards."""

        def __init__(self, panel: HostPanel, step: int) -> None:
            super().__init__()
            self.panel, self.step = panel, step

    def __init__(self, host: HostState, limits: Thresholds) -> None:
        super().__init__(id=f"host-{host.name.replace('.', '_')}", classes="host")
        self.host, self.limits = host, limits
        self.form: Form = make_form(LINES, 80)
        self.cursor = 0
        self._seen: tuple[object, ...] = ()

    @property
    def gpu(self) -> int | None:
        """Return the index of the GPU in focus, or None on a host without."""
        indices = self.host.gpu_indices
        return indices[min(self.cursor, len(indices) - 1)] if indices else None

    def take(self, form: Form) -> None:
        """Take a layout."""
        height = form.height(len(self.host.gpu_indices))
        if form == self.form and self.styles.height is not None and self.styles.height.value == height:
            return
        self.form = form
        self.styles.height = height
        self.sync(force=True)

    def sync(self, *, force: bool = False) -> None:
        """Repaint the rows that changed; costs nothing while the host told nothing new."""
        now = time.monotonic()
        # Ages and retries are written in whole seconds, so an unchanged host is looked at once a second.
        seen = (self.host.revision, self.host.link, int(now), self.cursor, self.has_focus)
        if seen == self._seen and not force:
            return
        self._seen = seen
        cursor = min(self.cursor, len(self.host.gpu_indices) - 1) if self.has_focus else None
        self.show(panel_rows(self.host, self.form, self.limits, now, cursor))

    def on_focus(self) -> None:
        """Show the cursor."""
        self.sync()
        self.post_message(self.Moved())

    def on_blur(self) -> None:
        """Hide the cursor."""
        self.sync()

    def action_move(self, across: int, down: int) -> None:
        """Move the cursor; past the first or last row the next host takes over."""
        count = len(self.host.gpu_indices)
        target = self.cursor + across + down * self.form.across
        if down and not 0 <= target < count:
            self.post_message(self.Edge(self, down))
            return
        self.put(target)

    def enter(self, step: int, column: int) -> None:
        """Take the cursor over from the host above (1) or below (-1), in the same column."""
        last = max(0, len(self.host.gpu_indices) - 1)
        across = self.form.across
        self.cursor = min(last, column if step > 0 else last // across * across + column)

    def action_choose(self, index: int) -> None:
        """Put the cursor on the GPU with a number."""
        if index in self.host.gpu_indices:
            self.put(self.host.gpu_indices.index(index))

    def put(self, position: int) -> None:
        """Put the cursor on a position."""
        self.cursor = max(0, min(position, len(self.host.gpu_indices) - 1))
        self.sync()
        self.post_message(self.Moved())

    def action_open(self) -> None:
        """Open the host."""
        self.post_message(self.Opened(self.host.name))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the GPU under the mouse; a double click opens it."""
        position = self.form.gpu_at(event.x, event.y)
        if position is not None:
            self.put(position)
        if event.chain == 2:
            self.action_open()
