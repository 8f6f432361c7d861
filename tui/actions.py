"""Everything a key or a button does, in one table: bindings, buttons, footer, help and palette are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding

_WRITTEN = {
    "left": "←", "right": "→", "up": "↑", "down": "↓", "escape": "Esc", "backspace": "Backspace", "enter": "Enter",
    "tab": "Tab", "slash": "/", "comma": ",", "full_stop": ".", "plus": "+", "minus": "-", "pageup": "PgUp",
    "pagedown": "PgDn", "shift+left": "⇧←", "shift+right": "⇧→", "space": "Space", "question_mark": "?",
    "equals_sign": "=", "underscore": "_", "home": "Home", "end": "End", "ctrl+p": "^p", "f1": "F1",
}  # fmt: skip
"""Keys as they are written, where Textual's name of one is another."""


def written(key: str) -> str:
    """Write a key as it stands on the screen."""
    return _WRITTEN.get(key, key)


@dataclass(frozen=True)
class Action:
    """One thing the operator can do. `keys` are Textual key names, the first is the one that is shown.

    `button` puts it on the action bar, `footer` in the line below; `danger` marks what kills or launches, `changes`
    what otherwise changes a host or whom the console trusts. A console that may only look refuses both.
    """

    id: str
    keys: tuple[str, ...]
    label: str
    says: str
    button: bool = False
    footer: bool = False
    danger: bool = False
    changes: bool = False

    @property
    def key(self) -> str:
        """Return the key as it is written on the screen."""
        return written(self.keys[0])


ACTIONS = (
    Action(
        "reset",
        ("R", "r"),
        "Reset",
        "Show whom it kills, then kill and verify zeros",
        True,
        danger=True,
    ),
    Action("launch", ("L",), "Launch", "Check the gates of a stage and launch it", True, danger=True),
    Action("verify", ("V", "v"), "Verify", "Verify the GPUs without killing anything", True),
    Action("shards", ("S", "s"), "Shards", "Look into the shards on the host", True),
    Action("audit", ("A", "a"), "Audit", "Follow the audit of the shards, or start one; its faults open their files"),
    Action("log", ("O", "o"), "Log", "Follow the output of a run", True),
    Action("timeline", ("T", "t"), "Timeline", "Scrub through what the host did, second by second", True),
    Action(
        "stop_run",
        ("X",),
        "Stop run",
        "Stop the run shown; what is in flight finishes",
        danger=True,
    ),
    Action("baseline", ("B",), "Baseline", "Record what idle GPUs hold, to compare with", changes=True),
    Action("connect", ("C", "c"), "Connect", "Connect again, or look at a host's key", changes=True),
    Action("open_host", ("enter",), "Open", "Open the host and the GPU in focus", footer=True),
    Action("pause", ("space",), "Pause", "Stop and resume painting, nothing else", footer=True),
    Action("palette", ("ctrl+p",), "Palette", "Find any of these by name", footer=True),
    Action("help", ("question_mark", "f1"), "Help", "Show every key", True, footer=True),
    Action("quit", ("q",), "Quit", "Leave; runs and resets on the hosts go on", footer=True),
)

MOVES = (
    ("Tab", "next host or button"),
    ("↑ ↓ ← →  h j k l", "move over the GPUs; past the edge to the next host"),
    ("0 to 9", "choose a GPU of the host in focus by its number"),
    ("Esc", "back, or close a dialog"),
)


def bindings() -> list[Binding]:
    """Make the app's bindings from the table."""
    return [
        Binding(",".join(action.keys), action.id, action.label, show=False, priority=False)
        for action in ACTIONS
        if action.id not in ("open_host", "palette")
    ]
