"""Stopping ends all of a run and nothing else, whatever its processes do about it and whoever is gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs, runtree
from backend.wire import Refused
from tests.runstore import a_store, ended, logged, shell, spec
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backend.agent.runs import RunStore

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.environ.clear()
    os.write(1, b"grandchild %d\\n" % os.getpid())
    time.sleep(100)
if os.fork() == 0:
    time.sleep(100)
os.write(1, b"up\\n")
time.sleep(100)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


def start_stubborn(store: RunStore) -> set[tuple[int, int]]:
    """Start a tree of three that ignores SIGTERM, one of them twice forked into a session of its own."""
    store.start(spec("one", sys.executable, "-S", "-c", STUBBORN))
    logged(store, "one", "up")
    logged(store, "one", "grandchild")
    return until(lambda: len(store.members("one")) == 3 and store.members("one"))  # type: ignore[return-value]


def none_alive(members: set[tuple[int, int]]) -> bool:
    return not any(procfs.alive(*one) for one in members)


def test_a_polite_run_is_asked(store: RunStore) -> None:
    store.start(shell("one", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.02; done"))
    logged(store, "one", "up")
    assert store.stop("one", 10).state == "stopping"
    run = ended(store, "one")
    assert (run.state, run.exit_code, run.reason) == ("exited", 3, "stopped on request")
    assert store.log("one", 0, 1000)["text"].endswith("bye\n")


def test_a_stubborn_tree_is_killed_whole(store: RunStore) -> None:
    members = start_stubborn(store)
    assert store.stop("one", 0.3).state == "stopping"
    run = store.get("one")
    assert run is not None
    assert run.state == "stopping"
    run = ended(store, "one")
    assert none_alive(members), "the end is recorded only when all are gone"
    assert run.exit_code == -signal.SIGKILL
    assert "3 processes did not end by themselves and were killed" in run.reason
    assert store.members("one") == set()


def test_a_second_stop_shortens_the_grace(store: RunStore) -> None:
    start_stubborn(store)
    store.stop("one", 1000)
    store.stop("one", 0.0)
    assert ended(store, "one").exit_code == -signal.SIGKILL


def test_a_stopped_process_is_woken_to_hear_it(store: RunStore) -> None:
    run = store.start(spec("one", "sleep", "100"))
    os.kill(run.pid, signal.SIGSTOP)
    until(lambda: (procfs.stat(run.pid) or pytest.fail("gone")).state == "T")
    store.stop("one", 60)
    assert ended(store, "one").exit_code == -signal.SIGTERM


def test_what_the_main_process_leaves_is_asked_before_it_is_killed(store: RunStore) -> None:
    worker = "trap 'echo worker asked; exit' TERM; echo worker up; while :; do sleep 0.02; done"
    store.start(shell("one", f'setsid sh -c "{worker}" & trap "exit 0" TERM; while :; do sleep 0.02; done'))
    logged(store, "one", "worker up")
    store.stop("one", 60)
    run = ended(store, "one")
    assert (run.exit_code, run.reason) == (0, "stopped on request")
    assert "worker asked" in store.log("one", 0, 1000)["text"]


def test_sigterm_to_the_supervisor_is_a_stop(store: RunStore, tmp_path: Path) -> None:
    run = store.start(spec("one", "sleep", "100", grace_s=7.0))
    os.kill(run.supervisor_pid, signal.SIGTERM)
    assert ended(store, "one").reason.startswith("stopped on request")
    assert json.loads((tmp_path / "runs/one/stop.json").read_text())["grace_s"] == 7.0


def test_a_run_without_supervisor_is_stopped_all_the_same(store: RunStore) -> None:
    members = start_stubborn(store)
    run = store.get("one")
    assert run is not None
    os.kill(run.supervisor_pid, signal.SIGKILL)
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))
    assert store.stop("one", 0.3).state == "stopping"
    run = ended(store, "one")
    assert none_alive({one for one in members if one in store.members("one")} | {(run.pid, run.pid_start)})
    assert (run.state, run.exit_code) == ("lost", None)
    assert "its exit status is unknown, because its supervisor had died" in run.reason
    for pid, start in members:  # who cleared its environment and left the session is out of reach
        runtree.signal_process(pid, start, signal.SIGKILL)


def test_stopping_does_not_reach_others(store: RunStore) -> None:
    store.start(shell("one", "echo up; sleep 100"))
    other = store.start(shell("two", "echo up; sleep 100"))
    logged(store, "two", "up")
    store.stop("one", 0.0)
    ended(store, "one")
    assert procfs.alive(other.pid, other.pid_start)
    assert len(store.members("two")) == 2


def test_stopping_what_has_ended_or_never_was(store: RunStore) -> None:
    store.start(shell("one", "exit 0"))
    run = ended(store, "one")
    assert store.stop("one", 1) == run
    with pytest.raises(Refused) as refused:
        store.stop("two", 1)
    assert refused.value.code == "not-found"


def test_a_signal_never_hits_another_process_under_the_same_pid() -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    assert runtree.signal_process(me.pid, me.start_ticks + 1, signal.SIGKILL) is False


def test_members_of_a_pid_that_was_reused_are_none(store: RunStore, tmp_path: Path) -> None:
    run = store.start(spec("one", "sleep", "100"))
    path = tmp_path / "runs/one/run.json"
    real = path.read_text()
    me = procfs.stat(os.getpid())
    assert me is not None
    forged = dict(json.loads(real), pid=me.sid, pid_start=int(time.time() * 100), supervisor_pid=me.pid,
                  supervisor_start=me.start_ticks + 1)  # fmt: skip
    path.write_text(json.dumps(forged))
    try:
        assert store.members("one") == set()
    finally:
        path.write_text(real)
    assert store.members("one") == {(run.pid, run.pid_start)}
