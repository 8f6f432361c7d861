"""The command palette, made from the table of actions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui.actions import ACTIONS, Action
from tui.screens.base import Ticking

if TYPE_CHECKING:
    from tui.keys import Key

SKIPPED = ("palette",)


class ActionCommands(Provider):
    """Offers the keys of the screen, every action by its label and by what it does, and the themes."""

    async def discover(self) -> Hits:
        """List everything before a letter is typed."""
        for key in self._keys():
            yield DiscoveryHit(f"{key.says} ({key.written})", partial(self.screen.run_action, key.action))
        for action in ACTIONS:
            if action.id not in SKIPPED:
                yield DiscoveryHit(_title(action), partial(self.app.run_action, f"app.{action.id}"), help=action.says)
        yield DiscoveryHit("Theme", self.app.action_change_theme, help="Choose other colours")

    async def search(self, query: str) -> Hits:
        """Match the letters against labels and descriptions."""
        matcher = self.matcher(query)
        for key in self._keys():
            text = f"{key.says} ({key.written})"
            if (score := matcher.match(text)) > 0:
                yield Hit(score, matcher.highlight(text), partial(self.screen.run_action, key.action))
        for action in ACTIONS:
            text = f"{_title(action)}: {action.says}"
            score = matcher.match(text)
            if score > 0 and action.id not in SKIPPED:
                yield Hit(
                    score,
                    matcher.highlight(text),
                    partial(self.app.run_action, f"app.{action.id}"),
                    help=action.says,
                )
        if (score := matcher.match("Theme: choose other colours")) > 0:
            yield Hit(score, "Theme", self.app.action_change_theme, help="Choose other colours")

    def _keys(self) -> list[Key]:
        """Return what the keys of the screen below do that are actions of its own."""
        return [key for key in self.screen.KEYS if key.action] if isinstance(self.screen, Ticking) else []


def _title(action: Action) -> str:
    return f"{action.label} ({action.key})"
