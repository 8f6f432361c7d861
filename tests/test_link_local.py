"""A link to this machine: start, stream, request, end; and a program that misbehaves."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from backend.link import LinkLost, LinkState, pack_agent, pack_files, retry
from backend.link import link as link_module
from backend.wire import MAX_LINE_BYTES, Refused, WireError
from tests.fakeagent import Operator, eventually, fake_archive, here

NO_JSON = "a line that is no message: not JSON: Expecting value: line 1 column 1 (char 0)"


def raw(data: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode()}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_an_agent_starts_answers_and_is_gone_after_the_link(home: Path) -> None:
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        assert operator.states == [LinkState.CONNECTING, LinkState.BOOTSTRAPPING, LinkState.LIVE]
        assert operator.link.status.settings_from == "this machine"
        assert operator.messages[0]["t"] == "hello"
        assert operator.messages[0]["hello"]["at"].startswith(str(home / ".cache" / "eightzeros" / "fake-"))
        assert await operator.link.request("echo", {"a": [1, "ü"]}) == {"a": [1, "ü"]}
        pid = operator.agent_pid
    assert gone(pid)
    assert operator.link.status.state is LinkState.IDLE


async def test_the_real_agent_streams_telemetry_and_takes_an_archive(home: Path) -> None:
    operator = Operator(here(), pack_agent())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        await eventually(lambda: len(operator.said("telemetry")) >= 2)
        assert await operator.link.request("runs.list") == []
        with pytest.raises(Refused) as refusal:
            await operator.link.request("runs.get", {"id": "nobody"})
        assert refusal.value.code == "not-found"
        archive = pack_files("probe", {"__main__.py": b"print(6 * 7)\n", "blob.bin": os.urandom(300_000)})
        folder = await operator.link.ship(archive)
        assert await operator.link.ship(archive) == folder
        assert Path(folder, "__main__.py").read_bytes() == b"print(6 * 7)\n"
        pid = operator.agent_pid
    assert gone(pid)


async def test_an_agent_that_hangs_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.link.channel.LEAVE_S", 0.2)
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        pid = operator.agent_pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="did not answer `echo`"):
            await operator.link.request("echo", timeout_s=0.1)
    assert gone(pid)


async def test_requests_without_a_live_link_say_so() -> None:
    operator = Operator(here())
    with pytest.raises(LinkLost, match="not connected"):
        await operator.link.request("echo")
    with pytest.raises(LinkLost, match="not connected"):
        await operator.link.request_once("effect", {}, find=("find", {}), timeout_s=1)


async def test_a_request_in_flight_fails_when_the_agent_ends_and_the_link_returns() -> None:
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        first = operator.agent_pid
        with pytest.raises(LinkLost):
            await operator.link.request("die", {"words": "Traceback\nMemoryError: \x1b[31mno memory\n"})
        await eventually(lambda: LinkState.LOST in operator.states)
        lost = next(status for status in operator.statuses if status.state is LinkState.LOST)
        assert lost.code == "ended"
        assert "MemoryError: no memory" in lost.reason
        assert lost.retry_in_s is not None
        assert lost.retry_in_s <= 1.0
        await operator.reaches(LinkState.LIVE)
        assert operator.agent_pid != first


async def test_a_refusal_carries_code_and_hint() -> None:
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        with pytest.raises(Refused) as refusal:
            await operator.link.request("unheard-of")
        assert (refusal.value.code, refusal.value.hint) == ("no-op", "none")
        with pytest.raises(WireError, match="over the limit"):
            await operator.link.request("echo", {"a": "x" * MAX_LINE_BYTES})
        assert await operator.link.request("echo", {"a": 1}) == {"a": 1}


async def test_bad_lines_are_counted_and_noted_and_nothing_ends() -> None:
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        await operator.link.request("raw", raw(b"no json\n\xff\xfe\n[1]\n"))
        await operator.link.request("raw", {**raw(b"x" * 1000), "times": MAX_LINE_BYTES // 1000 + 2000})
        await operator.link.request("raw", raw(b'{"no": "kind"}'))
        assert await operator.link.request("echo", {"after": 1}) == {"after": 1}
        assert [note["text"] for note in operator.said("note")] == [NO_JSON]
        assert {"no": "kind"} in operator.messages
        assert operator.link.malformed == 3
        assert operator.link.status.state is LinkState.LIVE


async def test_a_listener_that_fails_does_not_end_the_link() -> None:
    operator = Operator(here())
    notes: list[dict[str, Any]] = []

    def listener(message: dict[str, Any]) -> None:
        if message.get("t") == "odd":
            raise ValueError("cannot read this")
        notes.append(message)

    operator.link._on_message = listener
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        await operator.link.request("raw", raw(b'{"t": "odd"}'))
        assert await operator.link.request("echo", {"a": 1}) == {"a": 1}
        assert any("`odd` was not understood: cannot read this" in note.get("text", "") for note in notes)


async def test_telemetry_that_stays_away_makes_the_link_stale_and_its_return_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "STALE_S", 0.4)
    monkeypatch.setattr(link_module, "WATCH_S", 0.02)
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        tick = raw(json.dumps({"t": "telemetry", "telemetry": {}}).encode())
        await operator.link.request("raw", tick)
        await operator.reaches(LinkState.STALE)
        await operator.link.request("raw", raw(b'{"t": "note", "level": "info", "text": "here"}'))
        assert operator.link.status.state is LinkState.STALE
        assert await operator.link.request("echo", {"a": 1}) == {"a": 1}, "a stale host is still asked"
        await operator.link.request("raw", tick)
        await operator.reaches(LinkState.LIVE)
    assert LinkState.LOST not in operator.states


async def test_an_agent_that_falls_silent_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENT_S", 0.5)
    monkeypatch.setattr(link_module, "WATCH_S", 0.02)
    monkeypatch.setattr("backend.link.channel.LEAVE_S", 0.1)
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        first = operator.agent_pid
        os.kill(first, signal.SIGSTOP)
        await eventually(lambda: any(status.code == "silent" for status in operator.statuses))
        await eventually(lambda: operator.agent_pid != first)
        assert gone(first)


async def test_a_connection_that_did_not_survive_a_sleep_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"ahead": 0.0}
    monkeypatch.setattr(retry, "wall", lambda: retry.monotonic() + clock["ahead"])
    monkeypatch.setattr(link_module, "WOKEN_S", 0.2)
    monkeypatch.setattr(link_module, "WATCH_S", 0.02)
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        first = operator.agent_pid
        clock["ahead"] = 600.0
        await eventually(lambda: any("sleep of this machine" in status.reason for status in operator.statuses))
        await eventually(lambda: operator.agent_pid != first)


async def test_a_fault_of_ours_is_shown_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [ZeroDivisionError("oops")]
    right = link_module.start

    async def start(*words: Any) -> dict[str, Any]:
        if faults:
            raise faults.pop()
        return await right(*words)

    monkeypatch.setattr(link_module, "start", start)
    operator = Operator(here())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
    assert [status.reason for status in operator.statuses if status.state is LinkState.LOST] == [
        "a fault of eightzeros: ZeroDivisionError: oops"
    ]


async def test_a_change_whose_answer_is_lost_happens_once(tmp_path: Path) -> None:
    operator = Operator(here())
    effects = tmp_path / "effects"
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        args = {"path": str(effects), "id": "run-1"}
        once = {"find": ("find", args), "timeout_s": 20.0}
        assert (await operator.link.request_once("effect", args, **once))["by"] == "effect"
        fatal = dict(args, id="run-0", die=True)
        assert (await operator.link.request_once("effect", fatal, find=("find", fatal)))["by"] == "find"
        # The agent hangs, so that the next request stays in its pipe, unread; then it dies.
        hanging = asyncio.create_task(operator.link.request("hang"))
        second = dict(args, id="run-2")
        asked = asyncio.create_task(operator.link.request_once("effect", second, find=("find", second)))
        await asyncio.sleep(0)
        os.kill(operator.agent_pid, signal.SIGKILL)
        assert (await asked)["by"] == "effect", "the host did not know it, so it was sent again"
        with pytest.raises(LinkLost):
            await hanging
    assert effects.read_text().split() == ["run-1", "run-0", "run-2"]


@pytest.mark.parametrize(("python", "code"), [("/nonexistent/python3", "no-python"), ("/etc/passwd", "no-python")])
async def test_a_missing_python_waits_for_the_operator(python: str, code: str) -> None:
    operator = Operator(here(python=python))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert status.code == code
        assert python in status.reason
        assert "python =" in status.hint
        assert status.retry_in_s is None


async def test_an_old_python_is_named_and_retry_tries_again(tmp_path: Path) -> None:
    script = tmp_path / "old python3"
    script.write_text(
        f'#!/bin/sh\nshift 4\nexec {sys.executable} -c \'import sys;sys.version_info=(3,6,8,"final",0);'
        'sys.version="3.6.8 (default)";exec(sys.argv.pop(1))\' "$@"\n'
    )
    script.chmod(0o755)
    operator = Operator(here(python=str(script)))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert status.code == "old-python"
        assert "3.6.8" in status.reason
        script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        operator.link.retry()
        await operator.reaches(LinkState.LIVE)


async def test_an_agent_that_crashes_at_its_start_shows_its_last_words() -> None:
    crash = b"import sys\nsys.stderr.write('x\\n' * 50)\nraise RuntimeError('the \\x1b]0;title\\x07 driver')"
    operator = Operator(here(), fake_archive("crash", crash))
    async with operator.watching():
        status = await operator.reaches(LinkState.LOST)
        assert status.code == "agent-crashed"
        assert "status 1" in status.reason
        assert "RuntimeError: the" in status.reason
        assert "\x1b" not in status.reason


async def test_something_that_is_not_our_agent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.link.start.ANSWER_S", 0.3)
    monkeypatch.setattr("backend.link.channel.LEAVE_S", 0.1)
    mute = b'import time\nprint(\'{"t": "hello", "hello": {"nonce": "guess"}}\', flush=True)\ntime.sleep(60)\n'
    operator = Operator(here(), fake_archive("mute", mute))
    async with operator.watching():
        status = await operator.reaches(LinkState.LOST)
        assert status.code == "no-agent"
        assert operator.messages == []
