"""A process bound by its handle: no reuse of its pid and no later program is ever taken for it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time

import pytest

from backend.agent import pidfd
from backend.agent.pidfd import Bound, identify, same
from tests.waiting import until


def test_sends_waits_and_knows_the_dead() -> None:
    process = subprocess.Popen(["sleep", "100"])
    bound = Bound.open(process.pid)
    assert bound is not None
    assert not bound.gone()
    assert pidfd.wait([bound], time.monotonic() + 0.02) == [bound]
    assert bound.send(signal.SIGTERM) == 0
    assert pidfd.wait([bound], time.monotonic() + 10) == []
    assert bound.gone()
    assert Bound.open(process.pid) is None  # a zombie is dead, though its pid is still there
    process.wait()
    assert bound.send(signal.SIGKILL) == errno.ESRCH
    bound.close()


def test_the_old_python_makes_the_same_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "100"])
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(signal, "pidfd_send_signal")
    bound = Bound.open(process.pid)
    assert bound is not None
    assert not os.get_inheritable(bound.fd)
    assert bound.send(signal.SIGKILL) == 0
    assert process.wait() == -signal.SIGKILL
    assert bound.send(0) == errno.ESRCH
    with pytest.raises(ProcessLookupError):
        pidfd.pidfd_open(process.pid)
    bound.close()


def test_a_reused_pid_is_another_process() -> None:
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        pytest.skip("choosing a pid needs root")
    first = subprocess.Popen(["sleep", "100"])
    bound, planned = Bound.open(first.pid), identify(first.pid)
    assert bound is not None
    assert planned is not None
    first.kill()
    first.wait()
    second = _with_pid(first.pid)
    try:
        assert bound.send(signal.SIGKILL) == errno.ESRCH
        assert second.poll() is None
        found = identify(second.pid)
        assert found is not None
        assert found.inode != planned.inode
        assert not same(planned, found)
        assert not pidfd.send(second.pid, planned.start_ticks - 1, signal.SIGKILL)
    finally:
        second.kill()
        second.wait()
        bound.close()


def _with_pid(pid: int) -> subprocess.Popen[bytes]:
    """Start a process under a pid that has just become free; others may take it first."""
    for _ in range(200):
        with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as file:
            file.write(str(pid - 1))
        process = subprocess.Popen(["sleep", "100"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    pytest.skip("the pid was not given out again")


def test_another_program_under_the_same_pid_is_not_the_same() -> None:
    process = subprocess.Popen(["/bin/bash", "-c", "read -r; exec sleep 100"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("bash"))
    planned = identify(process.pid)
    process.stdin.write(b"\n")
    process.stdin.close()
    until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("sleep"))
    found = identify(process.pid)
    assert planned is not None
    assert found is not None
    assert (found.pid, found.start_ticks, found.inode) == (planned.pid, planned.start_ticks, planned.inode)
    assert not same(planned, found)
    process.kill()
    process.wait()


def test_a_plan_of_a_kernel_without_inodes_is_held_against_the_rest() -> None:
    process = subprocess.Popen(["sleep", "100"])
    until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("sleep"))
    found = identify(process.pid)
    assert found is not None
    assert same(found._replace(inode=0), found)
    assert not same(found._replace(inode=0, uid=found.uid + 1), found)
    assert not same(found._replace(inode=found.inode + 1), found)
    process.kill()
    process.wait()
