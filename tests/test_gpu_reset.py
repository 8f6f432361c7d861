"""The reset of GPUs by their driver: what it needs, that it is done once, and what it leaves behind."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import driverhold, procfs
from backend.agent.reset import clearance, receipt
from backend.agent.reset.cycle import verify
from backend.agent.reset.finding import FAIL, WARN
from backend.agent.reset.gpureset import needs as needed
from backend.agent.reset.gpureset.cycle import GpuReset
from backend.agent.reset.gpureset.ops import op_plan, prepare_start
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.ops import op_baseline_record
from backend.agent.reset.rules.case import Case
from backend.agent.reset.xids.settled import settled
from backend.agent.reset.xids.sighting import BEFORE, KERNEL_LOG, Sighting
from backend.agent.reset.xids.weighing import weigh
from backend.agent.watch import DriverWatch
from backend.agent.xid.lines import Lines
from backend.wire import CLEAN, UNHEALTHY, Gate, Receipt, Refused
from tests import smi
from tests.kernellogs import xid
from tests.resetting import Bench
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ASKS = {"recovery_action": 1, "persistence": 1, "mig": 0}
FINE = {"recovery_action": 0, "persistence": 1, "mig": 0}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(clearance, "STABLE_S", 0.2)
    monkeypatch.setattr(needed, "_running", lambda program: [])
    monkeypatch.setenv("PYTHONPATH", ROOT)
    folder = tmp_path / "host"
    folder.mkdir()
    host = Bench(folder)
    smi.lay_out(host.root)
    host.set(readings={"0": dict(ASKS), "1": dict(FINE)})
    yield host
    host.close()


def gates(bench: Bench, **args: Any) -> dict[str, Gate]:
    plan = op_plan(bench.machine, {"gpus": ["0"], **args})
    return {gate.name.rpartition(": ")[2]: gate for gate in plan.needs}


def calls(bench: Bench) -> list[list[str]]:
    """Return what nvidia-smi was asked to change."""
    with open(os.path.join(bench.root, "smi.log"), encoding="ascii") as file:
        words = [json.loads(line)["words"] for line in file]
    return [one for one in words if "-q" not in one]


def reset(bench: Bench, name: str = "gpu-reset-1", **options: Any) -> tuple[int, Receipt]:
    folder = os.path.join(bench.root, name)
    os.makedirs(folder)
    options = {"id": name, "gpus": ["0"], **options}
    with one_at_a_time("a test", bench.machine.devices().scope()) as lock:
        rc = GpuReset(bench.machine, folder, options, lock).run()
    return rc, receipt.load(name)


def test_every_need_is_told_with_its_value_and_all_of_them_are_met(bench: Bench) -> None:
    found = gates(bench)
    assert list(found) == [
        "root", "container", "nvidia-smi", "fault", "first time", "nobody has it open", "persistence mode", "MIG",
        "virtualization", "display", "linked GPUs", "persistence daemon",
    ]  # fmt: skip
    assert all(gate.ok and gate.detail and not gate.fix for gate in found.values()), found
    assert "recovery action 1 (a GPU reset)" in found["fault"].detail


@pytest.mark.parametrize(("name", "ok", "says", "change"), [
    ("fault", False, "none that a reset would mend", {"readings": {"0": FINE}}),
    ("fault", False, "a reboot of the host", {"readings": {"0": {**ASKS, "recovery_action": 2}}}),
    ("persistence mode", None, "no permission", {"readings": {"0": {**ASKS, "persistence": "no permission (NVML 4)"}}}),
    ("MIG", False, "its instances would be lost", {"readings": {"0": {**ASKS, "mig": 1}}}),
    ("MIG", None, "timeout", {"readings": {"0": {**ASKS, "mig": "timeout (NVML 10)"}}}),
    ("virtualization", None, "passed through", {"smi": {"virtualization": "Pass-Through"}}),
    ("virtualization", False, "VGPU", {"smi": {"virtualization": "VGPU"}}),
    ("virtualization", None, "does not say", {"smi": {"virtualization": ""}}),
    ("display", False, "a display is active", {"smi": {"display": "Enabled"}}),
    ("linked GPUs", False, "must be reset with them", {
        "smi": {"architecture": "Ampere"},
        "readings": {"0": {**ASKS, "nvlink_active": 15}, "1": {**FINE, "nvlink_active": 15}},
    }),
    ("linked GPUs", None, "must be reset with them", {
        "smi": {"architecture": ""},
        "readings": {"0": {**ASKS, "nvlink_active": 15}, "1": {**FINE, "nvlink_active": 15}},
    }),
])  # fmt: skip
def test_a_need_that_is_not_met_says_so_and_what_to_do(
    bench: Bench, name: str, ok: bool | None, says: str, change: dict[str, Any]
) -> None:
    bench.set(**change)
    gate = gates(bench)[name]
    assert gate.ok is ok
    assert says in gate.detail
    assert gate.fix
    with pytest.raises(Refused) as refused:
        prepare_start(bench.machine, {"id": "gpu-reset-1", "gpus": ["0"]})
    assert refused.value.code == "precondition"
    assert calls(bench) == []


def test_linked_gpus_of_an_older_kind_are_reset_together_and_newer_ones_alone(bench: Bench) -> None:
    linked = {"0": {**ASKS, "nvlink_active": 15}, "1": {**ASKS, "nvlink_active": 15}}
    bench.set(readings=linked, smi={"architecture": "Ampere"})
    assert gates(bench, gpus=["0", "GPU-0001"])["linked GPUs"].ok
    bench.set(smi={"architecture": "Hopper"})
    assert gates(bench)["linked GPUs"].ok


def test_switches_want_every_gpu_and_no_fabric_manager(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs(os.path.join(bench.machine.host_root, "proc/driver/nvidia-nvswitch/devices/0000:b0:00.0"))
    bench.set(readings={"0": dict(ASKS), "1": dict(ASKS)}, smi={"architecture": "Ampere"})
    assert gates(bench)["linked GPUs"].ok is False
    assert gates(bench, gpus=["0", "GPU-0001"])["linked GPUs"].ok
    monkeypatch.setattr(needed, "_running", lambda program: [77] if program == "nv-fabricmanager" else [])
    found = gates(bench, gpus=["0", "GPU-0001"])["linked GPUs"]
    assert found.ok is False and "systemctl stop nvidia-fabricmanager" in found.fix


def test_in_a_virtual_machine_the_operator_answers_for_the_hypervisor(bench: Bench) -> None:
    bench.set(smi={"virtualization": "Pass-Through"})
    assert gates(bench, in_vm=True)["virtualization"].ok


def test_a_monitor_is_in_the_way_too_and_is_named(bench: Bench) -> None:
    monitor = bench.start("monitor")
    found = gates(bench)["nobody has it open"]
    assert found.ok is False
    assert str(monitor.pid) in found.detail


@pytest.mark.parametrize(("file", "text"), [
    (".dockerenv", ""),
    ("proc/modules", "nvidia_drm 118784 2 - Live 0x0\n"),
    ("proc/modules", "nvidia_drm 118784 0 - Live 0x0\n"),
])  # fmt: skip
def test_a_container_and_a_console_on_the_gpu_are_in_the_way(bench: Bench, file: str, text: str) -> None:
    with open(os.path.join(bench.machine.host_root, file), "w", encoding="ascii") as out:
        out.write(text)
    found = gates(bench)["container" if file == ".dockerenv" else "display"]
    assert found.ok is not True and found.fix


def test_a_gpu_is_reset_with_persistence_mode_off_and_on_again_and_then_verified(bench: Bench) -> None:
    rc, said = reset(bench)
    assert (rc, said.verdict, said.kind) == (0, CLEAN, "gpu-reset"), said
    assert calls(bench) == [
        ["-i", "GPU-0000", "-pm", "0"], ["--gpu-reset", "-i", "GPU-0000"], ["-i", "GPU-0000", "-pm", "1"],
    ]  # fmt: skip
    told = said.gpu_reset
    assert (told["begun"], told["outcome"], told["rc"]) == (True, "done", 0)
    assert told["gpus"][0]["faults"] == ["recovery action 1 (a GPU reset)"]
    assert "successfully reset" in told["output"]
    assert 0 <= told["at_s"] <= told["at_s"] + told["took_s"] <= said.durations["total"]
    assert [one.verdict for one in said.before] == [UNHEALTHY, CLEAN]
    assert len(said.cuda_tests) in (0, 2)


def test_the_record_is_on_disk_before_anything_is_changed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.agent.reset.gpureset import cycle

    def full(path: str, record: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cycle, "write_json", full)
    rc, said = reset(bench)
    assert rc == 4 and "No space left" in said.notes[-1]
    assert not said.gpu_reset["begun"]
    assert calls(bench) == []


def test_a_second_reset_for_the_same_fault_in_one_boot_is_refused(bench: Bench) -> None:
    reset(bench)
    bench.set(readings={"0": dict(ASKS), "1": dict(FINE)})
    found = gates(bench)["first time"]
    assert found.ok is False
    assert "gpu-reset-1" in found.detail and "reboot" in found.fix
    rc, said = reset(bench, "gpu-reset-2")
    assert rc == 4 and not said.gpu_reset["begun"]
    assert len(calls(bench)) == 3
    bench.set(readings={"0": {**FINE, "remapped_pending": 1}, "1": dict(FINE)})
    assert gates(bench)["first time"].ok, "another fault may be reset for"


def test_where_persistence_mode_cannot_be_turned_off_no_gpu_is_reset(bench: Bench) -> None:
    bench.set(smi={"pm_rc": {"0": 3}})
    rc, said = reset(bench)
    assert rc == 1
    assert said.gpu_reset["outcome"] == "in use"
    assert said.verdict == UNHEALTHY
    assert not any("--gpu-reset" in words for words in calls(bench))
    assert gates(bench)["first time"].ok, "nothing was touched"


def test_persistence_mode_that_does_not_come_back_is_said(bench: Bench) -> None:
    bench.set(smi={"pm_rc": {"1": 3}})
    _, said = reset(bench)
    assert any("sudo nvidia-smi -pm 1 -i GPU-0000" in note for note in said.notes)


@pytest.mark.parametrize(("how", "outcome"), [
    ({"rc": 255, "text": "GPU Reset couldn't run: Unknown Error"}, "failed"),
    ({"rc": 3, "text": "GPU Reset is Not Supported on this GPU"}, "not supported"),
    ({"rc": 0, "silent": True}, "done"),
])  # fmt: skip
def test_a_reset_that_did_not_help_is_unhealthy_and_counts(bench: Bench, how: dict[str, Any], outcome: str) -> None:
    bench.set(smi=how)
    rc, said = reset(bench)
    assert (rc, said.gpu_reset["outcome"], said.after[0].verdict) == (1, outcome, UNHEALTHY)
    assert said.after[1].verdict == CLEAN
    assert gates(bench)["first time"].ok is False


def test_what_a_reset_changed_for_the_worse_is_found_against_the_baseline(bench: Bench) -> None:
    bench.set(readings={"0": {**FINE, "pcie_width": 16}, "1": dict(FINE)})
    op_baseline_record(bench.machine, {})
    bench.set(readings={"0": {**ASKS, "pcie_width": 16}, "1": dict(FINE)}, smi={"after": {"pcie_width": 8}})
    rc, said = reset(bench)
    assert (rc, said.gpu_reset["outcome"], said.after[0].verdict) == (1, "done", UNHEALTHY)
    assert "PCIe" in said.after[0].reason


def test_root_nvidia_smi_and_no_daemon_are_needed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "_running", lambda program: [77] if program == "nvidia-persistenced" else [])
    bench.machine.smi = ["no-such-nvidia-smi"]
    found = gates(bench)
    assert found["nvidia-smi"].ok is False
    assert found["virtualization"].ok is None, "nobody could be asked"
    daemon = found["persistence daemon"]
    assert daemon.ok is False and "process 77" in daemon.detail and "systemctl stop nvidia-persistenced" in daemon.fix
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needed._root() == Gate("root", False, "this is uid 1000", "connect to this host as root")


def test_ours_let_go_of_the_driver_for_the_reset_and_come_back(bench: Bench) -> None:
    bench.set(opens=True)
    watch = DriverWatch(bench.machine.driver)
    try:
        until(lambda: watch.step() or watch.inventory.gpus)
        until(lambda: watch.step() or watch.ask("slow") or any(one.slow for one in watch.newest.values()))
        with driverhold.hold():
            until(lambda: watch.step() or not watch.children)
            assert "is being reset" in watch.problem_of(0)
            assert verify(bench.machine, accept_limited=False, keep=False).after == []
        until(lambda: watch.step() or watch.ask("lean") or not watch.problem_of(0))
    finally:
        watch.close()


def test_who_opens_the_gpu_after_the_check_stops_the_reset(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.agent.reset.gpureset import cycle

    checked = cycle.needs

    def then_somebody_comes(*args: Any) -> list[Gate]:
        found = checked(*args)
        bench.start("monitor")
        return found

    monkeypatch.setattr(cycle, "needs", then_somebody_comes)
    rc, said = reset(bench)
    assert rc == 4 and "has a GPU open" in said.notes[-1]
    assert calls(bench) == []


@pytest.mark.parametrize(("number", "seq", "level"), [(48, 5, WARN), (48, 6, FAIL), (79, 5, FAIL)])
def test_an_xid_from_before_a_reset_of_its_gpu_weighs_less_unless_a_reset_does_not_mend_it(
    number: int, seq: int, level: str
) -> None:
    said = Receipt("gpu-reset-1", "gpu-reset", boot_id=procfs.boot_id(), verdict=CLEAN)
    said.gpu_reset = {"gpus": [{"uuid": "GPU-0", "bus": "00000000:1A:00.0"}], "outcome": "done", "begun": True,
                      "kernel_log_seq": 5}  # fmt: skip
    receipt.store(said)
    line = Lines().take(xid(number))
    assert line is not None
    one = Sighting(line, BEFORE, 0.0, seq, KERNEL_LOG, 0)
    found = weigh([one], {0: Case("GPU-0", {})}, settled({"gpus": {}}, []))
    assert [finding.level for finding in found.gpus[0]] == [level]
    assert ("the GPU was reset since" in one.why) == (level == WARN)


@pytest.mark.parametrize(("named", "says"), [
    (["9"], "no GPU 9"), (["GPU-9"], "no GPU GPU-9"), ([], "name the GPUs"), ([0], "as text"), ("0", "as text"),
])  # fmt: skip
def test_gpus_that_are_not_there_are_refused_with_those_that_are(bench: Bench, named: Any, says: str) -> None:
    with pytest.raises(Refused, match=says):
        op_plan(bench.machine, {"gpus": named})
