"""The reset dialog: whom it would kill, then what it does, then the verdict. Verification uses its last part."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backend.wire import RUN_LIVE
from tui import format
from tui.screens.base import Dialog, answer
from tui.widgets.buttons import ActionButton
from tui.widgets.plan_rows import plan_rows, plan_summary
from tui.widgets.reset_rows import running_rows, verdict_rows
from tui.widgets.rows import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widgets import Button

    from backend.fleet import HostState
    from backend.wire import Plan, Receipt
    from tui.widgets.rows import Row

ASKING, PLAN, RUNNING, VERDICT, FAILED = "asking", "plan", "running", "verdict", "failed"


class ResetDialog(Dialog):
    """One reset of one host. Closing it never stops a reset that has begun; opening it again finds it."""

    def __init__(self, host: HostState, *, verify: bool = False) -> None:
        super().__init__()
        self.host = host
        self.verify = verify
        self.state = ASKING
        self.plan: Plan | None = None
        self._shown = 0

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Cancel first: it has the focus."""
        yield ActionButton("Cancel", key="Esc", id="cancel")
        yield ActionButton("Kill and verify", id="go", danger=True, disabled=True)

    def on_mount(self) -> None:
        """Join a reset that runs, else ask for the plan."""
        self.query_one("#cancel").focus()
        if self.host.reset.running:
            self._enter(RUNNING)
        elif self.verify:
            self._ask_verdict()
        else:
            self._say("asking the host who holds its GPUs")
            self.console.work_on(self._ask_plan(), "reset")

    def _title(self, text: str) -> Row:
        mark = (("warn", "  VIRTUAL"),) if self.host.virtual else ()
        return (("strong", text), ("text", " "), ("accent", clean(self.host.name)), *mark)

    def _say(self, text: str) -> None:
        self.show(self._title("Verify" if self.verify else "Reset"), [(("dim", text),)])

    async def _ask_plan(self) -> None:
        try:
            self.plan = await answer(self.console.fleet.plan_reset(self.host.name))
        except Exception as error:
            self._fail(error)
            return
        if self.is_running and self.state == ASKING:
            self._show_plan(self.plan)

    def _show_plan(self, plan: Plan) -> None:
        self.state = PLAN
        if self._unasked(plan):
            self._start()
            return
        count = len(plan.victims)
        hint = f"up to {format.duration(plan.deadline_s)}; memory above baseline after that is NOT CLEAN"
        title = (*self._title("Reset"), ("dim", f"   {plan_summary(plan)}"))
        self.show(
            title, plan_rows(plan, self.text_width), hint if count else "verify reads every GPU and kills nothing"
        )
        go = self.query_one("#go", ActionButton)
        go.name_it(f"Kill {count} and verify" if count else "Verify")
        go.set_class(bool(count), "-danger")
        go.disabled = False

    def _unasked(self, plan: Plan) -> bool:
        """Say whether `confirm = "never"` applies: only runs of our own die, nothing is lost, nothing progresses."""
        progresses = any(run.state in RUN_LIVE and run.progress for run in list(self.host.runs.values()))
        ours = bool(plan.victims) and all(victim.run_id for victim in plan.victims)
        return self.host.config.confirm == "never" and ours and not plan.losses and not progresses

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Cancel, or begin."""
        if event.button.id == "cancel":
            self.action_close()
        elif self.state == PLAN and self.plan is not None and self.plan.victims:
            self._start()
        elif self.state in (PLAN, VERDICT):
            self._ask_verdict()

    def _start(self) -> None:
        assert self.plan is not None
        self.query_one("#go", ActionButton).disabled = True
        self.query_one("#cancel").focus()
        self.state = ASKING
        self.console.work_on(self._begin(self.plan), "reset")

    async def _begin(self, plan: Plan) -> None:
        try:
            await answer(self.console.fleet.start_reset(self.host.name, plan))
        except Exception as error:
            self._fail(error)
            return
        if self.is_running:
            self._enter(RUNNING)

    def _ask_verdict(self) -> None:
        self.verify = True
        self.state = ASKING
        self.query_one("#go", ActionButton).disabled = True
        self._say("reading every GPU; this takes a few seconds, nothing is killed")
        self.console.work_on(self._verdict(), "reset")

    async def _verdict(self) -> None:
        try:
            receipt = await answer(self.console.fleet.verify(self.host.name))
        except Exception as error:
            self._fail(error)
            return
        if self.is_running:
            self._show_verdict(receipt)

    def _fail(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if not self.is_running:
            self.console.say(f"{self.host.name}: {text}", "error")
            return
        self.state = FAILED
        self.show(
            self._title("Reset" if not self.verify else "Verify"),
            [(("bad", "REFUSED"),), (("text", clean(text)),)],
        )
        self.query_one("#cancel", ActionButton).name_it("Close")

    def _enter(self, state: str) -> None:
        self.state = state
        self.query_one("#cancel", ActionButton).name_it("Close")
        self.query_one("#go").display = False
        self.tick()

    def _show_verdict(self, receipt: Receipt) -> None:
        self._enter(VERDICT)
        self.body.styles.height = 1
        title = {"verify": "Verified", "gpu-reset": "Reset by the driver of"}.get(receipt.kind, "Reset of")
        self.show(self._title(title), verdict_rows(receipt, self.text_width))
        self.body.scroll_to(y=0, animate=False)

    def tick(self) -> None:
        """Follow the reset that runs, until its receipt is there."""
        if self.state != RUNNING:
            return
        reset = self.host.reset
        if not reset.running and reset.receipt is not None:
            self._show_verdict(reset.receipt)
            return
        elapsed = time.time() - reset.started_at if reset.started_at else 0.0
        title = (*self._title("Resetting"), ("dim", f"   {format.duration(elapsed)}"))
        hint = "Closing this window does not stop the reset; R shows it again."
        if not reset.running:
            hint = "The reset ended without a receipt; its log says why (O)."
        grown = len(reset.events) != self._shown
        self._shown = len(reset.events)
        self.show(title, running_rows(reset, elapsed, self.text_width), hint, follow=grown)
