"""One-line buttons, so that actions stay visible at 80x24."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Button


class ActionButton(Button):
    """A button of one line that shows its key beside its label."""

    def __init__(
        self,
        label: str,
        *,
        key: str = "",
        id: str | None = None,
        danger: bool = False,
        disabled: bool = False,
    ):
        super().__init__(caption(label, key), id=id, disabled=disabled, classes="-danger" if danger else "")
        self.key = key

    def name_it(self, label: str) -> None:
        """Change the label."""
        self.label = caption(label, self.key)
        self.refresh(layout=True)


def caption(label: str, key: str) -> Content:
    """Write a key and a label; neither is read as markup."""
    return Content.assemble((f" {key}", "bold"), f" {label} ") if key else Content(f" {label} ")
