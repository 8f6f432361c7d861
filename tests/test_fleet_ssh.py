"""The Fleet over a real OpenSSH server: what runs on the host outlives everything between it and the console."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from backend.config import Config, Host, Stage
from backend.fleet import Fleet, LinkState
from tests.nvml.double import NvmlDouble
from tests.sshd import Sshd, needs_sshd
from tests.sshd import sshd as sshd_fixture
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = needs_sshd
sshd = sshd_fixture


@pytest.fixture
def server(tmp_path: Path, home: Path, sshd: Callable[..., Sshd]) -> Iterator[Sshd]:
    """Start a hardened server whose host has two GPUs of the NVML double."""
    with NvmlDouble(gpus=2, tmp_path=tmp_path) as nvml:
        server = sshd("MaxSessions 1\nAllowTcpForwarding no", environment=nvml.env)
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text(server.config("gpu-01"))
        (home / ".ssh" / "known_hosts").write_text(server.known_hosts_line())
        yield server


def config(*command: str) -> Config:
    return Config(
        hosts={"gpu-01": Host(address="gpu-01", python=sys.executable)},
        stages={"stage": Stage(command=["/bin/sh", "-c", *command])},
    )


def test_telemetry_and_every_action_share_one_session(server: Sshd) -> None:
    with Fleet(config("exit 0")) as fleet:
        host = fleet.ready("gpu-01", 30).result()
        assert host.gpu_indices == [0, 1]
        run = fleet.launch("gpu-01", "stage").result()
        assert fleet.run_ended("gpu-01", run.id, 20).result().exit_code == 0
        assert fleet.verify("gpu-01").result().after
        assert fleet.list_shards("gpu-01", str(server.home)).result()["entries"]


def test_a_run_outlives_the_kill_of_sshd_and_agent_and_its_exit_status_comes_back(server: Sshd, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Fleet(config(f"echo began; read line < {gate}; exit 5")) as fleet:
        host = fleet.ready("gpu-01", 30).result()
        run = fleet.launch("gpu-01", "stage").result()
        until(lambda: host.runs[run.id].state == "running")
        assert host.hello is not None
        agent = host.hello.agent_pid
        os.kill(agent, signal.SIGKILL)  # the agent of this test's own server
        server.signal_connections(signal.SIGKILL)
        until(
            lambda: host.hello is not None and host.hello.agent_pid != agent and host.link.state is LinkState.LIVE, 30
        )
        until(lambda: host.runs[run.id].state == "running")
        assert any(event.level == "bad" and "lost" in event.text for event in host.events)
        gate.write_text("go\n")
        ended = fleet.run_ended("gpu-01", run.id, 20).result()
    assert (ended.state, ended.exit_code) == ("exited", 5)


def test_a_console_that_comes_later_finds_the_run_and_its_end(server: Sshd, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Fleet(config(f"read line < {gate}; echo done; exit 6")) as fleet:
        fleet.ready("gpu-01", 30).result()
        run = fleet.launch("gpu-01", "stage").result()
    with Fleet(config("true")) as fleet:
        host = fleet.ready("gpu-01", 30).result()
        until(lambda: run.id in host.runs)
        assert host.runs[run.id].state == "running"
        gate.write_text("go\n")
        assert fleet.run_ended("gpu-01", run.id, 20).result().exit_code == 6
        assert fleet.log("gpu-01", run.id).result()["text"].strip() == "done"
