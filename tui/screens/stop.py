"""The question before a run is stopped: it says what is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tui import format
from tui.screens.base import Dialog
from tui.widgets.buttons import ActionButton
from tui.widgets.rows import clean, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widgets import Button

    from backend.fleet import HostState
    from backend.wire import Run
    from tui.widgets.rows import Row


def stop_rows(run: Run, width: int, now: float) -> list[Row]:
    """Say how long the run has worked, what it holds uncommitted, and how it is stopped."""
    rows = paragraph(f"It has run for {format.duration(now - run.started_at)}.", width, "strong")
    progress = run.progress
    if progress and progress.samples_total:
        left = progress.samples_total - progress.samples_done
        rows += paragraph(f"{format.count(progress.samples_done)} samples are written and stay.", width)
        rows += paragraph(
            f"{format.count(progress.samples_in_flight)} in flight, {format.count(left)} not done yet.", width
        )
    grace = f"It is asked to finish what is in flight; after {format.duration(run.grace_s)} what is left is killed."
    return rows + paragraph(grace, width, "dim")


class StopDialog(Dialog):
    """Asks, with the focus on Cancel."""

    def __init__(self, host: HostState, run: Run) -> None:
        super().__init__()
        self.host, self.run = host, run

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Cancel first."""
        yield ActionButton("Cancel", key="Esc", id="cancel")
        yield ActionButton("Stop the run", id="go", danger=True)

    def on_mount(self) -> None:
        """Fill the dialog."""
        title: Row = (("strong", f"Stop {clean(self.run.label or self.run.stage)} "), ("accent", self.run.id))
        self.show(title, stop_rows(self.run, self.text_width, time.time()))
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Stop it, or leave."""
        if event.button.id == "go":
            app, run = self.console, self.run
            app.ask(app.fleet.stop_run(self.host.name, run.id), lambda _: app.say(f"{run.id}: stopping"), "stop")
        self.action_close()
