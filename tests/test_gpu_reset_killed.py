"""A reset of GPUs that is killed: its nvidia-smi ends in peace, and what it left changed is put back once."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from backend.agent import driverhold, procfs
from backend.agent.reset import clearance, receipt
from backend.agent.reset.gpureset import persistence
from backend.agent.reset.gpureset import smi as nvidia_smi
from backend.agent.reset.gpureset.ops import op_plan, prepare_start
from backend.agent.reset.ops import op_receipts_get, op_receipts_list
from backend.agent.reset.receipt import Journal
from backend.agent.runs import RunStore
from backend.wire import CLEAN, RUN_ENDED, UNKNOWN, Refused, Run, plain
from tests import smi
from tests.resetting import Bench
from tests.test_gpu_reset import ASKS, FINE, ROOT, calls, reset
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ON = ["-i", "GPU-0000", "-pm", "1"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(clearance, "STABLE_S", 0.2)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    folder = tmp_path / "host"
    folder.mkdir()
    host = Bench(folder)
    smi.lay_out(host.root)
    host.set(readings={"0": dict(ASKS), "1": dict(FINE)})
    yield host
    go_on(host)
    host.close()


def go_on(bench: Bench) -> None:
    """Let nvidia-smi end what it is in the middle of."""
    with open(os.path.join(bench.root, "smi.go"), "w", encoding="ascii"):
        pass


def working(bench: Bench) -> tuple[RunStore, Run]:
    """Start a detached reset, and return when nvidia-smi is in the middle of it."""
    bench.set(smi={"hold": True})
    store = RunStore(bench.machine)
    run = store.start(prepare_start(bench.machine, {"id": "gpu-reset-1", "gpus": ["0"]}))
    until(lambda: any("--gpu-reset" in words for words in calls(bench)), 20)
    return store, run


def kill(pid: int) -> None:
    fd = os.pidfd_open(pid)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    os.close(fd)


def test_killed_while_nvidia_smi_works_it_holds_the_host_until_that_ends(bench: Bench) -> None:
    store, run = working(bench)
    kill(run.pid)
    until(lambda: (now := store.get(run.id)) and now.state in RUN_ENDED, 30)
    assert driverhold.held(), "our agents must stay away from the driver"
    assert op_receipts_list(bench.machine, {}) == []
    with pytest.raises(Refused) as refused:
        prepare_start(bench.machine, {"id": "gpu-reset-2", "gpus": ["0"]})
    assert refused.value.code == "reset-running"
    assert ON not in calls(bench)
    go_on(bench)
    until(lambda: not driverhold.held())
    said = op_receipts_get(bench.machine, {"id": "gpu-reset-1"})
    assert (said.verdict, said.kind, said.gpu_reset["outcome"]) == (UNKNOWN, "gpu-reset", "interrupted")
    assert "SIGKILL" in said.interrupted
    assert calls(bench)[-1] == ON
    assert any("turned on again" in note for note in said.notes)
    op_receipts_list(bench.machine, {})
    assert calls(bench).count(ON) == 1
    bench.set(readings={"0": dict(ASKS), "1": dict(FINE)})
    first = next(gate for gate in op_plan(bench.machine, {"gpus": ["0"]}).needs if gate.name.endswith("first time"))
    assert first.ok is False and "interrupted" in first.detail


def test_where_only_its_supervisor_is_killed_it_finishes(bench: Bench) -> None:
    store, run = working(bench)
    kill(run.supervisor_pid)
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))
    go_on(bench)
    until(lambda: (now := store.get(run.id)) and now.state in RUN_ENDED, 30)
    said = op_receipts_get(bench.machine, {"id": "gpu-reset-1"})
    assert (said.verdict, said.interrupted) == (CLEAN, "")
    assert calls(bench)[-1] == ON


@pytest.mark.parametrize("why", ["another boot", "another user", "put back already"])
def test_persistence_mode_is_put_back_in_the_same_boot_by_root_once(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    journal = Journal(str(tmp_path))
    journal.write(persistence.KIND, "off", step=persistence.OFF, address="GPU-0000")
    if why == "put back already":
        journal.write(persistence.KIND, "on", step=persistence.BACK, address="GPU-0000", rc=0)
    if why == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    boot = "another" if why == "another boot" else procfs.boot_id()
    events = [json.loads(json.dumps(plain(event))) for event in journal.events]
    notes = persistence.recover(bench.machine.smi, boot, events, journal, str(tmp_path))
    assert not os.path.exists(os.path.join(bench.root, "smi.log"))
    assert notes == (["persistence mode of GPU-0000 was left off: sudo nvidia-smi -pm 1 -i GPU-0000"]
                     if why == "another user" else [])  # fmt: skip


def test_a_reset_that_is_told_to_stop_finishes_all_the_same(bench: Bench) -> None:
    store, run = working(bench)
    store.stop(run.id, 60.0)
    go_on(bench)
    until(lambda: (now := store.get(run.id)) and now.state in RUN_ENDED, 30)
    assert receipt.load("gpu-reset-1").gpu_reset["outcome"] == "done"


def test_an_nvidia_smi_that_does_not_end_is_left_alone_and_keeps_the_host(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_smi, "RESET_S", 0.3)
    bench.set(smi={"hold": True})
    rc, said = reset(bench)
    assert (rc, said.verdict, said.gpu_reset["outcome"]) == (1, UNKNOWN, "has not ended")
    assert {one.verdict for one in said.after} == {UNKNOWN} and "reboot" in said.after[0].action
    assert driverhold.held()
    assert ON not in calls(bench), "the mode of a GPU in the middle of a reset is not touched"
    assert "persistence mode of GPU-0000 was left off: sudo nvidia-smi -pm 1 -i GPU-0000" in said.notes
    go_on(bench)
    until(lambda: not driverhold.held())
    until(lambda: all(one.poll() is not None for one in nvidia_smi._left))
