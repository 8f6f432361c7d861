"""The dialog that deletes an old cache: its plan, its name typed, then how far it is and the receipt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from textual.widgets import Input

from backend.wire import RUN_LIVE
from tui import format
from tui.retiring import plan_lines, receipt_lines
from tui.screens.base import Dialog, answer
from tui.widgets.buttons import ActionButton
from tui.widgets.rows import bar, clean, pad, paragraph
from tui.widgets.run_rows import run_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from textual.app import ComposeResult
    from textual.widgets import Button

    from backend.fleet import HostState
    from backend.wire import Run
    from tui.widgets.rows import Row


class RetireDialog(Dialog):
    """Asks the host what a deletion would delete. The button opens when the folder's name is typed.

    A deletion that was confirmed goes on when the dialog is closed. `deleted` is called when one has come to its end.
    """

    frame = 9

    def __init__(self, host: HostState, path: str, deleted: Callable[[], None]) -> None:
        super().__init__()
        self.host, self.path, self._deleted = host, path, deleted
        self.plan: dict[str, Any] | None = None
        self.receipt: dict[str, Any] | None = None
        self.run_id = self._asked = ""

    def compose_below(self) -> ComposeResult:
        """Yield the line for the name."""
        typed = Input(id="typed", compact=True)
        typed.display = False
        yield typed

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Cancel first."""
        yield ActionButton("Cancel", key="Esc", id="cancel")
        yield ActionButton("Delete it", id="go", danger=True, disabled=True)

    def on_mount(self) -> None:
        """Ask for the plan."""
        self._say(paragraph(f"the host looks at {self.path}", self.text_width, "dim"))
        self.query_one("#cancel").focus()
        self.console.work_on(self._ask_plan(), "retire")

    def _say(self, rows: list[Row], hint: str = "") -> None:
        mark = (("warn", "  VIRTUAL"),) if self.host.virtual else ()
        self.show((("strong", "Delete an old cache on "), ("accent", clean(self.host.name)), *mark), rows, hint)

    async def _ask_plan(self) -> None:
        try:
            plan = await answer(self.console.fleet.retire_plan(self.host.name, self.path))
        except Exception as error:
            if self.is_running:
                self._say(paragraph(str(error), self.text_width, "bad"), "Nothing is deleted.")
            return
        if self.is_running:
            self._show_plan(plan)

    def _show_plan(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        rows: list[Row] = []
        for line in plan_lines(plan, time.time()):
            style = "bad" if line.startswith("  REFUSED") else "warn" if line.startswith("  refers") else "text"
            text, indent = clean(line.strip()), len(line) - len(line.lstrip())
            whole = [pad([(style, " " * indent + text)], self.text_width)]  # a table's columns, which would be wrapped
            fits = indent + len(text) <= self.text_width
            rows += whole if fits else paragraph(text, self.text_width, style, indent)
        if plan["refused"]:
            self._say(rows, "Nothing is deleted while anything is refused.")
            return
        self._say(rows, f"Type {clean(plan['name'])} to delete it. It cannot be undone.")
        typed = self.query_one("#typed", Input)
        typed.placeholder = f"type {clean(plan['name'])}"
        typed.display = True
        typed.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Open the button when the name stands there."""
        self.query_one("#go", ActionButton).disabled = self.plan is None or event.value != self.plan["name"]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go on to the button: to delete takes one more key."""
        go = self.query_one("#go", ActionButton)
        if not go.disabled:
            go.focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Delete what was confirmed, or leave."""
        if event.button.id != "go" or self.plan is None:
            self.action_close()
            return
        event.button.disabled = True
        self.query_one("#typed").display = False
        self.query_one("#cancel").focus()
        self.console.work_on(self._delete(self.plan), "retire")

    async def _delete(self, plan: dict[str, Any]) -> None:
        try:
            run = await answer(self.console.fleet.retire(self.host.name, plan["target"], plan["digest"]))
        except Exception as error:
            if self.is_running:
                self._say(paragraph(str(error), self.text_width, "bad"), "Nothing is deleted.")
            return
        self.run_id = run.id
        if self.is_running:
            self.tick()

    def tick(self) -> None:
        """Paint how far it is; when it has ended, what came of it."""
        run = self.host.runs.get(self.run_id)
        if run is None or self.receipt is not None:
            return
        if run.state not in RUN_LIVE and self._asked != run.id:
            self._asked = run.id
            self.console.work_on(self._ask_receipt(run.id), "retire")
        self._say(self._progress_rows(run), "It goes on when this is closed.")

    def _progress_rows(self, run: Run) -> list[Row]:
        width, progress = self.text_width, run.progress
        rows: list[Row] = [(("strong", f"{run.id}  "), run_state(run))]
        if progress is not None and progress.samples_total:
            counts = f" {format.count(progress.samples_done)} of {format.count(progress.samples_total)} files"
            share = progress.samples_done / progress.samples_total
            rows.append((*bar(share, max(10, width - len(counts))), ("text", counts)))
        return rows

    async def _ask_receipt(self, run_id: str) -> None:
        try:
            receipt = await answer(self.console.fleet.retire_receipt(self.host.name, run_id))
        except Exception as error:
            receipt = {"verdict": "unknown", "deleted": None, "reason": str(error)}
        self._deleted()
        if self.is_running:
            self.receipt = receipt
            style = "ok" if receipt["verdict"] == "deleted" else "bad"
            rows = [row for line in receipt_lines(receipt) for row in paragraph(clean(line), self.text_width, style)]
            self._say(rows, f"The receipt stays on the host, with the run {run_id}.")
