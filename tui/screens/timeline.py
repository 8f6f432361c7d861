"""The timeline of a host's flight: scrub, zoom, jump to what happened, and the log line of that second."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, ClassVar

from backend.fleet import LinkState
from backend.wire import RUN_LIVE
from tui import format
from tui.keys import TIMELINE, bindings_of, foot_of
from tui.screens.base import Ticking, answer
from tui.screens.flightfeed import FlightFeed
from tui.widgets.chrome_rows import foot_row
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import clean, pad, spread
from tui.widgets.timeline_rows import (
    METRICS,
    Lanes,
    axis_row,
    event_lane,
    event_row,
    lane_cells,
    progress_text,
    run_lanes,
    stamp,
)
from tui.widgets.timeline_view import View

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.fleet import HostState
    from backend.wire import Run
    from tui.console import FleetLike
    from tui.widgets.rows import Row

SPEEDS = (0, 10, 60, 600)
LOG_BYTES = 6000
TALL, TALLER = 34, 52
"""Rows from which runs get a third lane and /dev/shm one, and from which each GPU gets a second lane."""

REST_S = 0.2
"""How long the cursor must stand still before the host is asked about its second."""


class TimelineScreen(Ticking):
    """A flight in lanes. The list below is what happened, or the log of the run around the cursor."""

    KEYS = TIMELINE
    BINDINGS: ClassVar[list[BindingType]] = [*bindings_of(TIMELINE)]

    def __init__(self, host: HostState, fleet: FleetLike, run_id: str = "") -> None:
        super().__init__()
        self.host, self.run_id = host, run_id
        self.feed = FlightFeed(host, fleet.flights)
        self.lanes = Lanes(self.feed.recording, fleet.config.thresholds)
        self.view = View()
        self.metric, self.speed, self.show_log = 0, 0, False
        self.log_lines: list[Row] = []
        self.log_second, self.log_cursor = "", 0
        self._asking, self._moved_at, self._played_at = False, 0.0, 0.0
        self._log_key: tuple[object, ...] = ()
        self._below_key: tuple[object, ...] = ()

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    def compose(self) -> ComposeResult:
        """Lay out the lanes, the second at the cursor and the list."""
        yield Painted(id="head")
        yield Painted(id="lanes")
        yield Painted(id="second")
        below = RowList(id="below", cursor=True)
        below.can_focus = False  # the arrows move the timeline's cursor, and the list follows
        yield below
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Begin to load."""
        self.tick()

    def on_resize(self) -> None:
        """Fit the width."""
        self.tick()

    # --- loading ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask for what is missing, move a cursor that plays, and paint."""
        self.view.resize(lane_cells(self.size.width - 2))
        now = time.monotonic()
        if self.speed:
            self.view.go(self.view.cursor + self.speed * (now - self._played_at))
            self.speed = 0 if self.view.following else self.speed
        self._played_at = now
        resting = now - self._moved_at >= REST_S
        question = None if self._asking else self.feed.ask_next(self.view, resting)
        if question is not None:
            self._asking = True
            self.console.work_on(self._ask(question), "flight")
        if self.feed.loaded and resting and not self.speed:
            self._ask_log()
        self.paint()

    async def _ask(self, question: Any) -> None:
        first = not self.feed.loaded
        try:
            await question()
            self.feed.problem = ""
        except Exception as error:
            self.feed.problem = str(error) or type(error).__name__
        finally:
            self._asking = False
        span = self.feed.recording.span()
        if span is not None and self.is_running:
            self.view.knows(*span)
            if first and self.feed.loaded:
                self._begin(*span)
            self.paint()

    def _begin(self, first: float, last: float) -> None:
        """Show the run that was asked for, or all there is."""
        run = self.host.runs.get(self.run_id)
        if run is not None:
            self._fit_run(run)
        else:
            if self.run_id:
                self.console.say(f"{self.host.name} has no run {self.run_id}.", "warning")
            self.view.fit(first, last)

    def _fit_run(self, run: Run) -> None:
        live = run.state in RUN_LIVE
        end = self.view.last if live else run.ended_at
        margin = max(10.0, (end - run.started_at) * 0.03)
        self.run_id, self.view.following = run.id, live
        self.view.cursor = self.view.cursor if live else min(self.view.last, run.ended_at)
        first = max(self.view.first, run.started_at - margin)
        self.view.fit(first, max(first + 1, min(self.view.last, end + margin)))

    def _ask_log(self) -> None:
        """Ask for the log around the cursor's second, once for each second and run."""
        moment = self.feed.recording.at(self.view.cursor)
        run = self.run_at_cursor()
        if moment is None or run is None or moment.step_s != 1:
            return
        end = moment.number(f"run.{run.id}.log_bytes")
        before = self.feed.recording.at(moment.at - 1)
        begin = before.number(f"run.{run.id}.log_bytes") if before and before.step_s == 1 else None
        key = (run.id, moment.at, end)
        if end is None or key == self._log_key:
            return
        self._log_key = key
        self.console.work_on(self._log(run, key, int(begin or 0) if begin is not None else int(end), int(end)), "log")

    async def _log(self, run: Run, key: tuple[object, ...], begin: int, end: int) -> None:
        start = max(0, begin - LOG_BYTES)
        try:
            piece = await answer(self.console.fleet.log(self.host.name, run.id, start, end - start + LOG_BYTES))
        except Exception as error:
            self.log_lines, self.log_second = [(("bad", clean(str(error))),)], ""
            return
        if key != self._log_key or not self.is_running:
            return
        self._take_log(piece, start, begin, end)
        self.paint()

    def _take_log(self, piece: dict[str, Any], start: int, begin: int, end: int) -> None:
        """Set the lines of the cursor's second apart from those before and after it.

        The text is what may be shown of the bytes, so that its lines are counted and not its bytes: where a line ends
        is found by its share of what was asked for.
        """
        text = str(piece.get("text", ""))
        lines = text.split("\n")[1 if start else 0 :]
        total = max(1, int(piece.get("next", 0)) - start)
        scale, at = len(text.encode("utf-8", "replace")) / total, len(text.split("\n")[0].encode()) + 1 if start else 0
        rows: list[Row] = []
        self.log_second, inside = "", 0
        for line in lines:
            at += len(line.encode("utf-8", "replace")) + 1
            position = start + at / (scale or 1.0)
            here = begin < position <= end + 0.5
            if position <= end + 0.5 and line.strip():
                self.log_second, inside = clean(line), len(rows)
            rows.append((("strong" if here else "dim", clean(line)),))
        self.log_lines, self.log_cursor = rows, inside

    # --- what the cursor is at --------------------------------------------------------------------------------

    def run_at_cursor(self) -> Run | None:
        """Return the run that is meant at the cursor: the one that was asked for, else the one that has progress."""
        at = self.view.cursor
        here = [run for run in self.host.runs.values() if run.started_at <= at + 1]
        here = [run for run in here if run.state in RUN_LIVE or at <= max(run.ended_at, run.started_at) + 2]
        asked = next((run for run in here if run.id == self.run_id), None)
        return asked or max(here, key=lambda run: (bool(run.progress), run.started_at), default=None)

    def event_at(self) -> int:
        """Return the number of the last event that is not after the cursor, -1 where none is."""
        return bisect_left([event.at for event in self.feed.events], self.view.cursor + 0.51) - 1

    # --- painting ---------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Paint the lanes and the list."""
        width, view = self.size.width - 2, self.view
        self.query_one("#head", Painted).show([self._head(width)])
        words = {"metric": METRICS[self.metric].word, "below": "events" if self.show_log else "log"}
        keys = foot_of(TIMELINE, words)
        self.query_one("#foot", Painted).show([foot_row(width, keys)])
        if not self.feed.loaded:
            return
        moment = self.feed.recording.at(view.cursor)
        rows = self._lanes(width, moment)
        lanes = self.query_one("#lanes", Painted)
        lanes.styles.height = len(rows)
        lanes.show(rows)
        self.query_one("#second", Painted).show(self._second(width, moment))
        self._paint_below(width)

    def _lanes(self, width: int, moment: Any) -> list[Row]:
        view, tall = self.view, self.size.height
        most = 4 if tall >= TALL else 3
        rows = [event_lane(self.feed.events, view, width)]
        rows += run_lanes(self.host.runs.values(), view, width, most)
        chosen = METRICS[self.metric]
        for index in self._gpus():
            rows.append(self.lanes.gpu(index, chosen, view, moment, width))
            if tall >= TALLER:
                other = METRICS[1] if self.metric != 1 else METRICS[0]
                rows.append(self.lanes.gpu(index, other, view, moment, width, first=False))
        rows += [self.lanes.rate(view, moment, width), self.lanes.room(view, moment, width)]
        rows += [self.lanes.shm(view, moment, width)] if tall >= TALL else []
        return [*rows, axis_row(view, width)]

    def _gpus(self) -> list[int]:
        names = self.feed.recording.names()
        found = {name.partition(".")[0][3:] for name in names if name.startswith("gpu")}
        most = max(1, (self.size.height - 12) // (2 if self.size.height >= TALLER else 1))
        return sorted(int(index) for index in found if index.isdigit())[:most]

    def _head(self, width: int) -> Row:
        view, now = self.view, time.time()
        left = [("strong", "Timeline"), ("dim", "  on "), ("accent", clean(self.host.name))]
        if self.host.virtual:
            left.append(("warn", "  VIRTUAL"))
        if self.feed.problem:
            left.append(("bad", f"  {clean(self.feed.problem)}"))
        elif self.host.link.state not in (LinkState.LIVE, LinkState.STALE):
            left.append(("unknown", f"  {self.host.link.state}: {clean(self.host.link.reason)}"))
        elif not self.feed.loaded:
            left.append(("dim", "  reading the record"))
        else:
            span = f"  {stamp(view.start, now)} + {format.duration(view.end - view.start)}"
            left += [("text", span), ("dim", f", {format.duration(view.cell_s).replace('.0', '')} a cell")]
        mark = ("ok", "FOLLOWING") if view.following else ("warn-fill", f" x{self.speed} " if self.speed else " HELD ")
        return spread(left, [mark], width)

    def _second(self, width: int, moment: Any) -> list[Row]:
        view, run = self.view, self.run_at_cursor()
        first = [("strong", stamp(view.cursor, time.time())), ("text", "  ")]
        if moment is None:
            first.append(("unknown", "nothing was recorded here"))
        elif run is None:
            first.append(("dim", "no run"))
        else:
            first += [("accent", clean(run.id)), ("text", f"  {progress_text(moment, run.id)}")]
        line = self.log_second if self._log_key and run is not None and self._log_key[0] == run.id else ""
        if moment is not None and moment.step_s > 1:
            said = [("dim", f"log      one row in {moment.step_s} s is kept of this time")]
        else:
            said = [("dim", "log      "), ("text", line)]
        return [pad(first, width), pad(said, width)]

    def _paint_below(self, width: int) -> None:
        below = self.query_one("#below", RowList)
        if self.show_log:
            key: tuple[object, ...] = ("log", self._log_key, len(self.log_lines))
            if key != self._below_key:
                below.show(self.log_lines or [(("dim", "no line of a log here"),)])
                below.centre(self.log_cursor)
        else:
            at = self.event_at()
            key = ("events", len(self.feed.events), at)
            if key != self._below_key:
                now = time.time()
                none = [(("dim", "nothing has happened since the record began"),)]
                below.show([event_row(event, now) for event in self.feed.events] or none)
                below.centre(max(0, at))
        self._below_key = key

    # --- keys -------------------------------------------------------------------------------------------------

    def _moved(self) -> None:
        self._moved_at, self.speed = time.monotonic(), 0
        self.paint()

    def action_scrub(self, cells: int) -> None:
        """Move the cursor."""
        self.view.move(cells)
        self._moved()

    def action_zoom(self, step: int) -> None:
        """Look closer or from farther away."""
        self.view.zoom(step)
        self._moved()

    def action_event(self, step: int) -> None:
        """Go to the event before or after the cursor's."""
        events, at = self.feed.events, self.event_at()
        on_it = at >= 0 and abs(events[at].at - self.view.cursor) < 0.51
        wanted = at + 1 if step > 0 else at - 1 if on_it else at
        if 0 <= wanted < len(events):
            self.view.go(events[wanted].at)
            self._moved()

    def action_whole(self) -> None:
        """Show all there is."""
        self.view.fit(self.view.first, self.view.last)
        self._moved()

    def action_run(self) -> None:
        """Fit the run at the cursor into the window."""
        run = self.run_at_cursor()
        if run is not None:
            self._fit_run(run)
            self._moved()

    def action_metric(self) -> None:
        """Show another reading of the GPUs."""
        self.metric = (self.metric + 1) % len(METRICS)
        self.paint()

    def action_play(self) -> None:
        """Let the cursor run at ten, sixty, six hundred times the speed of life, or stop it."""
        self.speed = SPEEDS[(SPEEDS.index(self.speed) + 1) % len(SPEEDS)]
        self._played_at = time.monotonic()
        if self.speed and self.view.following:
            self.view.go(self.view.start)
        self.paint()

    def action_follow(self) -> None:
        """Go to the newest second and stay there."""
        self.view.go(self.view.last)
        self._moved()

    def action_first(self) -> None:
        """Go to where the record begins."""
        self.view.go(self.view.first)
        self._moved()

    def action_below(self) -> None:
        """Show what happened, or the log."""
        self.show_log = not self.show_log
        self.paint()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where a lane was clicked."""
        lanes = self.query_one("#lanes", Painted)
        if event.widget is lanes:
            cell = event.x - 1 - 9
            if 0 <= cell < self.view.count:
                self.view.go(self.view.start + (cell + 0.5) * self.view.cell_s)
                self._moved()

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        """Go to the event that was clicked."""
        if not self.show_log and event.index < len(self.feed.events):
            self.view.go(self.feed.events[event.index].at)
            self._moved()

    on_row_list_chosen = on_row_list_moved
