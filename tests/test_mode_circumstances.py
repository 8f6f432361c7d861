"""Failure modes of readings, plans and the host around a reset: each has its verdict and reason, and no witness is
touched."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ours, procfs
from backend.agent.reset import clearance, cycle, receipt, watch
from backend.agent.reset.cycle import verify
from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, LIMITED, MIB, NOT_CLEAN, UNHEALTHY, UNKNOWN, Plan
from tests.modes import NOBODY, Ward, reset, ward
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    with ward(tmp_path / "host", monkeypatch) as found:
        yield found


def confirm(plan: Plan) -> str:
    """Write a plan as the operator confirmed it."""
    path = receipt.plan_path("r1")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"schema": 1, "victims": plan.victims}, file, default=vars)
    return path


def test_mode_12_victim_became_another_program(host: Ward) -> None:
    holder = host.start("become")
    path = confirm(op_plan(host.machine, {}))
    os.kill(holder.pid, signal.SIGUSR1)
    until(lambda: os.readlink(f"/proc/{holder.pid}/exe").endswith("sleep"))
    status, said = reset(host, plan=path)
    assert (status, said.verdict, said.signals) == (4, NOT_CLEAN, [])
    assert "plan changed" in said.notes[-1] and "sleep" in said.notes[-1]
    assert holder.alive()


def test_mode_13_another_users(host: Ward) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to start a process of another user")
    theirs = host.watch(host.start("bystander", uid=NOBODY))
    for folder in ("", "claims", "released"):
        os.chmod(os.path.join(host.root, folder), 0o777)
    os.chmod(os.path.join(host.root, "nvidia0"), 0o666)
    folder = host.root
    while folder not in ("/", "/tmp"):
        os.chmod(folder, os.stat(folder).st_mode | 0o011)
        folder = os.path.dirname(folder)
    holder = host.start(uid=NOBODY)
    status, said = reset(host)
    assert (status, said.verdict, said.signals) == (1, NOT_CLEAN, [])
    assert f"process {holder.pid}" in said.after[0].reason
    assert said.plan is not None
    assert "another user" in next(one.reason for one in said.plan.spared if one.pid == holder.pid)
    assert holder.alive()
    assert reset(host, id="r2", other_users=True)[0] == 0
    assert not holder.alive()
    assert theirs.untouched()


def test_mode_15_new_process_after_the_plan(host: Ward) -> None:
    first = host.start()
    path = confirm(op_plan(host.machine, {}))
    late = host.start(gpus="1")
    status, said = reset(host, plan=path)
    assert (status, said.verdict, said.signals) == (4, NOT_CLEAN, [])
    assert f"process {late.pid}" in said.notes[-1]
    assert first.alive() and late.alive()


GIB = 1 << 30


@pytest.mark.parametrize(("curve", "word", "said"), [
    ([9 * GIB, 7 * GIB, 7 * GIB, 4 * GIB, 2 * GIB, GIB, 0], CLEAN, "0 MiB in use"),
    ([GIB, 3 * MIB], CLEAN, "3 MiB in use"),
    ([GIB, 0, 2 * GIB], NOT_CLEAN, "2048 MiB in use"),
], ids=["falls in steps", "3 MiB above", "rises again"])  # fmt: skip
def test_mode_23_memory_after_the_kill(host: Ward, curve: list[int], word: str, said: str) -> None:
    holder = host.start(used_mib=1)
    host.set(curve={"0": curve})
    _, found = reset(host, deadline_s=1.5)
    assert (found.verdict, found.after[0].verdict, found.after[1].verdict) == (word, word, CLEAN)
    assert said in found.after[0].reason
    assert not holder.alive()


def test_mode_24_driver_blocks_while_a_victim_exits(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (0.3,))
    host.start("slow-exit", exit_s=1.2)
    host.set(blocks_at_exit=True)
    status, said = reset(host)
    assert (status, said.verdict) == (0, CLEAN)
    assert any("one call to the driver took 1." in note for note in said.notes), said.notes


def test_mode_24_driver_hangs_for_good(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (0.5,))
    host.set(hang=[0])
    status, said = reset(host)
    assert (status, said.verdict, said.signals) == (1, UNKNOWN, [])
    assert [one.verdict for one in said.after] == [UNKNOWN, CLEAN]
    assert "not answering" in said.after[0].reason


def test_mode_25_reading_without_permission(host: Ward) -> None:
    host.set(readings={"0": {"recovery_action": "no permission (NVML 4)"}})
    status, said = reset(host)
    assert (status, said.verdict) == (1, LIMITED)
    assert "no permission (NVML 4)" in said.after[0].reason
    assert said.after[1].verdict == CLEAN


def test_mode_26_gpu_lost_in_the_middle(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, keep = host.start(), cycle.keep_begun

    def lose(folder: str, said: Any) -> None:
        keep(folder, said)
        host.set(lost=[1])

    monkeypatch.setattr(cycle, "keep_begun", lose)
    status, said = reset(host)
    assert (status, said.verdict) == (1, UNHEALTHY)
    assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
    assert "lost" in said.after[1].reason and said.after[1].action
    assert not holder.alive()


def test_mode_29_agent_holds_the_device(host: Ward) -> None:
    mark = ours.register("agent")
    try:
        with open(os.path.join(host.root, "nvidia0"), "rb"):
            status, said = reset(host)
    finally:
        ours.forget(mark)
    assert (status, said.verdict, said.signals) == (0, CLEAN, [])
    assert said.plan is not None
    assert "own process" in next(one.reason for one in said.plan.spared if one.pid == os.getpid())


def test_mode_35_clock_jumps(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, real, calls = host.start("slow-exit", exit_s=0.3), time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return real() + (86400.0 if calls[0] % 2 else -86400.0)

    monkeypatch.setattr(time, "time", jumping)
    status, said = reset(host)
    assert (status, said.verdict) == (0, CLEAN)
    assert calls[0] > 0
    assert all(0 <= seconds < 60 for seconds in said.durations.values()), said.durations
    assert not holder.alive()


def test_mode_36_reboot_between_reset_and_launch(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an earlier boot opens the gate: not the receipt, and not what was registered as ours."""
    assert reset(host)[1].verdict == CLEAN
    holder = host.start()
    stat = procfs.stat(holder.pid)
    assert stat is not None
    mark = os.path.join(os.path.dirname(ours.register("agent")), f"{holder.pid}.{stat.start_ticks}")
    with open(mark, "w", encoding="ascii") as file:
        file.write("another-boot agent\n")
    assert f"process {holder.pid}" in verify(host.machine, accept_limited=True).after[0].reason
    assert {one.pid for one in op_plan(host.machine, {}).victims} == {holder.pid}
    assert receipt.load("r1").boot_id == procfs.boot_id()
    monkeypatch.setattr(procfs, "boot_id", lambda: "the next boot")
    said = verify(host.machine, accept_limited=True)
    assert said.verdict == NOT_CLEAN
    assert said.boot_id != receipt.load("r1").boot_id


def test_mode_38_memory_comes_back_after_the_death(host: Ward) -> None:
    host.start(release_s=1.5)
    status, said = reset(host)
    assert (status, said.verdict) == (0, CLEAN)
    assert said.durations["release"] >= 1.2


def test_mode_38_memory_comes_back_before_the_death(host: Ward) -> None:
    holder = host.start("frees-early", exit_s=1.0)
    status, said = reset(host, grace_s=30.0)
    assert (status, said.verdict) == (0, CLEAN)
    assert not holder.alive()
    assert said.durations["grace"] >= 0.9
    assert said.durations["grace"] > clearance.STABLE_S
