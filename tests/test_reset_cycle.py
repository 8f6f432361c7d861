"""The kill-and-verify cycle on real processes, held devices and memory that outlives them."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ours
from backend.agent.files import write_json
from backend.agent.reset import baseline, receipt
from backend.agent.reset.cycle import Cycle, main, verify
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.ops import op_baseline_record, op_plan, prepare_start
from backend.wire import CLEAN, MIB, NOT_CLEAN, UNHEALTHY, Plan, Receipt, Refused
from tests.resetting import Bench, quick_bench
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOBODY = 65534


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with quick_bench(tmp_path / "host", monkeypatch) as host:
        yield host


def plan(bench: Bench, **args: Any) -> Plan:
    return op_plan(bench.machine, args)


def reset(bench: Bench, **options: Any) -> tuple[int, Receipt]:
    """Run one cycle and return its exit status and receipt."""
    options = {"id": "r1", "grace_s": 5.0, "deadline_s": 6.0, **options}
    status = Cycle(bench.machine, os.path.join(bench.root, "run"), options).run()
    return status, receipt.load("r1")


def pids(processes: Any) -> set[int]:
    return {one.pid for one in processes}


def reasons(bench: Bench) -> dict[int, str]:
    return {one.pid: one.reason for one in plan(bench).spared}


@pytest.mark.parametrize("mode", ["plain", "stopped", "orphan", "mapped", "zombie-leader", "slow-exit"])
def test_ends_a_holder_whatever_state_it_is_in(bench: Bench, mode: str) -> None:
    holder = bench.start(mode)
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert not holder.alive()
    assert pids(said.killed) == {holder.pid}
    assert {one["signal"] for one in said.signals} == {"SIGTERM", "SIGCONT"}
    assert said.before[0].verdict == NOT_CLEAN
    assert str(holder.pid) in said.before[0].reason


def test_kills_what_ignores_the_request_when_its_grace_is_over(bench: Bench) -> None:
    stubborn, polite = bench.start("swallow-term"), bench.start("plain", gpus="1")
    status, said = reset(bench, grace_s=0.4)
    assert (status, said.verdict) == (0, CLEAN)
    assert [one["pid"] for one in said.signals if one["signal"] == "SIGKILL"] == [stubborn.pid]
    assert not polite.alive()
    assert said.durations["grace"] >= 0.4


def test_does_not_wait_for_what_ignores_the_request(bench: Bench) -> None:
    deaf = bench.start("ignore-term")
    status, said = reset(bench, grace_s=300.0)
    assert (status, said.verdict) == (0, CLEAN)
    assert [one["signal"] for one in said.signals] == ["SIGTERM", "SIGCONT", "SIGKILL"]
    assert not deaf.alive()


def test_waits_no_longer_than_its_victims_take(bench: Bench) -> None:
    bench.start("slow-exit", exit_s=0.3)
    _, said = reset(bench, grace_s=60.0)
    assert 0.3 <= said.durations["grace"] < 60.0


def test_takes_the_heir_of_a_dead_opener_and_names_the_ghost(bench: Bench) -> None:
    heir = bench.start("heir")
    ghost = heir.pids[1]
    until(lambda: not heir.alive(1))
    shown = plan(bench)
    assert pids(shown.victims) == {heir.pid}
    assert str(ghost) in shown.victims[0].reason
    assert [(one["pid"], one["gpu"]) for one in shown.ghosts] == [(ghost, 0)]
    assert reset(bench)[0] == 0
    assert not heir.alive()


def test_takes_what_a_victim_left_behind_while_it_was_stopped(bench: Bench) -> None:
    bench.start("fork-at-term")
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert len(said.killed) == 2
    assert said.killed[1].reason.startswith("left behind by a victim")


def test_takes_descendants_that_hold_nothing(bench: Bench) -> None:
    parent = bench.start("with-child")
    assert pids(plan(bench).victims) == set(parent.pids)
    assert reset(bench)[0] == 0
    assert not parent.alive(0)
    assert not parent.alive(1)


def test_leaves_monitors_and_bystanders_alone(bench: Bench) -> None:
    victim, monitor = bench.start(), bench.start("monitor", gpus="0,1")
    bystander = bench.start("bystander", title="python3 sglang.launch_server")
    assert pids(plan(bench).victims) == {victim.pid}
    assert "monitor" in reasons(bench)[monitor.pid]
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert monitor.alive()
    assert bystander.alive()
    assert {one["pid"] for one in said.signals} == {victim.pid}


def test_in_doubt_it_spares_and_says_who_is_left(bench: Bench) -> None:
    doubtful = bench.start("doubtful")
    assert "in doubt" in reasons(bench)[doubtful.pid]
    status, said = reset(bench)
    assert (status, said.verdict, said.signals) == (1, NOT_CLEAN, [])
    assert f"process {doubtful.pid}" in said.after[0].reason
    assert said.after[0].command == "sudo fuser -v /dev/nvidia0"
    assert said.after[1].verdict == CLEAN
    assert doubtful.alive()


def test_memory_that_nobody_is_named_for_is_the_context_like_holders(bench: Bench) -> None:
    bench.set(idle_bytes={"0": 500 * MIB})
    holder, monitor = bench.start("doubtful"), bench.start("monitor")
    assert pids(plan(bench).victims) == {holder.pid}
    assert "names nobody" in plan(bench).victims[0].reason
    assert monitor.pid in reasons(bench)


def test_a_name_without_files_is_a_ghost_though_a_process_has_that_pid(bench: Bench) -> None:
    innocent = bench.start("bystander")
    holder = bench.start("plain", named=innocent.pid)
    shown = plan(bench)
    assert pids(shown.victims) == {holder.pid}
    assert [one["pid"] for one in shown.ghosts] == [innocent.pid]


def test_spares_another_users_process_unless_asked(bench: Bench) -> None:
    os.chmod(bench.root, 0o777)
    for name in ("claims", "released", "nvidia0"):
        os.chmod(os.path.join(bench.root, name), 0o777)
    os.chown(os.path.join(bench.root, "claims"), NOBODY, NOBODY)
    holder = _as_nobody(bench)
    assert "another user" in reasons(bench)[holder.pid]
    status, said = reset(bench)
    assert (status, said.verdict) == (1, NOT_CLEAN)
    assert f"process {holder.pid}" in said.after[0].reason
    assert holder.alive()
    assert reset(bench, other_users=True)[0] == 0
    assert not holder.alive()


def _as_nobody(bench: Bench) -> Any:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    for folder in (bench.root, *_parents(bench.root)):
        os.chmod(folder, os.stat(folder).st_mode | 0o011)
    return bench.start("plain", uid=NOBODY)


def _parents(path: str) -> list[str]:
    found = []
    while os.path.dirname(path) not in ("/", "/tmp", path):
        path = os.path.dirname(path)
        found.append(path)
    return found


def test_spares_itself_and_what_is_registered_as_ours(bench: Bench) -> None:
    mark = ours.register("agent")
    with open(os.path.join(bench.root, "nvidia0"), "rb"):
        assert reasons(bench)[os.getpid()].startswith("this reset's own process")
        assert reset(bench)[0] == 0
    ours.forget(mark)


@pytest.mark.parametrize("how", ["newcomer", "digest"])
def test_a_changed_plan_sends_no_signal(bench: Bench, how: str) -> None:
    first = bench.start()
    confirmed = plan(bench)
    late = bench.start("plain", gpus="1")
    if how == "digest":
        with pytest.raises(Refused, match="is new: it has a context on GPU 1"):
            prepare_start(bench.machine, {"id": "r1", "digest": confirmed.digest})
        options = {"digest": confirmed.digest}
    else:
        path = receipt.plan_path("r1")
        with open(path, "w", encoding="ascii") as file:
            json.dump({"schema": 1, "victims": confirmed.victims}, file, default=vars)
        options = {"plan": path}
    status, said = reset(bench, **options)
    assert (status, said.signals, said.killed) == (4, [], [])
    assert said.verdict == NOT_CLEAN
    assert "plan changed" in said.notes[-1]
    assert first.alive()
    assert late.alive()


def test_a_victim_that_became_another_program_stops_the_reset(bench: Bench) -> None:
    holder = bench.start("become")
    confirmed = plan(bench)
    os.kill(holder.pid, signal.SIGUSR1)
    until(lambda: os.readlink(f"/proc/{holder.pid}/exe").endswith("sleep"))
    path = receipt.plan_path("r1")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"schema": 1, "victims": confirmed.victims}, file, default=vars)
    status, said = reset(bench, plan=path)
    assert (status, said.signals) == (4, [])
    assert holder.alive()


def test_what_a_planned_victim_started_since_is_no_news(bench: Bench) -> None:
    parent = bench.start("with-child")
    confirmed = plan(bench)
    confirmed.victims = [one for one in confirmed.victims if one.pid == parent.pid]
    path = receipt.plan_path("r1")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"schema": 1, "victims": confirmed.victims}, file, default=vars)
    assert reset(bench, plan=path)[0] == 0
    assert not parent.alive(1)


def test_names_who_starts_a_killed_holder_again(bench: Bench) -> None:
    respawner = bench.start("respawner")
    status, said = reset(bench)
    assert (status, said.verdict) == (1, NOT_CLEAN)
    assert respawner.alive(1)
    assert any("came back" in note and f"process {respawner.pids[1]}" in note for note in said.notes), said.notes
    for one in plan(bench).victims:  # the new one is the respawner's child, which the test has no handle of
        os.kill(respawner.pids[1], signal.SIGKILL)
        os.kill(one.pid, signal.SIGKILL)


def test_waits_for_memory_that_comes_back_after_the_death(bench: Bench) -> None:
    bench.start("plain", release_s=1.5)
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert said.durations["release"] >= 1.2


def test_memory_that_never_comes_back_is_said_with_the_dead_pid(bench: Bench) -> None:
    holder = bench.start("plain", release_s=10000, used_mib=3000)
    status, said = reset(bench, deadline_s=1.0)
    assert (status, said.verdict) == (1, NOT_CLEAN)
    assert "3000 MiB in use" in said.after[0].reason
    assert f"process {holder.pid}, which is gone" in said.after[0].reason
    assert said.after[0].action
    assert said.after[1].verdict == CLEAN


@pytest.mark.parametrize(("name", "said"), [
    ("recovery_action", "asks for a GPU reset"), ("remapped_pending", "waits to be remapped"),
    ("remapped_failed", "could not be remapped"),
])  # fmt: skip
def test_a_free_gpu_that_asks_for_repair_is_unhealthy(bench: Bench, name: str, said: str) -> None:
    bench.set(readings={"0": {name: 1}})
    found = verify(bench.machine, accept_limited=True).after
    assert [one.verdict for one in found] == [UNHEALTHY, CLEAN]
    assert said in found[0].reason
    assert found[0].action
    assert found[0].command.startswith("nvidia-smi")


def test_the_baseline_is_what_was_recorded_for_this_driver(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "SPAN_S", 0.2)
    bench.set(idle_bytes={"0": 400 * MIB})
    assert verify(bench.machine, accept_limited=True).verdict == NOT_CLEAN
    record = op_baseline_record(bench.machine, {})
    assert record["gpus"]["GPU-0000"]["used_bytes"] == 400 * MIB
    assert verify(bench.machine, accept_limited=True).verdict == CLEAN
    bench.set(idle_bytes={"0": 409 * MIB})
    assert "409 MiB in use" in verify(bench.machine, accept_limited=True).after[0].reason


def test_no_baseline_is_recorded_while_somebody_holds_a_gpu(bench: Bench) -> None:
    holder = bench.start()
    with pytest.raises(Refused, match=f"held by process {holder.pid}"):
        op_baseline_record(bench.machine, {})


def test_the_full_second_of_stability_is_kept_by_default(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    host = Bench(folder)
    began = time.monotonic()
    assert verify(host.machine, accept_limited=True).verdict == CLEAN
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("memory", [True, False], ids=["memory left", "nothing left"])
def test_a_full_disk_takes_neither_verdict_nor_kill(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    holder = bench.start()
    spare = os.path.join(bench.root, "memory")

    def full(path: str, record: Any) -> None:
        if not memory or not path.startswith(spare):
            raise OSError(28, "No space left on device")
        write_json(path, record)

    monkeypatch.setattr(receipt, "write_json", full)
    monkeypatch.setattr(receipt, "MEMORY", spare)
    status = Cycle(bench.machine, os.path.join(bench.root, "run"), {"id": "r1"}).run()
    assert status == 0
    assert not holder.alive()
    said = capsys.readouterr().out
    assert "CLEAN" in said
    assert "receipt could not be written" in said
    assert "No space left" in said
    if memory:
        found = receipt.load("r1")
        assert found.verdict == CLEAN
        assert any("No space left" in note for note in found.notes)
    else:
        with pytest.raises(Refused, match="no receipt"):
            receipt.load("r1")


def test_a_second_operator_is_told_who_resets(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    holder = bench.start()
    before = {number: signal.getsignal(number) for number in (1, 2, 13, 15)}
    try:
        with one_at_a_time("reset night-7", bench.machine.devices().scope()):
            assert main(bench.machine, os.path.join(bench.root, "run"), {"id": "r2"}) == 4
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "reset night-7" in capsys.readouterr().out
    assert holder.alive()


def test_the_journal_has_every_signal_before_the_verdict(bench: Bench) -> None:
    holder = bench.start()
    reset(bench)
    with open(os.path.join(bench.root, "run", "journal.jsonl"), "rb") as file:
        events = [json.loads(line) for line in file]
    kinds = [event["kind"] for event in events]
    assert kinds[-1] == "verdict"
    assert kinds.index("signal") < kinds.index("gone") < kinds.index("verdict")
    assert [event["data"]["pid"] for event in events if event["kind"] == "signal"] == [holder.pid] * 2
    assert sorted(event["at_s"] for event in events) == [event["at_s"] for event in events]
