"""The question about a host's key: accepted here only where the host was never seen before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.screens.base import Dialog
from tui.widgets.buttons import ActionButton
from tui.widgets.rows import BLANK, clean, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widgets import Button

    from backend.fleet import HostKey
    from tui.widgets.rows import Row

WARNINGS = {
    "changed": "THE KEY HAS CHANGED. Either the host was set up again, or somebody stands in between. Ask whoever "
    "runs the host; if the new key is right, remove the old one with ssh-keygen -R and connect again.",
    "revoked": "THIS KEY IS REVOKED in known_hosts. It is not accepted from here.",
}


def key_rows(key: HostKey, width: int) -> list[Row]:
    """Show a key as ssh prints it, and what it means to accept it."""
    rows: list[Row] = [(("dim", "host         "), ("text", f"{clean(key.host)}, port {key.port}"))]
    rows.append((("dim", "key          "), ("text", clean(key.algorithm))))
    rows += [(("dim", "fingerprint  "), ("strong", clean(key.fingerprint))), BLANK]
    if key.verdict != "unknown":
        return rows + paragraph(WARNINGS.get(key.verdict, f"This key is {key.verdict}."), width, "bad")
    text = "This host is in no known_hosts file. Compare the fingerprint with what the host itself prints:"
    rows += paragraph(text, width)
    return [*rows, (("accent", "  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"),)]


class HostKeyDialog(Dialog):
    """Shows the key; the focus is on Cancel, and Trust exists only for an unknown key."""

    def __init__(self, host: str, key: HostKey) -> None:
        super().__init__()
        self.host, self.key = host, key

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Cancel, and Trust where that can be right."""
        yield ActionButton("Cancel", key="Esc", id="cancel")
        if self.key.verdict == "unknown":
            yield ActionButton("Trust and connect", id="go", danger=True)

    def on_mount(self) -> None:
        """Fill the dialog."""
        title: Row = (("strong", "Host key of "), ("accent", clean(self.host)))
        self.show(title, key_rows(self.key, self.text_width), "What you accept is written to known_hosts.")
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Trust the key, or leave."""
        if event.button.id == "go":
            app, host = self.console, self.host
            app.ask(app.fleet.trust(host, self.key), lambda _: app.say(f"{host}: connecting"), "connect")
        self.action_close()
