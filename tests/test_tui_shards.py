"""The shard browser on real files: the tree, its filter, tensors, values, lengths, and what an extraction adds."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from textual.widgets import Input

from tests import auditing
from tests.cases.torchfiles import Storage, T
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.fakefleet import make_progress, make_run
from tests.shardfleet import ShardFleet
from tui.screens.fleet import FleetScreen
from tui.screens.shards import ShardScreen
from tui.widgets import shard_rows
from tui.widgets.shard_view import ShardView

if TYPE_CHECKING:
    from pathlib import Path

    from tests.driving import Driven

FILES = 37_312


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a small run of two folders, one sample of which holds a NaN, with a journal."""
    for index in (0, 1, 9, 10, 2000):
        auditing.write(tmp_path, index)
    words = [0x3F80] * 39 + [0x7FC0]
    bad = T("bfloat16", (1, 5, 8), Storage("bfloat16", 40, struct.pack("<40H", *words)))
    auditing.write(tmp_path, 2001, auditing.sample(2001, hidden_state=bad))
    lines = [{"version": 1}, *({"index": n, "tokens": 100 + 10 * n} for n in range(50))]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def cursor(shown: Driven) -> str:
    """Return the path under the cursor of the tree."""
    screen = shown.app.screen
    assert isinstance(screen, ShardScreen)
    return screen.shards.path(screen.shards.lines[screen.folder.cursor])


async def test_a_tensors_shape_is_at_most_six_keys_away(run: Path) -> None:
    async with console(SMALL, fleet=ShardFleet(str(run))) as shown:
        await shown.press("S")
        await shown.sees("rows_0-2000/", "rows_2000-4000/", "journal.jsonl")
        await shown.press("enter", "down", "enter")
        await shown.sees("hidden_state", "1×5×8", "bf16", "WHOLE")
        await shown.press("escape", "escape")
        await shown.shows(FleetScreen)


@pytest.mark.parametrize("size", [SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in (MIDDLE, LARGE))])
async def test_the_tree_counts_and_the_lengths_are_drawn_at_every_size(run: Path, size: tuple[int, int]) -> None:
    async with console(size, fleet=ShardFleet(str(run))) as shown:
        await shown.press("S", "g")
        await shown.sees("Sequence lengths", "by the journal", "█", "least\u00a0100", "6 shards")
        line = next(line for line in shown.text.splitlines() if "rows_2000-4000/" in line)
        assert " 2 " in line and "KiB" in line, line


async def test_values_name_what_is_not_finite_and_draw_a_histogram(run: Path) -> None:
    async with console(MIDDLE, fleet=ShardFleet(str(run))) as shown:
        await shown.press("S", "down", "enter", "down", "down", "enter", "n")
        await shown.sees("data_2001.ckpt", "NaN 1", "every value drawn is 1", "min\u00a01", "norm\u00a0")
        await shown.press("up")
        await shown.sees("aux_hidden_state  its values", "log heights", "█")


async def test_the_filter_finds_names_in_folders_that_are_shut(run: Path) -> None:
    async with console(SMALL, fleet=ShardFleet(str(run))) as shown:
        await shown.press("S")
        await shown.until(lambda: shown.app.screen.shards.folders["rows_2000-4000"].following is None)
        await shown.press("slash", *"DATA_20")
        await shown.sees("data_2000.ckpt", "data_2001.ckpt", "3 match")
        assert "data_0.ckpt" not in shown.text
        await shown.press("enter", "down")
        await shown.until(lambda: cursor(shown).endswith("data_2000.ckpt"))
        await shown.sees("WHOLE")
        await shown.press("escape")
        await shown.sees("rows_0-2000/")
        await shown.until(lambda: "match" not in shown.text)
        assert cursor(shown).endswith("rows_2000-4000") or cursor(shown).endswith("data_2000.ckpt")


async def test_a_typed_shard_opens_its_run_with_the_cursor_on_it(run: Path) -> None:
    async with console(SMALL, fleet=ShardFleet(str(run))) as shown:
        await shown.press("S")
        await shown.sees("rows_0-2000/")
        field = shown.app.screen.query_one("#path", Input)
        await shown.press("p")
        field.value = str(run / "rows_2000-4000/data_2001.ckpt")
        await shown.press("enter")
        await shown.until(lambda: cursor(shown) == str(run / "rows_2000-4000/data_2001.ckpt"))
        await shown.sees("data_2001.ckpt", "1×5×8")
        assert field.value == str(run)
        await shown.press("left")
        await shown.until(lambda: cursor(shown) == str(run / "rows_2000-4000"))


async def test_a_running_extraction_is_followed_and_the_cursor_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.listing.FOLLOW_S", 0.05)
    fleet = ShardFleet(str(run))
    writes = make_run("e", "extract", out_dir=str(run), progress=make_progress(shard="rows_2000-4000/data_2001.ckpt"))
    fleet.hosts["gpu-01"].runs = {"e": writes}
    async with console(MIDDLE, fleet=fleet) as shown:
        await shown.press("S", "enter", "down")
        await shown.sees("extract writes here", "data_9.ckpt", "WHOLE")
        await shown.press("down", "down")
        at = str(run / "rows_0-2000/data_9.ckpt")
        await shown.until(lambda: cursor(shown) == at)
        auditing.write(run, 5, suffix=".ckpt")
        os.utime(run / "rows_0-2000/data_5.ckpt")
        fleet.hosts["gpu-01"].runs["e"] = replace(writes, progress=make_progress(shard="rows_0-2000/data_5.ckpt"))
        await shown.sees("data_5.ckpt")
        assert cursor(shown) == at, "what came in above did not move the cursor to another file"
        await shown.press("f")
        await shown.until(lambda: cursor(shown).endswith("data_5.ckpt"))
        auditing.write(run, 4000)
        os.utime(run / "rows_4000-6000/data_4000.ckpt", (time.time() + 1, time.time() + 1))
        fleet.hosts["gpu-01"].runs["e"] = replace(writes, progress=make_progress(shard="rows_4000-6000/data_4000.ckpt"))
        await shown.until(lambda: cursor(shown).endswith("rows_4000-6000/data_4000.ckpt"))
        await shown.sees("FOLLOWING", "1×5×8")


@pytest.mark.slow
async def test_many_files_are_listed_in_pages_and_nothing_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37,312 entries as the host sends them, in pages: rows are made only for what is in sight, widgets never."""
    fleet = ShardFleet("/data/flat")
    entries = [
        {"name": f"data_{n}.ckpt", "kind": "shard", "bytes": 132_000_000 + n, "modified_at": 1.0 + n, "note": ""}
        for n in range(FILES)
    ]

    def page(host: str, path: str, offset: int = 0, since: float = 0.0) -> object:
        part = entries[offset : offset + 1900]
        end = offset + len(part)
        return fleet._answer("list_shards", path, offset, value={
            "path": path, "entries": part, "total": FILES, "truncated": end < FILES,
            "next": end if end < FILES else None,
        })  # fmt: skip

    monkeypatch.setattr(fleet, "list_shards", page)
    monkeypatch.setattr(fleet, "show_shard", lambda *args: fleet._answer("show", value={"entries": [], "bytes": 1}))
    monkeypatch.setattr(fleet, "shard_lengths", lambda *args: fleet._answer("lengths", value={"samples": 0}))
    made: list[object] = []
    real = shard_rows.tree_row
    monkeypatch.setattr(shard_rows, "tree_row", lambda *args: made.append(args[1]) or real(*args))
    async with console(MIDDLE, fleet=fleet) as shown:
        await shown.press("S")
        screen = shown.app.screen
        assert isinstance(screen, ShardScreen)
        await shown.until(lambda: screen.shards.listed == FILES and not screen.listing.todo)
        assert len(fleet.calls) < 30
        widgets, rows = len(screen.query("*")), screen.folder.lines
        await shown.sees("37,312")
        made.clear()
        await shown.press("G")
        await shown.until(lambda: cursor(shown) == f"/data/flat/data_{FILES - 1}.ckpt")
        await shown.press(*["up"] * 4, "pageup", "g", "down")
        assert len(screen.query("*")) == widgets
        assert screen.folder.lines is rows, "moving makes no rows anew"
        assert len(made) < 10 * 3 * 40, "only what is in sight was painted"
        made.clear()
        ticks: list[int] = []
        real_tick = screen.tick
        screen.tick = lambda: (ticks.append(1), real_tick())[1]  # type: ignore[method-assign]
        await shown.until(lambda: len(ticks) >= 5)
        assert not made, "a tick paints nothing that has not changed"
        await shown.press("slash")
        screen.query_one("#filter", Input).value = "data_3731"
        await shown.press("enter")
        await shown.until(lambda: len(screen.shards.lines) == 1 + 3)
        assert len(screen.query("*")) == widgets
        assert isinstance(screen.view, ShardView)
