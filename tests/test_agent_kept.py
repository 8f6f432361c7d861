"""The worker that is kept: many answers from one process, and none of its troubles reaches the agent."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import kept as kept_module
from backend.agent.kept import Kept
from backend.agent.shards.lengths import lengths
from backend.agent.shards.listing import list_shards
from backend.agent.shards.show import show
from backend.wire import Refused
from tests import auditing
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def answer(op: str, args: dict[str, Any]) -> Any:
    """Do what a test asks for, in the worker."""
    if op == "hang":
        time.sleep(600)
    if op == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if op == "refuse":
        raise Refused("no", "it is not to be")
    if op == "big":
        return "x" * (1 << 20)
    if op == "fds":
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
        return [os.readlink(link) for link in links if os.path.lexists(link)]
    if op == "look":
        loaded = set(sys.modules)
        made = show(args["shard"])["ok"], list_shards(args["folder"])["total"], lengths(args["folder"])["samples"]
        return [*made, sorted(set(sys.modules) - loaded)]
    return os.getpid()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Start one, whose worker is there."""
    monkeypatch.setattr(kept_module, "QUIET_S", 0.0)
    made = Kept(answer)
    made.step(set())
    yield made
    made.close()
    until(lambda: not made.step(set()) and not made._unreaped)


def reply(kept: Kept) -> dict[str, Any]:
    """Return the next reply, as the agent's loop would get it."""
    while True:
        ready = select.select(kept.filenos(), [], [], max(0.0, kept.due() - time.monotonic()))[0]
        for message in kept.step(set(ready)):
            return message


def ask(kept: Kept, op: str, deadline_s: float = 30.0, **args: Any) -> dict[str, Any]:
    until(lambda: kept.ask(7, deadline_s, op, args) or (not kept.step(set()) and False))
    return reply(kept)


def test_one_process_answers_again_and_again(kept: Kept) -> None:
    pids = {ask(kept, "pid")["result"] for _ in range(20)}
    assert len(pids) == 1 and os.getpid() not in pids


def test_it_takes_one_request_at_a_time(kept: Kept) -> None:
    assert kept.ask(1, 30.0, "pid", {}) and not kept.ask(2, 30.0, "pid", {})
    assert reply(kept)["id"] == 1
    assert kept.ask(2, 30.0, "pid", {})
    assert reply(kept)["id"] == 2


def test_what_cannot_be_answered_is_a_refusal_and_the_process_stays(kept: Kept) -> None:
    before = ask(kept, "pid")["result"]
    assert ask(kept, "refuse")["error"]["code"] == "no"
    assert ask(kept, "big")["error"]["code"] == "too-large"
    assert ask(kept, "pid")["result"] == before


@pytest.mark.parametrize(("op", "code"), [("hang", "timeout"), ("die", "failed")])
def test_one_that_hangs_or_dies_is_replaced(kept: Kept, op: str, code: str) -> None:
    before = ask(kept, "pid")["result"]
    assert ask(kept, op, 0.2)["error"]["code"] == code
    assert ask(kept, "pid")["result"] != before


def test_one_that_died_unasked_leaves_the_request_to_others(kept: Kept) -> None:
    pid = ask(kept, "pid")["result"]
    os.kill(pid, signal.SIGKILL)  # the worker of this test
    until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    assert not kept.ask(1, 30.0, "pid", {})
    assert ask(kept, "pid")["result"] != pid


def test_another_takes_its_place_after_many_answers(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_ANSWERS", 3)
    pids = [ask(kept, "pid")["result"] for _ in range(6)]
    assert len(set(pids[:3])) == len(set(pids[3:])) == 1 and pids[0] != pids[3]


def test_it_holds_nothing_that_the_agent_may_close(kept: Kept) -> None:
    assert [name.split(":")[0] for name in ask(kept, "fds")["result"]] == ["socket"]


def test_it_imports_nothing_when_it_is_asked(kept: Kept, tmp_path: Path) -> None:
    shard = auditing.write(tmp_path, 0)
    assert ask(kept, "look", shard=str(shard), folder=str(tmp_path))["result"] == [True, 1, 1, []]
