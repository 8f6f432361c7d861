"""Guards of a reset that only count where a process holds a GPU as a context does, or changes at an awkward moment."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ours, procfs
from backend.agent.reset import cycle, receipt
from backend.agent.reset.cycle import Cycle
from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, NOT_CLEAN
from tests.modes import Ward, reset, ward
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backend.wire import Receipt

ROOT = str(Path(__file__).resolve().parent.parent)
HOLD = 'for i in 1 2 3 4 5 6 7 8 9; do exec {fd}<>"$0"; done; '
"""What a shell runs to have as many files of a device as a context has; the device is its $0."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    with ward(tmp_path / "host", monkeypatch) as found:
        yield found


@contextmanager
def named(host: Ward, pid: int) -> Iterator[None]:
    """Have the driver name a process for 74 MiB of GPU 0."""
    with open(os.path.join(host.root, "claims", f"0.{pid}"), "w", encoding="ascii") as claim:
        json.dump({"pid": pid, "used_bytes": 74 << 20, "release_s": 0, "blocks": False}, claim)
        claim.flush()
        fcntl.flock(claim, fcntl.LOCK_EX)
        yield


def test_a_shell_that_resets_is_spared_though_it_has_a_context(host: Ward) -> None:
    words = [sys.executable, "-m", "tests.resetting", host.root, "reset", os.path.join(host.root, "run"),
             '{"id": "r1", "grace_s": 2.0, "deadline_s": 1.0}']  # fmt: skip
    script = HOLD + 'echo holds; read -r go; "$@"; echo "the shell lives"'
    shell = subprocess.Popen(["bash", "-c", script, os.path.join(host.root, "nvidia0"), *words], cwd=ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert shell.stdin is not None and shell.stdout is not None
    try:
        assert shell.stdout.readline() == b"holds\n"
        with named(host, shell.pid):
            out, _ = shell.communicate(b"go\n", timeout=60)
        assert out.endswith(b"the shell lives\n"), out
        said = receipt.load("r1")
        assert (said.verdict, said.signals) == (NOT_CLEAN, [])
        assert said.plan is not None
        assert "an ancestor of it" in next(one.reason for one in said.plan.spared if one.pid == shell.pid)
    finally:
        shell.kill()
        shell.communicate()


def test_an_agent_of_ours_is_spared_though_it_has_a_context(host: Ward) -> None:
    agent = host.start()
    stat = procfs.stat(agent.pid)
    assert stat is not None
    mark = ours.register("agent")
    theirs = os.path.join(os.path.dirname(mark), f"{agent.pid}.{stat.start_ticks}")
    shutil.copy(mark, theirs)
    status, said = reset(host, deadline_s=1.0)
    assert (status, said.verdict, said.signals) == (1, NOT_CLEAN, [])
    assert said.plan is not None
    assert "eightzeros itself" in next(one.reason for one in said.plan.spared if one.pid == agent.pid)
    assert agent.alive()
    ours.forget(mark)


def test_nothing_is_taken_through_a_process_that_is_spared(host: Ward) -> None:
    """A server that was started in a tmux, and a shell of that tmux's: the tmux is not ended, nor what it runs."""
    tmux = os.path.join(host.root, "run", "tmux")
    shutil.copy("/bin/bash", tmux)
    inner = 'sleep 1000 & echo "{\\"pid\\": $PPID, \\"pids\\": [$PPID, $$, $!]}"; read -r end'
    script = HOLD + f"'{tmux}' -c '{inner}'; read -r end"
    holder = host.spawn(["bash", "-c", script, os.path.join(host.root, "nvidia0")])
    with named(host, holder.pid):
        assert {one.pid for one in op_plan(host.machine, {}).victims} == {holder.pid}


def test_who_becomes_another_program_between_plan_and_binding_gets_no_signal(
    host: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, agree = host.start("become"), Cycle._agree

    def changing(self: Cycle, *seen: Any) -> None:
        agree(self, *seen)
        os.kill(holder.pid, signal.SIGUSR1)
        until(lambda: os.readlink(f"/proc/{holder.pid}/exe").endswith("sleep"))

    monkeypatch.setattr(Cycle, "_agree", changing)
    status, said = reset(host)
    assert (status, said.verdict, said.signals) == (4, NOT_CLEAN, [])
    assert "no longer the one in the plan" in said.notes[-1]
    assert holder.alive()


def test_who_appears_during_the_reset_is_named_and_left_alone(host: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, late, keep = host.start(), [], cycle.keep_begun

    def appear(folder: str, said: Receipt) -> None:
        keep(folder, said)
        late.append(host.start("plain", gpus="1"))

    monkeypatch.setattr(cycle, "keep_begun", appear)
    status, said = reset(host, deadline_s=1.0)
    assert (status, said.verdict) == (1, NOT_CLEAN)
    assert [one.verdict for one in said.after] == [CLEAN, NOT_CLEAN]
    assert not holder.alive()
    assert late[0].alive()
    assert {one["pid"] for one in said.signals} == {holder.pid}
    assert f"process {late[0].pid}" in said.after[1].reason
