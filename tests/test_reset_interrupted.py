"""A reset that is killed at any step leaves a receipt that says how far it went, and the next one finishes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent.reset import clearance, receipt
from backend.agent.reset.cycle import Cycle
from backend.agent.reset.interrupted import BEGUN
from backend.agent.reset.ops import op_plan, op_receipts_get, op_receipts_list, prepare_start
from backend.agent.runs import RunStore
from backend.wire import CLEAN, RUN_ENDED, UNKNOWN
from tests import dying
from tests.resetting import Bench
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backend.wire import Receipt, Run

ROOT = str(Path(__file__).resolve().parent.parent)
QUICK = ("asked", "clearing", "stored")
"""The steps that the default suite walks; the slow one walks all."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(clearance, "STABLE_S", 0.3)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    (tmp_path / "host").mkdir()
    host = Bench(tmp_path / "host")
    yield host
    host.close()


def interrupted(bench: Bench, step: str) -> Run:
    """Run a detached reset that dies at a step, and wait for its end."""
    host = dying.machine(bench.root, step)
    args = {"id": "reset-1", "digest": op_plan(host, {}).digest, "grace_s": 0.3, "deadline_s": 6.0}
    store = RunStore(host)
    store.start(prepare_start(host, args))
    return until(lambda: (run := store.get("reset-1")) and run.state in RUN_ENDED and run, 30)


def again(bench: Bench) -> Receipt:
    options = {"id": "reset-2", "grace_s": 1.0, "deadline_s": 6.0}
    assert Cycle(bench.machine, os.path.join(bench.root, "run"), options).run() == 0
    return receipt.load("reset-2")


@pytest.mark.parametrize("step", [
    step if step in QUICK else pytest.param(step, marks=pytest.mark.slow) for step in dying.STEPS
])  # fmt: skip
def test_killed_at_a_step_it_leaves_a_receipt_and_the_next_reset_finishes(bench: Bench, step: str) -> None:
    polite, stubborn = bench.start(), bench.start("swallow-term", gpus="1")
    bystander, monitor = bench.start("bystander"), bench.start("monitor", gpus="0,1")
    run = interrupted(bench, step)
    assert run.exit_code == -signal.SIGKILL, run
    (row,) = op_receipts_list(bench.machine, {})
    said = op_receipts_get(bench.machine, {"id": "reset-1"})
    told = step in ("stored", "shown")
    assert (said.verdict, row["verdict"]) == ((CLEAN,) * 2 if told else (UNKNOWN,) * 2)
    assert bool(said.interrupted) == bool(row["interrupted"]) == (not told)
    if not told:
        assert "SIGKILL" in said.interrupted
        assert {one["signal"] for one in said.signals} <= {"SIGTERM", "SIGCONT", "SIGKILL"}
    if step not in ("looking", "stored", "shown"):
        assert said.plan is not None
        assert {one.pid for one in said.plan.victims} == {polite.pid, stubborn.pid}
        assert [one.verdict for one in said.after] == [UNKNOWN, UNKNOWN]
        assert all(one.command and one.action for one in said.after)
    expected = {"looking": "looking at the host", "asked": "SIGTERM to", "killed": "SIGKILL to",
                "clearing": "waiting for every GPU to be free", "health": "checking the health"}  # fmt: skip
    assert expected.get(step, "") in said.interrupted
    assert again(bench).verdict == CLEAN
    assert not polite.alive() and not stubborn.alive()
    assert bystander.alive() and monitor.alive()
    assert {row["id"] for row in op_receipts_list(bench.machine, {})} == {"reset-1", "reset-2"}


def test_an_interrupted_reset_is_told_once_and_stays_gone_when_its_receipt_is_removed(bench: Bench) -> None:
    bench.start()
    interrupted(bench, "asked")
    assert [row["id"] for row in op_receipts_list(bench.machine, {})] == ["reset-1"]
    journal = os.path.join(RunStore(bench.machine)._root, "reset-1", receipt.JOURNAL)
    with open(journal, "rb") as file:
        last = json.loads(file.read().splitlines()[-1])
    assert (last["kind"], last["data"]["verdict"]) == ("verdict", UNKNOWN)
    os.unlink(receipt.path_of("reset-1"))
    assert op_receipts_list(bench.machine, {}) == []


@pytest.mark.parametrize("spoil", ["torn journal", "spoilt beginning", "no beginning"])
def test_what_the_crash_spoilt_is_left_out_and_the_rest_is_told(bench: Bench, spoil: str) -> None:
    holder = bench.start()
    interrupted(bench, "asked")
    folder = os.path.join(RunStore(bench.machine)._root, "reset-1")
    if spoil == "torn journal":
        with open(os.path.join(folder, receipt.JOURNAL), "ab") as file:
            file.write(b'{"at_s": 9, "ki')
    elif spoil == "no beginning":
        os.unlink(os.path.join(folder, BEGUN))
    else:
        with open(os.path.join(folder, BEGUN), "wb") as file:
            file.write(b'{"plan": {"victims": 7')
    said = op_receipts_get(bench.machine, {"id": "reset-1"})
    assert said.verdict == UNKNOWN
    assert [one["pid"] for one in said.signals] == [holder.pid]
    assert bool(said.plan) == (spoil == "torn journal")
    with open(os.path.join(folder, receipt.JOURNAL), "rb") as file:
        assert json.loads(file.read().splitlines()[-1])["kind"] == "verdict"


def test_who_ended_before_any_signal_is_not_called_killed(bench: Bench) -> None:
    holder = bench.start()
    interrupted(bench, "bound")
    journal = os.path.join(RunStore(bench.machine)._root, "reset-1", receipt.JOURNAL)
    event = {"at_s": 1.0, "kind": "gone", "text": "process had already ended", "data": {"pid": holder.pid}}
    with open(journal, "a", encoding="ascii") as file:
        file.write(json.dumps(event) + "\n")
    said = op_receipts_get(bench.machine, {"id": "reset-1"})
    assert (said.killed, said.signals) == ([], [])
    assert [one.pid for one in said.survivors] == [holder.pid]
    assert holder.alive()


def test_a_reset_that_runs_is_not_taken_for_an_interrupted_one(bench: Bench) -> None:
    bench.start("slow-exit", exit_s=1.0)
    spec = prepare_start(bench.machine, {"id": "reset-1", "digest": op_plan(bench.machine, {}).digest})
    store = RunStore(bench.machine)
    store.start(spec)
    until(lambda: os.path.exists(os.path.join(bench.root, "exiting")))
    assert op_receipts_list(bench.machine, {}) == []
    until(lambda: (run := store.get("reset-1")) and run.state in RUN_ENDED, 30)
    assert op_receipts_get(bench.machine, {"id": "reset-1"}).verdict == CLEAN
