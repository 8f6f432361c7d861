"""The agent as a program: lines in, lines out, and nothing that a request does ends it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import select
import subprocess
import sys
import time
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.workers import Workers
from backend.wire import MAX_LINE_BYTES, Refused
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Agent:
    """A running agent and its lines."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "backend.agent.main", "agent", "a-nonce"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._read = b""
        self.hello = self.next("hello")["hello"]

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def next(self, kind: str, number: int | None = None) -> dict[str, Any]:
        """Return the next message of a kind; other messages are passed over."""
        assert self.process.stdout is not None
        end = time.monotonic() + 30
        while True:
            while b"\n" not in self._read:
                assert select.select([self.process.stdout], [], [], end - time.monotonic())[0], f"no {kind} came"
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"the agent ended before a {kind}"
                self._read += data
            line, self._read = self._read.split(b"\n", 1)
            message: dict[str, Any] = json.loads(line)
            if message["t"] == kind and number in (None, message.get("id")):
                return message

    def ask(self, op: str, **args: Any) -> Any:
        """Ask, and return the result or raise what was refused."""
        number = time.monotonic_ns()
        self.write(json.dumps({"id": number, "op": op, "args": args}).encode() + b"\n")
        answer = self.next("reply", number)
        if not answer["ok"]:
            raise Refused(**answer["error"])
        return answer["result"]


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    assert agent.process.stdin is not None and agent.process.stdout is not None and agent.process.stderr is not None
    agent.process.stdin.close()
    assert agent.process.wait(20) == 0, agent.process.stderr.read()
    agent.process.stdout.close()
    agent.process.stderr.close()


def test_the_first_line_is_a_hello_with_the_nonce_and_the_host(agent: Agent) -> None:
    assert agent.hello["nonce"] == "a-nonce"
    assert agent.hello["uid"] == os.getuid()
    assert agent.hello["agent_pid"] == agent.process.pid
    assert agent.hello["virtual"] is False


def test_an_operation_that_does_not_exist_is_named(agent: Agent) -> None:
    with pytest.raises(Refused, match="shell.run"):
        agent.ask("shell.run", command="true")


@pytest.mark.parametrize("line", [b"not json\n", b"[1,2]\n", b"\xff\xfe\n", b'{"id":' + b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_request_is_noted_and_the_next_is_served(agent: Agent, line: bytes) -> None:
    agent.write(line)
    assert "could not be read" in agent.next("note")["text"]
    assert agent.ask("runs.list") == []


def test_a_line_without_end_is_left_out_and_the_next_is_served(agent: Agent) -> None:
    agent.write(b"x" * (MAX_LINE_BYTES + 70_000) + b"\n")
    assert "too long" in agent.next("note")["text"]
    assert agent.ask("runs.list") == []


def test_arguments_of_the_wrong_kind_are_named(agent: Agent) -> None:
    with pytest.raises(Refused, match="`id` must be str, not 7"):
        agent.ask("runs.get", id=7)


def test_paths_outside_the_roots_are_refused_even_through_a_link(agent: Agent, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "way-out").symlink_to(outside)
    assert agent.ask("shards.list", path=str(inside), roots=[str(inside)])["entries"]
    for path in (outside, inside / "way-out", inside / ".." / "out"):
        with pytest.raises(Refused) as refused:
            agent.ask("shards.list", path=str(path), roots=[str(inside)])
        assert refused.value.code == "outside-roots"
    with pytest.raises(Refused, match="no absolute path"):
        agent.ask("shards.list", path="relative")


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return buffer.getvalue()


def put(agent: Agent, data: bytes, sha256: str, offset: int, piece: bytes) -> Any:
    text = base64.b64encode(piece).decode()
    return agent.ask("archive.put", name="extractor", sha256=sha256, size=len(data), offset=offset, data=text)


def test_an_archive_arrives_in_pieces_and_is_whole_or_absent(agent: Agent) -> None:
    data = archive(program="print(1)")
    sha256 = hashlib.sha256(data).hexdigest()
    assert agent.ask("archive.have", name="extractor", sha256=sha256) is None
    assert put(agent, data, sha256, 0, data[:50]) is None
    with pytest.raises(Refused, match="expected the piece at 50"):
        put(agent, data, sha256, 60, data[60:])
    where = put(agent, data, sha256, 50, data[50:])["path"]
    assert agent.ask("archive.have", name="extractor", sha256=sha256) == {"path": where}
    with open(os.path.join(where, "program")) as file:
        assert file.read() == "print(1)"


def test_a_damaged_archive_is_refused_and_can_be_sent_again(agent: Agent) -> None:
    data = archive(program="print(2)")
    sha256 = hashlib.sha256(data).hexdigest()
    with pytest.raises(Refused, match="damaged"):
        put(agent, data, sha256, 0, b"x" * len(data))
    assert put(agent, data, sha256, 0, data)["path"]
    with pytest.raises(Refused, match="no archive is called"):
        agent.ask("archive.have", name="../../etc", sha256=sha256)


def collect(workers: Workers, count: int) -> list[dict[str, Any]]:
    """Step until so many replies came."""
    replies: list[dict[str, Any]] = []

    def enough() -> bool:
        ready = select.select(workers.filenos(), [], [], 0.05)[0]
        replies.extend(workers.step(set(ready)))
        return len(replies) >= count

    until(enough, 20)
    return replies


def test_work_that_blocks_is_given_up_at_its_deadline_and_other_work_goes_on() -> None:
    workers = Workers()
    workers.start(1, 0.3, lambda: time.sleep(600))
    workers.start(2, 30.0, lambda: {"big": "x" * 200_000})
    first, second = sorted(collect(workers, 2), key=lambda reply: reply["id"])
    assert (first["ok"], first["error"]["code"]) == (False, "timeout")
    assert len(second["result"]["big"]) == 200_000
    workers.close()
    assert workers.filenos() == []


def test_work_that_dies_or_answers_too_much_is_a_refusal() -> None:
    workers = Workers()
    workers.start(1, 30.0, lambda: os._exit(1))
    workers.start(2, 30.0, lambda: "x" * (2 * MAX_LINE_BYTES))
    workers.start(3, 30.0, lambda: 1 // 0)
    codes = {reply["id"]: reply["error"]["code"] for reply in collect(workers, 3)}
    assert codes == {1: "failed", 2: "too-large", 3: "failed"}
    workers.close()


def test_more_work_than_runs_at_once_waits_its_turn() -> None:
    workers = Workers()
    for number in range(20):
        workers.start(number, 30.0, lambda number=number: number)
    assert sorted(reply["result"] for reply in collect(workers, 20)) == list(range(20))
    workers.close()
