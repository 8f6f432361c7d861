"""The command palette, made from the table of actions."""

from __future__ import annotations

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui.actions import ACTIONS, Action

SKIPPED = ("palette",)


class ActionCommands(Provider):
    """Offers every action by its label and by what it does, and the themes."""

    async def discover(self) -> Hits:
        """List everything before a letter is typed."""
        for action in ACTIONS:
            if action.id not in SKIPPED:
                yield DiscoveryHit(_title(action), partial(self.app.run_action, f"app.{action.id}"), help=action.says)
        yield DiscoveryHit("Theme", self.app.action_change_theme, help="Choose other colours")

    async def search(self, query: str) -> Hits:
        """Match the letters against labels and descriptions."""
        matcher = self.matcher(query)
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


def _title(action: Action) -> str:
    return f"{action.label} ({action.key})"
