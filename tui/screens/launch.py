"""The launch dialog: choose a stage, see every gate, and launch only where all are open or a reason is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.widgets import Input

from tui.screens.base import Dialog, answer
from tui.widgets.buttons import ActionButton
from tui.widgets.launch_rows import gate_rows, launchable, next_stage, passed, stage_rows
from tui.widgets.painted import RowList
from tui.widgets.rows import clean
from tui.widgets.run_rows import stage_states

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.widgets import Button

    from backend.fleet import HostState
    from backend.wire import Gate
    from tui.widgets.rows import Row

LEAST_REASON = 8
"""Letters of a reason to launch past a shut gate: it is kept in the run and the receipt."""


class LaunchDialog(Dialog):
    """Stages above, gates below. The Launch button opens only when the host said that every gate is open."""

    def __init__(self, host: HostState) -> None:
        super().__init__()
        self.host = host
        self.names: list[str] = []
        self.stage = ""
        self.found: list[Gate] | None = None

    def compose_above(self) -> Iterable[RowList]:
        """Yield the list of stages."""
        yield RowList(id="stages", cursor=True)

    def compose_below(self) -> ComposeResult:
        """Yield the line for a reason."""
        reason = Input(placeholder="reason to launch anyway, kept in the run", id="reason", compact=True)
        reason.display = False
        yield reason

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Cancel, look again, launch."""
        yield ActionButton("Cancel", key="Esc", id="cancel")
        yield ActionButton("Check again", id="again")
        yield ActionButton("Launch", id="go", danger=True, disabled=True)

    def on_mount(self) -> None:
        """List the stages and check the first one that waits."""
        config = self.console.fleet.config
        self.names = launchable(config, self.host.name)
        stages = self.query_one("#stages", RowList)
        states = stage_states(config, [self.host])
        rows = stage_rows(config, self.names, dict(states))
        shown = max(1, min(len(rows), 8))
        stages.styles.height = shown
        self.frame = 11 + shown
        stages.show(rows)
        if not self.names:
            self._say(
                [(("text", "The configuration has no stage for this host."),)],
                "docs/configuration.md shows how",
            )
            self.query_one("#cancel").focus()
            return
        stages.focus()
        stages.select(next_stage(states, self.names))
        self._check()

    def _say(self, rows: list[Row], hint: str = "") -> None:
        mark = (("warn", "  VIRTUAL"),) if self.host.virtual else ()
        self.show((("strong", "Launch on "), ("accent", clean(self.host.name)), *mark), rows, hint)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        """Check another stage."""
        self._check()

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        """Go on from the list to the button that is open."""
        go = self.query_one("#go", ActionButton)
        (self.query_one("#reason") if go.disabled and self.query_one("#reason").display else go).focus()

    def _check(self) -> None:
        self.stage = self.names[self.query_one("#stages", RowList).cursor]
        self.found = None
        self.query_one("#reason").display = False
        self._open()
        self._say([(("dim", f" asking the host what {self.stage} needs"),)])
        self.console.work_on(self._ask(self.stage), "gates")

    async def _ask(self, stage: str) -> None:
        try:
            gates = await answer(self.console.fleet.gates(self.host.name, stage))
        except Exception as error:
            if self.is_running and stage == self.stage:
                self._say([(("unknown", " The gates could not be checked."),), (("text", f" {clean(str(error))}"),)])
            return
        if not self.is_running or stage != self.stage:
            return
        self.found = gates
        shut = not passed(gates)
        self.query_one("#reason").display = shut
        hint = "A gate is shut. Mend it, or give a reason to launch anyway." if shut else ""
        self._say(gate_rows(gates, self.text_width), hint or f"Every gate of {stage} is open.")
        self._open()

    def _reason(self) -> str:
        return self.query_one("#reason", Input).value.strip()

    def _open(self) -> None:
        """Enable the button where all gates are open, or where a reason stands in for them."""
        go = self.query_one("#go", ActionButton)
        shut = self.found is not None and not passed(self.found)
        go.name_it(f"Launch {self.stage} anyway" if shut else f"Launch {self.stage}")
        go.set_class(shut, "-danger")
        go.disabled = self.found is None or (shut and len(self._reason()) < LEAST_REASON)

    def on_input_changed(self) -> None:
        """Look whether the reason is long enough."""
        self._open()

    def on_input_submitted(self) -> None:
        """Go on to the button."""
        if not self.query_one("#go").disabled:
            self.query_one("#go").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Launch, check again, or leave."""
        if event.button.id == "cancel":
            self.action_close()
        elif event.button.id == "again" and self.names:
            self._check()
        elif event.button.id == "go" and self.found is not None:
            force = "" if passed(self.found) else self._reason()
            self.query_one("#go").disabled = True
            self.console.work_on(self._launch(self.stage, force), "launch")

    async def _launch(self, stage: str, force: str) -> None:
        try:
            run = await answer(self.console.fleet.launch(self.host.name, stage, force))
        except Exception as error:
            self.console.say(f"{self.host.name}: {stage} was not launched: {error}", "error")
            if self.is_running:
                self._check()
            return
        self.console.say(f"{self.host.name}: {run.id} launched")
        if self.is_running:
            self.dismiss()
