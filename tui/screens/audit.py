"""An audit on a host: its progress while it runs, then its faults, each of which opens its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.containers import Horizontal

from backend.config import Stage
from backend.wire import RUN_LIVE
from tui.keys import AUDIT, bindings_of, foot_of
from tui.screens.base import Ticking, answer
from tui.screens.shards import ShardScreen, first_folder
from tui.widgets.audit_rows import KINDS_WIDTH, FaultRows, audited, kind_rows, progress_rows
from tui.widgets.chrome_rows import foot_row
from tui.widgets.painted import Painted, RowList
from tui.widgets.rows import BLANK, clean, paragraph, spread

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from backend.fleet import HostState
    from backend.wire import Run
    from tui.widgets.rows import Row

MOST_FAULTS = 200_000
"""Findings that are fetched; the rest is in the audit's own file."""


class AuditScreen(Ticking):
    """Follows the newest audit of a host, or starts one of a folder."""

    KEYS = AUDIT
    BINDINGS: ClassVar[list[BindingType]] = [*bindings_of(AUDIT)]

    def __init__(self, host: HostState, folder: str = "") -> None:
        super().__init__()
        self.host, self.target = host, folder
        self.run_id, self.code = "", ""
        self.summary: dict[str, Any] | None = None
        self.faults: list[dict[str, Any]] = []
        self.problem = ""
        self._asked = ""
        self._told = 0
        self._polling = False

    @property
    def host_name(self) -> str:
        """Return this host."""
        return self.host.name

    def compose(self) -> ComposeResult:
        """Lay out progress, kinds and faults."""
        yield Painted(id="head")
        yield Painted(id="progress")
        with Horizontal(id="browser"):
            yield RowList(id="kinds", cursor=True)
            yield RowList(id="faults", cursor=True)
        yield Painted(id="said")
        yield Painted(id="foot")

    def on_mount(self) -> None:
        """Show the newest audit, of the folder that is meant where there is one."""
        self.target = self.target or first_folder(self.host, self.console.fleet.config)
        runs = self.audits()
        of_folder = [run for run in runs if audited(run) == self.target]
        self.choose((of_folder or runs)[0].id if runs else "")
        self.query_one("#faults").focus()

    def on_resize(self) -> None:
        """Fit the width."""
        self.call_after_refresh(self._show)

    def audits(self) -> list[Run]:
        """List the host's audits, the newest first."""
        return sorted((run for run in list(self.host.runs.values()) if audited(run)), key=lambda run: -run.started_at)

    def choose(self, run_id: str) -> None:
        """Show another audit."""
        self.run_id, self.code, self.problem, self._asked = run_id, "", "", ""
        self.summary, self.faults, self._told = None, [], 0
        self._show()
        self.tick()

    def run_shown(self) -> Run | None:
        """Return the audit that is shown."""
        return self.host.runs.get(self.run_id)

    # --- painting ---

    def tick(self) -> None:
        """Paint the progress, and ask what was found: so far, and once the audit has ended."""
        run, width = self.run_shown(), self.size.width - 2
        if run is not None and run.state in RUN_LIVE:
            if not self._polling and len(self.faults) < MOST_FAULTS:
                self._polling = True
                self.console.work_on(self._fetch_found(run.id), "audit")
        elif run is not None and self._asked != run.id:
            self._asked = run.id
            self.console.work_on(self._fetch(run.id, ""), "audit")
        rows: list[Row] = [BLANK, BLANK, BLANK]
        if run is not None:
            rows = progress_rows(run, self.summary, width)
        self.query_one("#progress", Painted).show(rows)
        mark = [("warn", "VIRTUAL")] if self.host.virtual else []
        title = [("strong", "Audit"), ("dim", f" on {clean(self.host.name)}  {self.run_id}")]
        self.query_one("#head", Painted).show([spread(title, mark, width)])
        self.query_one("#foot", Painted).show([foot_row(width, foot_of(AUDIT))])

    def _show(self) -> None:
        """Paint the lists from what is known."""
        kinds, faults = self.query_one("#kinds", RowList), self.query_one("#faults", RowList)
        found = bool(self.summary and (self.summary["faults"] or self.summary["remarks"]))
        faults.choosing = found or (bool(self.faults) and self.summary is None)
        if kinds.display is not found:
            kinds.display = found
            self.call_after_refresh(self._show)  # the widths are others from then on
        width = max(20, faults.size.width - 1)
        if self.summary is not None and found:
            kinds.show(kind_rows(self.summary, self.code, KINDS_WIDTH))
        if faults.choosing:
            faults.show(FaultRows(self.faults, width, coded=not self.code))
            self._say()
        else:
            faults.show(self._words(width))

    def _say(self) -> None:
        """Write the finding under the cursor in full: its row may be cut."""
        at, width = self.query_one("#faults", RowList).cursor, self.size.width - 3
        rows: list[Row] = [BLANK, BLANK]
        if at < len(self.faults):
            fault = self.faults[at]
            rows = paragraph(f"{fault.get('path') or 'the folder'}: {fault.get('text')}", width, "dim")
        self.query_one("#said", Painted).show(rows[:2])

    def _words(self, width: int) -> list[Row]:
        run = self.run_shown()
        if self.problem:
            return paragraph(self.problem, width, "bad")
        if run is None:
            text = f"No audit has run on this host. n audits {self.target}: every shard, and all of them together."
            return paragraph(text, width)
        if run.state in RUN_LIVE:
            return paragraph(
                "No fault so far. Each is listed here when it is found; the audit goes on when you leave.", width, "dim"
            )
        return paragraph("Nothing was found." if self.summary else "reading what it found", width, "dim")

    # --- asking ---

    async def _fetch(self, run_id: str, code: str) -> None:
        """Fetch summary and findings, a page at a time."""
        fleet = self.console.fleet
        try:
            if self.summary is None:
                summary = await answer(fleet.audit_result(self.host.name, run_id))
                if run_id == self.run_id:
                    self.summary, self.faults = summary, []  # these were found so far; now comes what holds
            offset: int | None = 0
            while offset is not None and self._wanted(run_id, code) and len(self.faults) < MOST_FAULTS:
                page = await answer(fleet.audit_faults(self.host.name, run_id, offset, code))
                if self._wanted(run_id, code):
                    self.faults += page["faults"]
                    self._show()
                offset = page["next"]
        except Exception as error:
            if self._wanted(run_id, code):
                self.problem = str(error) or type(error).__name__
        if self._wanted(run_id, code):
            self._show()

    async def _fetch_found(self, run_id: str) -> None:
        """Fetch what a running audit has found since the last time, in the order in which it was found."""
        try:
            page = await answer(self.console.fleet.audit_faults(self.host.name, run_id, self._told))
            if self._wanted(run_id, "") and page["live"] and self.summary is None:
                self._told = page["at"]
                if page["faults"]:
                    self.faults = self.faults + page["faults"]
                    self._show()
        except Exception:
            pass  # it has only just begun, or the connection has gone, which the title says: the next tick asks again
        finally:
            self._polling = False

    def _wanted(self, run_id: str, code: str) -> bool:
        return self.is_running and (run_id, code) == (self.run_id, self.code)

    # --- keys ---

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        """Show only the kind under the cursor."""
        self._say()
        if event.rows.id != "kinds" or self.summary is None:
            return
        code = ["", *self.summary["faults"], *self.summary["remarks"]][event.index]
        if code != self.code:
            self.code, self.faults = code, []
            self.query_one("#faults", RowList).select(0)
            self._show()
            self.console.work_on(self._fetch(self.run_id, code), "audit")

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        """Open the file of a fault; of a kind, go to its faults."""
        if event.rows.id == "kinds":
            self.action_side("faults")
        elif event.index < len(self.faults):
            run, inside = self.run_shown(), str(self.faults[event.index].get("path", ""))
            folder = str(self.summary["path"]) if self.summary is not None else audited(run) if run is not None else ""
            self.app.push_screen(ShardScreen(self.host, folder, inside))

    def action_side(self, name: str) -> None:
        """Go to the kinds or to the faults."""
        self.query_one(f"#{name}").focus()

    def action_start(self) -> None:
        """Start an audit; what has not changed since the last one is not read again."""
        run = self.run_shown()
        if run is not None and run.state in RUN_LIVE:
            self.console.say("This audit is still running.", "warning")
            return
        target = (audited(run) if run is not None else "") or self.target
        future = self.console.fleet.audit(self.host.name, Stage(kind="audit", folder=target))
        self.console.ask(future, lambda started: self.choose(started.id), "audit")

    def action_other(self, step: int) -> None:
        """Change to an older or newer audit."""
        ids = [run.id for run in self.audits()]
        if self.run_id in ids:
            at = max(0, min(len(ids) - 1, ids.index(self.run_id) + step))
            if ids[at] != self.run_id:
                self.choose(ids[at])

    def action_back(self) -> None:
        """Leave."""
        self.app.pop_screen()
