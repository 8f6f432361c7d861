"""Failure modes of processes: whatever state a holder is in, it ends or is named, and no witness is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs
from backend.agent.reset import cycle, receipt
from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, NOT_CLEAN
from tests.fusing import DeadFilesystem
from tests.modes import Ward, reset, ward
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backend.wire import Receipt
    from tests.holding import Holder

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).resolve().parent.parent)
LAST_PID = "/proc/sys/kernel/ns_last_pid"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    with ward(tmp_path / "host", monkeypatch) as found:
        yield found


def ends(host: Ward, holder: Holder, **options: float) -> Receipt:
    """Reset, and fail unless the host is clean and the holder was killed."""
    status, said = reset(host, **options)
    assert (status, said.verdict) == (0, CLEAN), [one.reason for one in said.after]
    assert str(holder.pid) in said.before[0].reason
    assert not holder.alive()
    assert holder.pid in {one.pid for one in said.killed}
    return said


def names(said: Receipt, number: str) -> list[int]:
    """Return who got a signal."""
    return [one["pid"] for one in said.signals if one["signal"] == number]


def test_mode_01_ignores_sigterm(host: Ward) -> None:
    holder = host.start("ignore-term")
    assert names(ends(host, holder, grace_s=300.0), "SIGKILL") == [holder.pid]


def test_mode_02_exits_slowly_on_sigterm(host: Ward) -> None:
    said = ends(host, host.start("slow-exit", exit_s=1.0), grace_s=60.0)
    assert not names(said, "SIGKILL")
    assert 0.9 <= said.durations["grace"] < 60.0


def test_mode_03_stopped(host: Ward) -> None:
    assert not names(ends(host, host.start("stopped")), "SIGKILL")


def test_mode_04_zombie_whose_parent_does_not_reap(host: Ward) -> None:
    holder = host.watch(host.start("unreaped"), 1)
    ends(host, holder)
    stat = procfs.stat(holder.pid)
    assert stat is not None and (stat.state, stat.ppid) == ("Z", holder.pids[1])


def test_mode_05_zombie_leader_with_a_live_thread_that_holds(host: Ward) -> None:
    holder = host.start("zombie-leader")
    until(lambda: (stat := procfs.stat(holder.pid)) and stat.dead)
    assert holder.alive()
    ends(host, holder)


@pytest.mark.parametrize("mode", ["orphan", "subreaped"])
def test_mode_06_reparented_orphan(host: Ward, mode: str) -> None:
    holder = host.start(mode)
    if mode == "subreaped":
        host.watch(holder, 1)
    ends(host, holder)


def test_mode_07_fork_heir(host: Ward) -> None:
    heir = host.start("heir")
    until(lambda: not heir.alive(1))
    status, said = reset(host)
    assert (status, said.verdict) == (0, CLEAN)
    assert said.plan is not None
    assert [(one["pid"], one["gpu"]) for one in said.plan.ghosts] == [(heir.pids[1], 0)]
    assert str(heir.pids[1]) in said.plan.victims[0].reason
    assert not heir.alive()


def test_mode_08_mapping_whose_file_was_closed(host: Ward) -> None:
    ends(host, host.start("mapped"))


def test_mode_09_file_in_flight_over_a_socket(host: Ward) -> None:
    holder = host.watch(host.start("in-flight"))
    status, said = reset(host, deadline_s=1.0)
    assert (status, said.verdict, said.signals) == (1, NOT_CLEAN, [])
    assert "1000 MiB in use" in said.after[0].reason
    assert str(holder.pid) in said.after[0].reason


@pytest.mark.parametrize("title", ["sglang::scheduler_TP0", "x"])
def test_mode_10_renamed(host: Ward, title: str) -> None:
    said = ends(host, host.start(comm=title, title=title))
    assert said.killed[0].exe.startswith("/")
    assert "python" in said.killed[0].exe


def _take_pid(pid: int, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a process under a pid that has just become free."""
    if not os.access(LAST_PID, os.W_OK):
        pytest.skip("needs root to choose a pid")
    for _ in range(300):
        Path(LAST_PID).write_text(str(pid - 1), encoding="ascii")
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        if process.pid == pid:
            return process
        process.kill()
        process.communicate()
    raise AssertionError(f"pid {pid} was not given out again")


def test_mode_11_pid_reused_between_binding_and_the_first_signal(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process under a bound pid proves by what is pending that it got nothing of the whole ladder."""
    holder, later = host.start(), []
    keep = cycle.keep_begun

    def reuse(folder: str, said: Receipt) -> None:
        keep(folder, said)
        holder.process.kill()
        holder.process.wait()
        deaf = "from signal import *; pthread_sigmask(SIG_BLOCK, valid_signals()); print(1, flush=True); pause()"
        later.append(_take_pid(holder.pid, [sys.executable, "-S", "-c", deaf]))
        assert later[0].stdout is not None
        assert later[0].stdout.readline()

    monkeypatch.setattr(cycle, "keep_begun", reuse)
    try:
        status, said = reset(host)
        assert (status, said.verdict) == (0, CLEAN)
        assert {(one["pid"], one["error"]) for one in said.signals} <= {(holder.pid, "ESRCH")}
        fields = procfs.status(holder.pid)
        assert (int(fields["SigPnd"], 16), int(fields["ShdPnd"], 16)) == (0, 0)
        assert later[0].poll() is None
    finally:
        for one in later:
            one.kill()
            one.communicate()


def test_mode_16_forks_again_on_sigterm(host: Ward) -> None:
    host.start("fork-at-term")
    status, said = reset(host)
    assert (status, said.verdict, len(said.killed)) == (0, CLEAN, 2)
    assert said.killed[1].reason.startswith("left behind by a victim")


def test_mode_17_waits_for_a_filesystem_that_never_answers(host: Ward, tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    dead = DeadFilesystem(tmp_path / "dead")
    try:
        holder = host.start("waits-for-file", title=str(tmp_path / "dead" / "file"))
        dead.take()
        status, said = reset(host, grace_s=0.3, deadline_s=1.0)
        assert (status, said.verdict) == (1, NOT_CLEAN)
        assert [one.pid for one in said.survivors] == [holder.pid]
        assert str(holder.pid) in said.after[0].reason
        assert any(f"process {holder.pid}" in note and "state D" in note and "SIGKILL is pending" in note
                   for note in said.notes), said.notes  # fmt: skip
    finally:
        dead.close()
    until(lambda: not holder.alive())


def test_mode_18_parent_in_vfork(host: Ward) -> None:
    holder = host.start("vfork-parent")
    until(lambda: (stat := procfs.stat(holder.pid)) and stat.state == "D")
    ends(host, holder, grace_s=0.3)


def test_mode_19_frozen(host: Ward) -> None:
    places = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    root = next((one for one in places if (one / "cgroup.procs").exists()), None)
    if root is None or os.geteuid() != 0:
        pytest.skip("needs root and a cgroup of version 2")
    holder = host.start()
    group = root / f"eightzeros-test-{holder.pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(holder.pid))
        (group / "cgroup.freeze").write_text("1")
        until(lambda: "frozen 1" in (group / "cgroup.events").read_text())
        ends(host, holder, grace_s=0.3)
    finally:
        (group / "cgroup.freeze").write_text("0")
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_mode_20_traced(host: Ward) -> None:
    ends(host, host.watch(host.start("traced"), 1))


def test_mode_21_pid_of_another_namespace(host: Ward) -> None:
    """The driver names the pid that a holder has elsewhere; here an innocent process has it."""
    innocent = host.watch(host.start("bystander"))
    holder = host.start(named=innocent.pid)
    status, said = reset(host)
    assert (status, said.verdict) == (0, CLEAN)
    assert said.plan is not None
    assert [one["pid"] for one in said.plan.ghosts] == [innocent.pid]
    assert [one.pid for one in said.killed] == [holder.pid]


def test_mode_22_ghost_that_never_existed(host: Ward) -> None:
    never = int(Path("/proc/sys/kernel/pid_max").read_text()) + 7
    host.watch(host.start("memory-alone", named=never))
    status, said = reset(host, deadline_s=1.0)
    assert (status, said.verdict, said.signals) == (1, NOT_CLEAN, [])
    assert f"process {never}, which is gone" in said.after[0].reason
    assert said.after[0].action


def test_mode_28_own_shell_has_the_words_and_the_device(host: Ward) -> None:
    holder = host.start()
    script = 'exec 3<>"$0"; "$@" && echo "shell lives"; : sglang python3'
    words = [sys.executable, "-m", "tests.resetting", host.root, "reset", os.path.join(host.root, "run"),
             '{"id": "r1", "grace_s": 2.0, "deadline_s": 4.0}']  # fmt: skip
    done = subprocess.run(["sh", "-c", script, os.path.join(host.root, "nvidia0"), *words], cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("shell lives\n")
    said = receipt.load("r1")
    assert (said.verdict, [one.pid for one in said.killed]) == (CLEAN, [holder.pid])
    host.check(said)


def test_mode_39_two_thousand_processes(host: Ward) -> None:
    sleepers = [subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) for _ in range(2000)]
    try:
        holder = host.start()
        assert {one.pid for one in op_plan(host.machine, {}).victims} == {holder.pid}
        ends(host, holder)
        assert all(one.poll() is None for one in sleepers)
    finally:
        for one in sleepers:
            one.send_signal(signal.SIGKILL)
        for one in sleepers:
            one.wait()
