"""The launcher of a serve stage, as a real process: what it checks, when a server is ready, and why one is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs, serverlook
from tests.serving import FAKE, PROGRAM, Served, a_model
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def test_ready_means_that_it_answers_and_captures_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    left = tmp_path / "staging" / "old"
    left.mkdir(parents=True)
    (left / ".server.json").write_text('{"pid": 1, "start": 1, "boot": "another"}')
    foreign = tmp_path / "staging" / "foreign"
    foreign.mkdir()
    with closing(Served(tmp_path, a_model(tmp_path / "m"), "--", "--trust-remote-code")) as served:
        said = served.until("ready")
        assert f"http://127.0.0.1:{served.port}: points 2 16 29 on 1 ranks" in said["message"]
        assert not left.exists() and foreign.exists()  # what a dead server left is cleared, nothing else
        gate = serverlook.check(f"http://127.0.0.1:{served.port}")
        assert gate.ok is True and "capture points 2 16 29" in gate.detail
        hook = served.root / "serve-1" / "python" / "eightzeros_capture"
        assert (hook / "hook.py").exists()
        assert f"PYTHONPATH={hook.parent}{os.pathsep}" in served.text and "BLAS=unset" in served.text
        words = served.text.split("starting ", 1)[1].split("\n")[0]
        assert "--host 127.0.0.1" in words and words.endswith("--trust-remote-code")
        assert "--speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids 1 15 28" in words
        helper = served.helper()
        served.process.send_signal(signal.SIGTERM)
        assert served.ended() == 0
        assert served.progress["state"] == "done"
        until(lambda: procfs.stat(helper) is None)  # although it was in a session of its own
        assert not (served.root / "serve-1").exists()


@pytest.mark.parametrize(
    ("mode", "code", "words", "line"),
    [
        ("oom", 1, "GPU 3 ran out of memory: 224.00 MiB asked for, 12.50 MiB of 139.81 GiB free", "torch.OutOfMemory"),
        ("compiler", 1, "a kernel could not be compiled", "'ninja'"),
        ("silent", 1, "its log names no cause", "Load weight begin"),
    ],
)
def test_why_it_did_not_start(tmp_path: Path, mode: str, code: int, words: str, line: str) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"), mode=mode)) as served:
        assert served.ended() == code
        assert served.progress["state"] == "failed"
        assert words in served.progress["message"] and line in served.progress["message"]
        assert "eightzeros: the server did not start: " in served.text and words in served.text
        assert "address already in use" not in served.progress["message"]  # that was an earlier start's


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("wrong-layers", "captures the points [3, 17, 30], not [2, 16, 29]"),
        ("no-hook", "the capture hook was never made"),
    ],
)
def test_a_server_that_captures_something_else_is_never_ready(tmp_path: Path, mode: str, words: str) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"), "--hook-s", "1", mode=mode)) as served:
        assert served.ended() != 0
        assert words in served.progress["message"]


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        (["--points", "2,16,33"], {}, "with 32 layers a capture point is 0 (the embeddings) to 32"),
        (["--", "--no-such-flag"], {}, "SGLang 0.5.23 has no --no-such-flag"),
        ([], {"architectures": ["BertModel"]}, "code of BertModel cannot capture layers"),
        ([], {"architectures": []}, "`architectures` names none"),
        (["--model", "/no/such/model"], {}, "/no/such/model has no config.json"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_started(
    tmp_path: Path, more: list[str], changes: dict[str, object], words: str
) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m", **changes), *more)) as served:
        assert served.ended() == 2
        assert words in served.progress["message"]
        assert "server_args" not in served.text


def test_a_python_without_sglang_says_so(tmp_path: Path) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"), sglang=tmp_path)) as served:
        assert served.ended() == 2
        assert f"{sys.executable} has no sglang" in served.progress["message"]


def test_a_taken_port_names_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with closing(Served(tmp_path, a_model(tmp_path / "m"), "--port", port)) as served:
            assert served.ended() == 2
            assert f"port {port} is taken by pid {os.getpid()}" in served.progress["message"]


def test_a_server_that_is_never_ready_is_ended_at_its_deadline(tmp_path: Path) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"), "--ready-timeout-s", "1", mode="slow")) as served:
        assert served.ended() == 128 + signal.SIGTERM
        assert "not ready within 1 s" in served.progress["message"]


def test_a_server_that_ignores_the_request_is_killed_after_its_grace(tmp_path: Path) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"), "--grace-s", "0.5", mode="stubborn")) as served:
        served.until("ready")
        helper = served.helper()
        served.process.send_signal(signal.SIGTERM)
        assert served.ended() == 0
        until(lambda: procfs.stat(helper) is None)


def test_a_server_that_was_killed_from_outside_says_so_and_ends_alike(tmp_path: Path) -> None:
    with closing(Served(tmp_path, a_model(tmp_path / "m"))) as served:
        served.until("ready")
        (pid,) = _children(served.process.pid)
        os.kill(pid, signal.SIGKILL)
        assert served.ended() == 128 + signal.SIGKILL
        assert "killed from outside" in served.progress["message"]


def test_by_hand_the_log_is_passed_on_to_a_pipe(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    words = ["serve", "--model", str(model), "--points", "2,16,29", "--staging-root", str(tmp_path / "s")]
    environment = {**os.environ, "FAKE_MODE": "oom", "PYTHONPATH": str(FAKE)}
    argv = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert "server_args=" in done.stdout and "GPU 3 ran out of memory" in done.stdout


def _children(pid: int) -> list[int]:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found = [stat.pid for stat in map(procfs.stat, procfs.pids()) if stat is not None and stat.ppid == pid]
        if found:
            return found
    return []
