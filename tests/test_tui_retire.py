"""Deleting an old cache from the shard browser: the plan, the typed name, a real deletion, its receipt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import auditing
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.runstore import a_store, ended
from tests.shardfleet import ShardFleet
from tui.screens.retire import RetireDialog
from tui.screens.shards import ShardScreen
from tui.widgets.buttons import ActionButton

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backend.agent.runs import RunStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make two caches in a root, of which a record names one."""
    for name in ("new", "old"):
        for index in (0, 1):
            auditing.age(auditing.write(tmp_path / "root" / name, index), 7200.0)
    (tmp_path / "root/train.json").write_text(json.dumps({"data": str(tmp_path / "root/old")}))
    return tmp_path / "root"


@pytest.mark.parametrize("size", [SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in (MIDDLE, LARGE))])
async def test_the_name_is_typed_then_it_is_deleted(root: Path, store: RunStore, size: tuple[int, int]) -> None:
    fleet = ShardFleet(str(root), store)
    async with console(size, fleet=fleet) as shown:
        await shown.press("S")
        await shown.sees("new/", "old/")
        browser = shown.app.screen
        assert isinstance(browser, ShardScreen)
        await shown.press("down")
        await shown.until(lambda: browser.shards.inside(browser.line) == "old")
        await shown.press("D")
        await shown.sees("2 files", "train.json", "Type old to delete it")
        go = shown.app.screen.query_one("#go", ActionButton)
        await shown.press(*"new", "enter")
        assert go.disabled and not shown.asked("retire")
        await shown.press(*["backspace"] * 3, *"old")
        await shown.until(lambda: not go.disabled)
        await shown.press("enter")
        assert not shown.asked("retire")
        await shown.press("enter")
        await shown.until(lambda: shown.asked("retire"))
        await shown.sees("retire-1")
        fleet.hosts["gpu-01"].runs["retire-1"] = ended(store, "retire-1")
        await shown.sees("deleted: 2 files", "The receipt stays on the host")
        assert not (root / "old").exists() and (root / "new/rows_0-2000/data_1.ckpt").exists()
        await shown.press("escape")
        await shown.shows(ShardScreen)
        await shown.until(lambda: "new/" in shown.text and "old/" not in shown.text)


async def test_a_refused_plan_says_why_and_has_no_button(root: Path, store: RunStore) -> None:
    (root / "old/rows_0-2000/data_0.ckpt").write_bytes(b"just now")
    async with console(SMALL, fleet=ShardFleet(str(root), store)) as shown:
        await shown.press("S")
        await shown.sees("old/")
        await shown.press("down", "D")
        await shown.sees("REFUSED fresh", "Nothing is deleted while anything is refused")
        assert shown.app.screen.query_one("#go", ActionButton).disabled
        await shown.press("escape")
        await shown.shows(ShardScreen)


async def test_what_changed_since_the_plan_is_not_deleted(root: Path, store: RunStore) -> None:
    async with console(SMALL, fleet=ShardFleet(str(root), store)) as shown:
        await shown.press("S")
        await shown.sees("old/")
        await shown.press("down", "D")
        await shown.sees("Type old")
        auditing.age(auditing.write(root / "old", 2), 7200.0)
        await shown.press(*"old", "enter", "enter")
        await shown.sees("not as it was confirmed", "Nothing is deleted.")
        assert (root / "old/rows_0-2000/data_2.ckpt").exists()


async def test_outside_the_roots_and_of_a_file_nothing_is_asked(root: Path, store: RunStore, tmp_path: Path) -> None:
    fleet = ShardFleet(str(root), store)
    fleet.root = str(tmp_path / "elsewhere")
    async with console(SMALL, fleet=fleet) as shown:
        await shown.press("S")
        await shown.sees("old/")
        await shown.press("down", "D")
        await shown.sees("Nothing is deleted.")
        await shown.press("escape")
        await shown.press("G", "D")
        await shown.sees("Only a whole folder is deleted")
        assert not isinstance(shown.app.screen, RetireDialog)
