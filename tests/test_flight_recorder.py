"""The recorder as a process: one a host, outliving the agent, under an old Python, gone when nobody needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ours, procfs
from backend.agent.flight.events import Witness
from backend.agent.flight.place import flight_dir
from backend.agent.runfiles import locked
from backend.virtual import belongings
from backend.virtual.claims import lay_out
from backend.wire import GpuSample, Reading, Refused, Run, Telemetry
from tests.flights import fetched, rows_of
from tests.pythons import python38
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backend.wire.flight import FlightEvent

CHECKOUT = Path(__file__).resolve().parent.parent


class Host:
    """A host with two virtual GPUs in a folder: agents are started on it, and all of it ends with the test."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        lay_out(str(root), 2)
        self.agents: list[subprocess.Popen[bytes]] = []

    def agent(self) -> subprocess.Popen[bytes]:
        """Start an agent and return it."""
        words = [self.python, "-m", "backend.virtual.agent", str(self.root), "agent", "nonce"]
        env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=CHECKOUT)
        self.agents.append(agent)
        return agent

    def ask(self, agent: subprocess.Popen[bytes], op: str, **args: Any) -> Any:
        """Ask an agent and return its answer."""
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps({"id": 1, "op": op, "args": args}).encode() + b"\n")
        agent.stdin.flush()
        while True:
            message = json.loads(agent.stdout.readline())
            if message["t"] == "reply":
                if not message["ok"]:
                    raise Refused(**message["error"])
                return message["result"]

    def close(self) -> None:
        """End every process that was started under the test's HOME."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
            assert agent.stdin is not None and agent.stdout is not None
            agent.stdin.close()
            agent.stdout.close()
        belongings.end(belongings.started_under(Path(os.environ["HOME"])))


def oldest_python() -> str:
    """Return a Python 3.8 where there is one, else this one."""
    try:
        return python38()
    except pytest.skip.Exception:
        return sys.executable


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, oldest_python())
    yield made
    made.close()


def recorder_pid() -> int:
    return int(json.loads((Path(flight_dir()) / "about.json").read_text())["pid"])


def test_the_recorder_outlives_its_agent_and_is_the_only_one(host: Host) -> None:
    agent = host.agent()
    assert host.ask(agent, "flight.info")["recording"] is False
    host.ask(agent, "runs.start", spec={"id": "r1", "stage": "test", "argv": ["sh", "-c", "echo one; exec sleep 60"]})
    until(lambda: any("run.r1.log_bytes" in values for _, values in rows_of(fetched(1))))
    first = recorder_pid()
    agent.kill()
    before = len(rows_of(fetched(1)))
    until(lambda: len(rows_of(fetched(1))) > before)  # nobody is connected
    assert subprocess.run([*agent.args[:4], "record"], env=os.environ, cwd=CHECKOUT, timeout=20).returncode == 0
    assert recorder_pid() == first and locked(flight_dir())

    os.kill(first, signal.SIGKILL)
    until(lambda: not locked(flight_dir()))
    again = host.agent()
    assert host.ask(again, "flight.start")["levels"][0]["step_s"] == 1
    until(lambda: locked(flight_dir()) and recorder_pid() != first)
    count = len(rows_of(fetched(1)))
    until(lambda: len(rows_of(fetched(1))) > count)
    host.ask(again, "runs.stop", id="r1")
    ended = until(lambda: [e for e in host.ask(again, "flight.events")["events"] if "exited" in e["text"]])
    assert (ended[0]["run"], ended[0]["kind"], ended[0]["level"]) == ("r1", "run", "bad")
    times = [at for at, _ in rows_of(fetched(1))]
    assert times == sorted(set(times))
    # The slow readings come seconds after a start, and a row has what is there.
    until(lambda: any(values.get("gpu1.fan_percent") == "unsupported" for _, values in rows_of(fetched(1))))
    until(lambda: rows_of(fetched(1))[-1][1].get("gpu1.power_w") == 75)


def test_it_leaves_when_nobody_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "from backend.agent.flight import recorder; recorder.LINGER_S = 0.5; recorder.LOOK_EVERY_S = 0.1;"
        f"from backend.virtual.agent import main; raise SystemExit(main([{str(tmp_path)!r}, 'record']))"
    )
    lay_out(str(tmp_path), 1)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    mark = ours.register("agent")
    recorder = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: len(rows_of(fetched(1))) >= 2)
        assert recorder.poll() is None, "an agent lives: somebody may look"
        assert (recorder.pid, procfs.stat(recorder.pid).start_ticks) in ours.ours()  # type: ignore[union-attr]
        ours.forget(mark)
        assert recorder.wait(20) == 0
    finally:
        recorder.kill()
        recorder.wait()
    assert not locked(flight_dir())


def telemetry(problem: str = "", errors: int = 0) -> Telemetry:
    return Telemetry(1, 1.0, [GpuSample(0, {"ecc_uncorrected": Reading(errors)}, problem=problem)])


def test_what_happens_is_told_once() -> None:
    told: list[FlightEvent] = []
    witness = Witness(told.append, since=100.0)
    for problem in ("", "GPU is lost", "GPU is lost", ""):
        witness.telemetry(telemetry(problem))
    witness.telemetry(telemetry(errors=2))
    witness.telemetry(telemetry(errors=2))
    witness.run(Run("old", "serve", "exited", exit_code=0, started_at=10, ended_at=90))
    witness.run(Run("away", "audit", "failed", reason="no such file", started_at=10, ended_at=190))
    for state in ("running", "running", "stopping"):
        witness.run(Run("new", "extract", state, started_at=150))
    witness.run(Run("new", "extract", "exited", exit_code=-9, started_at=150, ended_at=170))
    for word, text in (("CLEAN", "8 of 8 CLEAN"), ("NOT CLEAN", "GPU 3 is not clean")):
        witness.reset("reset-1", [{"kind": "verdict", "text": text, "data": {"verdict": word}}])
    assert [(event.kind, event.level, event.text) for event in told] == [
        ("gpu", "bad", "GPU 0: GPU is lost"),
        ("gpu", "info", "GPU 0: answers again"),
        ("gpu", "bad", "GPU 0: 2 new uncorrected memory errors"),
        ("run", "bad", "audit failed: no such file (away)"),
        ("run", "info", "extract running (new)"),
        ("run", "info", "extract stopping (new)"),
        ("run", "bad", "extract exited with -9 (new)"),
        ("reset", "info", "reset: 8 of 8 CLEAN"),
        ("reset", "bad", "reset: GPU 3 is not clean"),
    ]
