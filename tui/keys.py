"""The keys of each screen, in a table a screen: its bindings, footer, help, palette and docs/keys.md are made of it.

`python -m tui.keys` prints docs/keys.md. What all screens share is in `actions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.binding import Binding

from tui.actions import ACTIONS, MOVES, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Key:
    """What one key does on one screen. `action` is Textual's; empty: the list in focus has the key.

    `foot` are the key and the word of the footer, whose key may stand for this and the next one together. `changes`
    marks what changes a host: a console that may only look refuses it.
    """

    keys: tuple[str, ...]
    action: str
    says: str
    foot: tuple[str, str] | None = None
    changes: bool = False

    @property
    def written(self) -> str:
        """Return its keys as they are written."""
        return " ".join(written(key) for key in self.keys)


HOST = (
    Key(("escape", "backspace"), "app.pop_screen", "Go back to all hosts", ("Esc", "back")),
    Key(("up", "down"), "", "Choose a GPU", ("↑ ↓", "GPU")),
    Key(("pageup",), "page(-1)", "Scroll the detail up", ("PgUp PgDn", "scroll")),
    Key(("pagedown",), "page(1)", "Scroll the detail down"),
    Key(("space",), "", "Stop and resume painting", ("Space", "pause")),
)
SHARDS = (
    Key(("enter",), "", "Open a folder, go to a file's tensors, or read a tensor's values", ("Enter", "open")),
    Key(("n",), "values", "Read a sample of the shard's values: figures and a histogram", ("n", "values")),
    Key(("slash",), "filter", "Show only names that hold these words", ("/", "filter")),
    Key(("f",), "follow", "Show the newest shard, and each that a running extraction adds", ("f", "newest")),
    Key(("left", "h"), "out", "Go back to the tree, or fold the folder", ("← →", "tree, tensors")),
    Key(("right", "l"), "into", "Unfold a folder, or go to the tensors"),
    Key(("escape",), "back", "Leave the field, the tensors, the filter, then the screen", ("Esc", "back")),
    Key(("p",), "path", "Type a path on the host", ("p", "path")),
    Key(("A",), "", "Audit this folder, or follow its audit", ("A", "audit")),
    Key(("backspace",), "up", "Go to the folder above"),
    Key(
        ("D",),
        "retire",
        "Delete this folder, an old cache: its plan first, then its name typed",
        ("D", "delete"),
        changes=True,
    ),
)
AUDIT = (
    Key(("enter",), "", "Open the file of a fault; of a kind, go to its faults", ("Enter", "open the file")),
    Key(("left", "h"), "side('kinds')", "Go to the kinds of faults", ("← →", "kinds, faults")),
    Key(("right", "l"), "side('faults')", "Go to the faults"),
    Key(("n",), "start", "Audit again: what has not changed is not read again", ("n", "new audit"), changes=True),
    Key(("comma",), "other(1)", "Show the audit before", (", .", "older, newer")),
    Key(("full_stop",), "other(-1)", "Show the audit after"),
    Key(("escape", "backspace"), "back", "Go back", ("Esc", "back")),
)
LOG = (
    Key(("f",), "follow", "Stay at the end as it grows, or stop there", ("f", "follow")),
    Key(("left", "h"), "other(1)", "Show the run before", ("← →", "other run")),
    Key(("right", "l"), "other(-1)", "Show the run after"),
    Key(("escape", "backspace"), "app.pop_screen", "Go back", ("Esc", "back")),
)
TIMELINE = (
    Key(("left", "h"), "scrub(-1)", "One cell earlier", ("← →", "scrub")),
    Key(("right", "l"), "scrub(1)", "One cell later"),
    Key(("plus", "equals_sign"), "zoom(-1)", "Look closer", ("+ -", "zoom")),
    Key(("minus", "underscore"), "zoom(1)", "Look at more"),
    Key(("up", "k", "N"), "event(-1)", "Go to the event before", ("↑ ↓", "event")),
    Key(("down", "j", "n"), "event(1)", "Go to the next event"),
    Key(("m",), "metric", "Draw another reading of the GPUs", ("m", "reading")),
    Key(("p",), "play", "Let time go on, or stop it", ("p", "play")),
    Key(("tab",), "below", "Show the log of that second, or the events", ("Tab", "log")),
    Key(("escape", "backspace"), "app.pop_screen", "Go back", ("Esc", "back")),
    Key(("shift+left", "pageup", "H"), "scrub(-10)", "Ten cells earlier"),
    Key(("shift+right", "pagedown", "L"), "scrub(10)", "Ten cells later"),
    Key(("0",), "whole", "Show all that was recorded"),
    Key(("u",), "run", "Show the run at the cursor"),
    Key(("f", "end"), "follow", "Go to now, and go on with it"),
    Key(("g", "home"), "first", "Go to the beginning"),
)
SCREENS = {"Host": HOST, "Shards": SHARDS, "Audit": AUDIT, "Log": LOG, "Timeline": TIMELINE}

CHANGES = frozenset(
    [action.id for action in ACTIONS if action.danger or action.changes]
    + [key.action for keys in SCREENS.values() for key in keys if key.changes]
)
"""Textual's names of the actions that change a host."""


def bindings_of(keys: Iterable[Key]) -> list[Binding]:
    """Make a screen's bindings."""
    return [Binding(",".join(key.keys), key.action, key.says, show=False) for key in keys if key.action]


def foot_of(keys: Iterable[Key], words: Mapping[str, str] | None = None) -> Sequence[tuple[str, str]]:
    """Make a screen's part of the footer. `words` has other words for actions that mean something else just now."""
    return [(key.foot[0], (words or {}).get(key.action, key.foot[1])) for key in keys if key.foot is not None]


def page() -> str:
    """Return docs/keys.md."""
    lines = ["# Keys", "", "Made by `python -m tui.keys` from the tables that the console itself is made of.", ""]
    lines += ["## Everywhere", "", "| key | | |", "|---|---|---|"]
    for action in ACTIONS:
        keys_of = " ".join(map(written, action.keys))
        lines.append(f"| `{keys_of}` | {action.label} | {action.says} |")
    lines += ["", "Moving:", "", "| key | |", "|---|---|", *(f"| `{keys}` | {says} |" for keys, says in MOVES)]
    for name, keys in SCREENS.items():
        lines += ["", f"## {name}", "", "| key | |", "|---|---|"]
        lines += [f"| `{key.written}` | {key.says} |" for key in keys]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
