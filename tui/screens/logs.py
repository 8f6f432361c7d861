"""The output of a run, followed: bounded, paused at will, one write a tick."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from tui import format
from tui.keys import LOG, bindings_of, foot_of
from tui.screens.base import Ticking, answer
from tui.widgets.chrome_rows import foot_row
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import clean, spread
from tui.widgets.run_rows import chosen_run, run_state

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.fleet import HostState
    from backend.wire import Run
    from tui.widgets.rows import Row

MOST_LINES = 5000
AGAIN_S = 1.0
"""How often the host is asked for more while there is nothing new."""


class LogScreen(Ticking):
    """Follows one run's output; left and right change the run."""

    KEYS = LOG
    BINDINGS: ClassVar[list[BindingType]] = [*bindings_of(LOG)]

    def __init__(self, host: HostState, run_id: str = "") -> None:
        super().__init__()
        self.host, self.run_id = host, run_id
        self.following = True
        self._reset("")

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    def compose(self) -> ComposeResult:
        """Lay out the lines."""
        yield Painted(id="head")
        yield RowList(id="lines")
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Start with the newest run."""
        pick, runs = chosen_run([self.host]), self.runs()
        self._reset(self.run_id or (pick[1].id if pick else runs[0].id if runs else ""))
        self.query_one("#lines").focus()
        self.tick()

    def runs(self) -> list[Run]:
        """List the host's runs, the newest first."""
        return sorted(self.host.runs.values(), key=lambda run: -run.started_at)

    def _reset(self, run_id: str) -> None:
        self.run_id = run_id
        self.lines: list[Row] = []
        self.position, self.size_bytes, self.tail = -1, 0, ""
        self.error = ""
        self._asking, self._asked_at = False, 0.0

    def tick(self) -> None:
        """Ask for more where the last answer is there, and paint the title."""
        now = time.monotonic()
        more = 0 <= self.position < self.size_bytes
        if self.run_id and not self._asking and (more or now - self._asked_at >= AGAIN_S):
            self._asking, self._asked_at = True, now
            self.console.work_on(self._ask(self.run_id, self.position), "log")
        self._paint()

    async def _ask(self, run_id: str, offset: int) -> None:
        try:
            piece = await answer(self.console.fleet.log(self.host.name, run_id, offset))
        except Exception as error:
            self.error = str(error) or type(error).__name__
        else:
            if run_id == self.run_id and self.is_running:
                self._take(piece)
        finally:
            self._asking = False

    def _take(self, piece: dict[str, Any]) -> None:
        self.error = ""
        self.position, self.size_bytes = int(piece["next"]), int(piece["size"])
        # A carriage return draws over its line: of a progress bar only the last state is kept.
        *whole, self.tail = (self.tail + str(piece["text"])).replace("\r\n", "\n").split("\n")
        self.tail = self.tail[-65536:]
        self.lines = [*self.lines, *((("text", clean(line.rsplit("\r", 1)[-1])),) for line in whole)][-MOST_LINES:]
        self._paint()

    def _paint(self) -> None:
        lines = self.query_one("#lines", RowList)
        last = clean(self.tail.rsplit("\r", 1)[-1])
        rows = [*self.lines, (("text", last),)] if last else self.lines
        if self.following and rows != lines.lines:
            lines.show(rows, follow=True)
        elif not self.following and not lines.lines:
            lines.show(rows)
        width = self.size.width - 2
        self.query_one("#head", Painted).show([self._title(width)])
        keys = foot_of(LOG, {"follow": "hold"} if self.following else {})
        self.query_one("#foot", Painted).show([foot_row(width, keys, self.host.name)])

    def _title(self, width: int) -> Row:
        run = self.host.runs.get(self.run_id)
        if run is None:
            return spread([("strong", "Log"), ("dim", f"  no run on {clean(self.host.name)} yet")], [], width)
        mark = ("ok", "FOLLOWING") if self.following else ("warn-fill", " HELD ")
        left = [("strong", f"{run.id}  "), run_state(run), ("dim", f"  {format.size(self.size_bytes)}")]
        if self.error:
            left.append(("bad", f"  {clean(self.error)}"))
        return spread(left, [mark], width)

    def action_follow(self) -> None:
        """Hold the lines still, or go on at the end."""
        self.following = not self.following
        self._paint()

    def action_other(self, step: int) -> None:
        """Change to an older or newer run."""
        ids = [run.id for run in self.runs()]
        if self.run_id in ids:
            at = max(0, min(len(ids) - 1, ids.index(self.run_id) + step))
            if ids[at] != self.run_id:
                self._reset(ids[at])
                self.query_one("#lines", RowList).show([])
                self.tick()
