"""The help: every key, from the tables of keys and actions, and what the marks mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.actions import ACTIONS, MOVES
from tui.screens.base import Dialog
from tui.widgets.buttons import ActionButton
from tui.widgets.rows import BLANK, fit, paragraph, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tui.keys import Key
    from tui.widgets.rows import Row

MARKS = (
    ("ok", "OK", "every reading is there and within its limits"),
    ("warn", "WARM", "worth a look: warm, throttled by the driver, a remap that waits"),
    ("bad", "LOST", "act: lost, hung, too hot, slowed by the hardware, ECC or remap failure"),
    ("unknown", "UNREAD", "a reading failed or is old; never taken for fine"),
    ("text", "fail n/a ?", "this reading failed, is not offered by the GPU, is not read yet"),
)


def help_rows(width: int, keys: Sequence[Key] = ()) -> list[Row]:
    """Make the help from the tables: the screen's own keys first, then what all have."""
    rows: list[Row] = [(("title", "On this screen"),)] if keys else []
    for key in keys:
        first, *rest = wrap(key.says, width - 20)
        rows.append((("key", f"  {fit(key.written, 17)} "), ("dim", first)))
        rows += [(("dim", f"{'':20}{line}"),) for line in rest]
    rows += [BLANK, (("title", "Everywhere"),)] if keys else []
    for action in ACTIONS:
        first, *rest = wrap(action.says, width - 20)
        rows.append((("key", f"  {fit(action.key, 7)}"), ("strong", fit(action.label, 11)), ("dim", first)))
        rows += [(("dim", f"{'':20}{line}"),) for line in rest]
    rows += [BLANK, (("title", "Moving"),)]
    rows += [(("key", f"  {fit(keys, 20)}"), ("dim", says)) for keys, says in MOVES]
    rows += [BLANK, (("title", "Words"),)]
    rows += [((style, f"  {fit(word, 12)}"), ("dim", says)) for style, word, says in MARKS]
    text = "GiB and TiB count in 1024s, GB/s in 1000s. The ETA is by tokens: samples grow longer."
    return [*rows, BLANK, *paragraph(text, width, "dim")]


class HelpDialog(Dialog):
    """Shows every key; Esc, q or ? closes it."""

    BINDINGS = [("question_mark,q,f1", "close", "Close")]  # noqa: RUF012

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        super().__init__()
        self._keys = keys

    def compose_buttons(self) -> Iterable[ActionButton]:
        """One way out."""
        yield ActionButton("Close", key="Esc", id="cancel")

    def on_mount(self) -> None:
        """Fill the dialog."""
        self.show((("strong", "Help"),), help_rows(self.text_width, self._keys))
        self.query_one("#cancel").focus()

    def on_button_pressed(self) -> None:
        """Close."""
        self.action_close()
