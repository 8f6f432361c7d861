"""One table a screen: what its keys do, what the footer, the help, the palette and the docs say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driving import SMALL, console
from tui import keys
from tui.actions import ACTIONS
from tui.app import EightZeros
from tui.screens.audit import AuditScreen
from tui.screens.host import HostScreen
from tui.screens.logs import LogScreen
from tui.screens.shards import ShardScreen
from tui.screens.timeline import TimelineScreen

SCREENS = {
    "Host": HostScreen,
    "Shards": ShardScreen,
    "Audit": AuditScreen,
    "Log": LogScreen,
    "Timeline": TimelineScreen,
}


def test_the_docs_are_what_the_tables_say() -> None:
    page = Path(__file__).parent.parent / "docs/keys.md"
    assert page.read_text() == keys.page(), "python -m tui.keys > docs/keys.md"


@pytest.mark.parametrize("name", SCREENS)
def test_every_key_of_a_screen_does_something_and_none_does_two_things(name: str) -> None:
    screen, table = SCREENS[name], keys.SCREENS[name]
    assert table == screen.KEYS
    seen: set[str] = set()
    for key in table:
        assert not seen & set(key.keys), key
        seen |= set(key.keys)
        owner, _, action = key.action.partition("(")[0].rpartition(".")
        if action:
            assert hasattr(EightZeros if owner == "app" else screen, f"action_{action}"), key
    bound = {(binding.key, binding.action) for bindings in screen._merged_bindings.key_to_bindings.values()
             for binding in bindings} if screen._merged_bindings else set()  # fmt: skip
    assert {(one, key.action) for key in table if key.action for one in key.keys} <= bound


async def test_help_footer_and_palette_tell_the_keys_of_the_screen() -> None:
    async with console(SMALL) as shown:
        await shown.press("O")
        await shown.shows(LogScreen)
        await shown.sees("← → other run")
        await shown.press("question_mark")
        await shown.sees("On this screen", "Show the run before", "Everywhere")
        await shown.press("escape", "ctrl+p")
        await shown.press(*"stay")
        await shown.sees("Stay at the end as it grows")
        screen = shown.app.screen_stack[-2]
        assert isinstance(screen, LogScreen) and screen.following
        await shown.press("enter")
        await shown.until(lambda: shown.app.screen is screen and not screen.following)


async def test_the_help_of_the_first_screen_has_every_action() -> None:
    async with console((120, 60)) as shown:
        await shown.press("question_mark")
        await shown.sees(*(action.label for action in ACTIONS))
        assert "On this screen" not in shown.text
