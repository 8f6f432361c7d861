"""The audit screen: live progress, the faults of a real audit, and the file that a fault is of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests import auditing
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.fakefleet import make_progress, make_run
from tests.shardfleet import ShardFleet
from tui.screens.audit import AuditScreen
from tui.screens.fleet import FleetScreen
from tui.screens.shards import ShardScreen

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of which one sample is cut and one is missing."""
    folder = tmp_path_factory.mktemp("run")
    for index in (0, 1, 2, 4):
        auditing.write(folder, index)
    cut = folder / "rows_0-2000/data_2.ckpt"
    cut.write_bytes(cut.read_bytes()[:-40])
    auditing.age(cut)
    return folder


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Any]:
    """Audit it for real, once."""
    return auditing.audit(run)


def ended(run: Path, found: dict[str, Any]) -> ShardFleet:
    fleet = ShardFleet(str(run))
    audit = make_run(
        "audit-1", "audit", "exited", argv=["agent", "audit", str(run)], exit_code=1,
        progress=make_progress(4, 4, samples_failed=1, message="done"),
    )  # fmt: skip
    fleet.hosts["gpu-01"].runs["audit-1"] = audit
    fleet.results["audit-1"] = {"summary": found, "list": found["list"]}
    return fleet


@pytest.mark.parametrize("size", [SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in (MIDDLE, LARGE))])
async def test_a_fault_opens_its_file(run: Path, found: dict[str, Any], size: tuple[int, int]) -> None:
    async with console(size, fleet=ended(run, found)) as shown:
        await shown.press("A")
        await shown.sees("2 FAULTS in 1 files of 4", "truncated", "missing-id", "data_2.ckpt", "everything")
        screen = shown.app.screen
        assert isinstance(screen, AuditScreen)
        await shown.press("left", "down")
        await shown.until(lambda: screen.code and {fault["code"] for fault in screen.faults} == {screen.code})
        while screen.code != "truncated":
            await shown.press("down")
        await shown.press("enter", "enter")
        await shown.shows(ShardScreen)
        await shown.sees("data_2.ckpt", "DAMAGED", "truncated:")
        browser = shown.app.screen
        assert isinstance(browser, ShardScreen)
        await shown.until(lambda: browser.shards.path(browser.line) == str(run / "rows_0-2000/data_2.ckpt"))
        await shown.press("escape")
        await shown.shows(AuditScreen)
        await shown.press("escape")
        await shown.shows(FleetScreen)


async def test_an_audit_is_started_followed_and_its_end_is_shown(run: Path, found: dict[str, Any]) -> None:
    fleet = ShardFleet(str(run))
    async with console(SMALL, fleet=fleet) as shown:
        await shown.press("A")
        await shown.sees("No audit has run", "n audits")
        await shown.press("n")
        await shown.until(lambda: shown.asked("audit") == [("audit", "gpu-01", str(run))])
        runs = fleet.hosts["gpu-01"].runs
        for done in (1000, 2000):
            progress = make_progress(done, 37_312, samples_per_s=500.0, tokens_total=0, message="3 truncated so far")
            runs["audit-1"] = replace(runs["audit-1"], progress=progress)
            await shown.sees(f"{done:,} of 37,312 files", "500/s", "left", "3 truncated so far", "RUNNING")
        fleet.results["audit-1"] = {"summary": found, "list": found["list"]}
        runs["audit-1"] = replace(runs["audit-1"], state="exited", exit_code=1)
        await shown.sees("2 FAULTS in 1 files", "data_2.ckpt")


async def test_faults_appear_while_it_runs_and_open_their_files(run: Path, found: dict[str, Any]) -> None:
    fleet = ended(run, found)
    runs = fleet.hosts["gpu-01"].runs
    runs["audit-1"] = replace(runs["audit-1"], state="running", exit_code=None)
    cut = next(fault for fault in found["list"] if fault["code"] == "truncated")
    so_far = fleet.results["audit-1"]["found"] = []
    async with console(SMALL, fleet=fleet) as shown:
        await shown.press("A")
        screen = shown.app.screen
        assert isinstance(screen, AuditScreen)
        await shown.sees("No fault so far")
        so_far += [{**cut, "path": f"rows_0-2000/data_{number}.ckpt"} for number in range(150)]
        await shown.sees("truncated", "data_0.ckpt")
        so_far.append({**cut, "code": "sparse"})
        await shown.until(lambda: len(screen.faults) == 151)
        await shown.press("G")
        await shown.sees("sparse", "data_2.ckpt")
        await shown.press("enter")
        await shown.sees("data_2.ckpt", "DAMAGED")
        await shown.press("escape")
        await shown.shows(AuditScreen)
        runs["audit-1"] = replace(runs["audit-1"], state="exited", exit_code=1)
        await shown.sees("2 FAULTS in 1 files of 4")
        await shown.until(lambda: screen.faults == found["list"])


@pytest.mark.slow
async def test_many_faults_come_in_pages_and_only_those_in_sight_are_painted(
    run: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ended(run, found)
    fault = {"code": "truncated", "level": "error", "sample": None, "text": "cut"}
    many = [{**fault, "path": f"rows_0-2000/data_{n}.ckpt"} for n in range(5000)]
    fleet.results["audit-1"]["list"] = many
    async with console(SMALL, fleet=fleet) as shown:
        await shown.press("A")
        screen = shown.app.screen
        assert isinstance(screen, AuditScreen)
        await shown.until(lambda: len(screen.faults) == 5000)
        made: list[object] = []
        from tui.widgets import audit_rows

        real = audit_rows.fault_row
        monkeypatch.setattr(audit_rows, "fault_row", lambda *args: made.append(1) or real(*args))
        await shown.press("G")
        await shown.sees("data_4999.ckpt")
        assert len(made) <= 3 * 24


async def test_an_audit_without_a_result_says_why(run: Path, found: dict[str, Any]) -> None:
    from backend.wire import Refused

    fleet = ended(run, found)
    fleet.error = Refused("not-found", "this audit has left no result", "see the log of its run")
    async with console(SMALL, fleet=fleet) as shown:
        await shown.press("A")
        await shown.sees("this audit has left no result")
