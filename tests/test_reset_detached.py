"""A reset as a detached run: it outlives whoever started it, stops whole runs, and runs on Python 3.8."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.reset import clearance, receipt
from backend.agent.reset.ops import op_plan, op_receipts_get, op_receipts_list, prepare_start
from backend.agent.runs import RunStore
from backend.wire import CLEAN, Refused, RunSpec, plain
from tests import holding
from tests.resetting import Bench
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = str(Path(__file__).resolve().parent.parent)
STARTER = """
import json, os, signal, sys
from backend.agent.main import relaunch
from backend.agent.reset.ops import prepare_start
from backend.agent.runs import RunStore
from tests.resetting import machine
host = machine(sys.argv[1])
print(RunStore(host).start(prepare_start(host, json.loads(sys.argv[2]))).id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(clearance, "STABLE_S", 0.3)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    folder = tmp_path / "host"
    folder.mkdir()
    host = Bench(folder)
    yield host
    host.close()


def test_a_reset_ends_though_its_starter_was_killed(bench: Bench) -> None:
    holder = bench.start("slow-exit", exit_s=0.5)
    args = {"id": "reset-1", "digest": op_plan(bench.machine, {}).digest}
    done = subprocess.run([sys.executable, "-c", STARTER, bench.root, json.dumps(args)], cwd=ROOT,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = RunStore(bench.machine)
    run = until(lambda: (found := store.get("reset-1")) and found.state not in ("starting", "running") and found, 30)
    assert (run.state, run.exit_code) == ("exited", 0), run
    assert not holder.alive()
    said = op_receipts_get(bench.machine, {"id": "reset-1"})
    assert said.verdict == CLEAN
    assert [one.pid for one in said.killed] == [holder.pid]
    assert said.plan is not None
    assert said.plan.digest == args["digest"]
    assert op_receipts_list(bench.machine, {})[0]["id"] == "reset-1"
    assert os.path.exists(os.path.join(store._root, "reset-1", receipt.JOURNAL))


def test_a_reset_that_is_asked_to_stop_ends_with_its_verdict_all_the_same(bench: Bench) -> None:
    holder = bench.start("slow-exit", exit_s=1.0)
    store = RunStore(bench.machine)
    spec = prepare_start(bench.machine, {"id": "reset-1", "digest": op_plan(bench.machine, {}).digest})
    store.start(spec)
    until(lambda: os.path.exists(os.path.join(bench.root, "exiting")))
    assert store.stop("reset-1", spec.grace_s).state == "stopping"
    until(lambda: (found := store.get("reset-1")) and found.state == "exited", 30)
    assert receipt.stored("reset-1")
    assert receipt.load("reset-1").verdict == CLEAN
    assert not holder.alive()


def test_a_run_of_ours_is_stopped_whole_and_records_its_end(bench: Bench) -> None:
    store = RunStore(bench.machine)
    words = [sys.executable, "-I", "-S", holding.__file__, "--root", bench.root, "--gpus", "1", "--used-mib", "800"]
    run = store.start(RunSpec("serve-1", "serve", [*words, "--mode", "with-child"]))
    until(lambda: any(name.startswith("1.") for name in os.listdir(os.path.join(bench.root, "claims"))))
    shown = op_plan(bench.machine, {})
    assert {one.run_id for one in shown.victims} == {"serve-1"}
    assert shown.victims[0].pid == run.supervisor_pid
    assert len(shown.victims) == 3
    assert "run serve-1 (serve)" in shown.losses[0]
    assert _reset_here(bench, shown.digest) == 0
    ended = until(lambda: (found := store.get("serve-1")) and found.state != "running" and found)
    assert ended.state != "lost"
    assert ended.exit_code == -signal.SIGTERM


def _reset_here(bench: Bench, digest: str) -> int:
    from backend.agent.reset.cycle import Cycle

    return Cycle(bench.machine, os.path.join(bench.root, "run"), {"id": "r1", "digest": digest}).run()


def test_a_start_is_refused_where_the_plan_no_longer_holds(bench: Bench) -> None:
    shown = op_plan(bench.machine, {})
    bench.start()
    with pytest.raises(Refused) as refused:
        prepare_start(bench.machine, {"id": "reset-1", "digest": shown.digest})
    assert refused.value.code == "plan-changed"
    with pytest.raises(Refused, match="not those that were shown"):
        prepare_start(bench.machine, {"id": "reset-1", "digest": "0" * 64})
    assert not os.path.exists(receipt.plan_path("reset-1"))


def test_a_victim_that_forks_all_the_time_can_still_be_reset(bench: Bench) -> None:
    parent = bench.start("with-child")
    shown = op_plan(bench.machine, {})
    gone = os.pidfd_open(parent.pids[1])
    signal.pidfd_send_signal(gone, signal.SIGKILL)
    os.close(gone)
    until(lambda: not parent.alive(1))
    spec = prepare_start(bench.machine, {"id": "reset-1", "digest": shown.digest})
    assert spec.argv[-3] == "reset"
    options = json.loads(spec.argv[-1])
    assert [one.pid for one in receipt.confirmed(options["plan"])] == [one.pid for one in shown.victims]


def test_receipts_read_back_as_they_were(bench: Bench) -> None:
    bench.start()
    assert _reset_here(bench, "") == 0
    said = receipt.load("r1")
    with open(receipt.path_of("r1"), "rb") as file:
        assert plain(said) == json.load(file)
    with pytest.raises(Refused, match="no receipt"):
        receipt.load("r2")
    with pytest.raises(Refused, match="no id of a receipt"):
        receipt.load("../r1")


def _old_python() -> str:
    for folder in os.environ["PATH"].split(os.pathsep):
        program = os.path.join(folder, "python3.8")
        if os.access(program, os.X_OK) and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            return program
    return ""


@pytest.mark.skipif(not _old_python(), reason="no working python3.8 on PATH")
def test_the_whole_cycle_runs_on_python_3_8(bench: Bench) -> None:
    holder, heir, monitor = bench.start("ignore-term"), bench.start("heir", gpus="1"), bench.start("monitor")
    options: dict[str, Any] = {"id": "old", "grace_s": 0.3, "deadline_s": 5.0}
    words = [_old_python(), "-m", "tests.resetting", bench.root, "reset", os.path.join(bench.root, "run")]
    done = subprocess.run([*words, json.dumps(options)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not holder.alive()
    assert not heir.alive()
    assert monitor.alive()
    assert receipt.load("old").verdict == CLEAN
