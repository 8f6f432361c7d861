"""The whole chain on the virtual host, unattended: a fault in each stage stops it there, with the true reason."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.agent import runtree
from backend.config import Config, Stage
from backend.fleet import Fleet
from backend.shardfmt import layout
from backend.virtual.host import NAME, VirtualHost, serving_words
from backend.wire import Pipeline, RunSpec
from tests.chaining import CHECKOUT, PYTHON
from tests.waiting import until

CONSOLE = """
import sys, time
from pathlib import Path
import msgspec
from backend.config import Config
from backend.fleet import Fleet
from backend.link import pack_agent
from backend.virtual.host import NAME, SHIPPED
config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
with Fleet(config, archives=lambda _: pack_agent("backend.virtual.agent", SHIPPED, [sys.argv[2]])) as fleet:
    fleet.ready(NAME, 60).result()
    chain = sys.argv[3] or fleet.run_chain(NAME).result(60).id
    while True:
        print(msgspec.json.encode(fleet.chain(NAME, chain).result(60)).decode(), flush=True)
        time.sleep(0.1)
"""


def stages(host: VirtualHost, flags: Path) -> dict[str, Stage]:
    """Return the chain of the design. A file in `flags` named as the stage makes server or training fail."""
    python, corpus, out = sys.executable, host.data / "corpus", str(host.out)

    def unless(name: str, said: str, status: int, words: str) -> list[str]:
        return ["sh", "-c", f"if [ -e {flags}/{name} ]; then echo {said!r}; exit {status}; fi; {words}"]

    trained = f"sleep 1; echo > {host.data}/model"
    serve = "exec " + " ".join(f"'{word}'" for word in serving_words(host.root))
    return {
        "prepare": Stage(kind="prepare", python=python, datasets=[str(host.data / "chat.jsonl")], out=str(corpus),
                         arguments=["--vocab-size", "4096"]),
        "serve": Stage(command=unless("serve", "NCCL error: unhandled system error", 3, serve), service=True,
                       needs=["clean-gpus"], env=PYTHON),
        "extract": Stage(kind="extract", python=python, corpus=str(corpus / "corpus.jsonl"), out=out),
        "audit": Stage(kind="audit", folder=out, deep=True),
        "train": Stage(kind="train", command=unless("train", "loss is nan at step 12", 7, trained),
                       data=out, outputs=[str(host.data / "model")]),
    }  # fmt: skip


class Watched:
    """The chain of one virtual host, driven as a console does, and looked at in the host's own files."""

    def __init__(self, host: VirtualHost, fleet: Fleet) -> None:
        self.host, self.fleet = host, fleet
        self.runs = host.home / ".local" / "state" / "eightzeros" / "runs"

    def start(self, step: str = "") -> str:
        """Start the chain and return its id."""
        return str(self.fleet.run_chain(NAME, step).result(60).id)

    def ended(self, chain_id: str) -> Pipeline:
        """Wait for the end of a chain and return what the host says of it."""
        self.fleet.run_ended(NAME, chain_id, 90).result()
        return self.fleet.chain(NAME, chain_id).result(60)

    def launched(self, stage: str) -> dict[str, Any]:
        """Wait for a run of a stage that has not ended, and return its record."""

        def found() -> dict[str, Any]:
            for folder in self.runs.glob(f"{stage}-*"):
                if (folder / "run.json").exists() and not (folder / "exit.json").exists():
                    return dict(json.loads((folder / "run.json").read_text()), folder=str(folder))
            return {}

        return until(found, 60)

    def kill(self, run: dict[str, Any]) -> None:
        """Kill the main process of a run."""
        assert runtree.signal_process(run["pid"], run["pid_start"], signal.SIGKILL)

    def must_stop(self, chain_id: str, state: str, step: str, reason: str) -> None:
        """See that a chain stopped where it should, for the true reason."""
        ended = self.ended(chain_id)
        at = next(one for one in ended.steps if one.name == step)
        assert (ended.state, ended.go_on, at.state) == (state, step, state), ended
        assert reason in ended.reason, ended


@pytest.mark.slow
def test_a_fault_in_each_stage_stops_the_chain_there_and_from_there_it_is_finished(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.mkdir()
    with VirtualHost(tmp_path / "host", 120, 30_000) as host:
        config: Config = msgspec.structs.replace(host.config(), stages=stages(host, flags))
        with Fleet(config, archives=host.archive) as fleet:
            fleet.ready(NAME, 60).result()
            watched = Watched(host, fleet)
            _preparation_and_reset(watched)
            _server_and_extraction(watched, flags)
            _audit_and_training(watched, flags)


def _preparation_and_reset(watched: Watched) -> None:
    dataset = watched.host.data / "chat.jsonl"
    watched.must_stop(watched.start(), "refused", "prepare", f"path {dataset}: No such file or directory")
    dataset.write_text('{"input_ids": [1, 99999]}\n')
    watched.must_stop(watched.start("prepare"), "failed", "prepare", "records that cannot be used: 1")
    dataset.write_bytes(watched.host.corpus.read_bytes())
    chain = watched.start("prepare")
    reset = watched.launched("reset")
    journal = Path(reset["folder"]) / "journal.jsonl"
    until(lambda: journal.exists() and b'"signal"' in journal.read_bytes(), 30)
    watched.kill(reset)
    watched.must_stop(chain, "failed", "reset", "ended by SIGKILL")
    assert "UNKNOWN" in watched.ended(chain).reason


def _server_and_extraction(watched: Watched, flags: Path) -> None:
    (flags / "serve").touch()
    watched.must_stop(watched.start("reset"), "failed", "serve", "exit status 3: NCCL error: unhandled system error")
    (flags / "serve").unlink()
    chain = watched.start("serve")
    journal = watched.host.out / layout.JOURNAL_NAME
    until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 10, 60)
    watched.kill(watched.launched("extract"))
    watched.must_stop(chain, "failed", "extract", "ended by SIGKILL")
    spoilt = watched.host.out / json.loads(journal.read_bytes().split(b"\n")[3])["file"]
    data = bytearray(spoilt.read_bytes())
    data[len(data) // 2] ^= 0xFF
    spoilt.write_bytes(data)
    watched.must_stop(watched.start("extract"), "failed", "audit", "crc")
    spoilt.unlink()


def _audit_and_training(watched: Watched, flags: Path) -> None:
    host, fleet = watched.host, watched.fleet
    words = [sys.executable, "-m", "backend.virtual.holder", "--root", str(host.root), "--gpus", "0", "--gib", "9"]
    theirs = fleet.start_run(NAME, RunSpec("somebody-1", "theirs", words, env=PYTHON)).result(60)
    cast = host.root / "cast"
    until(lambda: any(f'"pid": {theirs.pid},' in path.read_text() for path in cast.iterdir() if path.name[0] != "."))
    watched.must_stop(watched.start("extract"), "refused", "reset:2", "it would end run somebody-1 (theirs)")
    assert fleet.hosts[NAME].runs["somebody-1"].state == "running"
    fleet.stop_run(NAME, "somebody-1").result(60)
    (flags / "train").touch()
    watched.must_stop(watched.start("reset:2"), "failed", "train", "exit status 7: loss is nan at step 12")
    (flags / "train").unlink()
    ended = watched.ended(watched.start("train"))
    assert (ended.state, ended.go_on) == ("done", ""), ended
    assert (host.data / "model").exists()


class Consoles:
    """Consoles of their own processes, one after the other: the first starts the chain, the others look at it."""

    def __init__(self, config: Path, root: Path) -> None:
        self._words = [sys.executable, "-c", CONSOLE, str(config), str(root)]
        self._process: subprocess.Popen[bytes] | None = None
        self.chain = ""

    def open(self) -> Pipeline:
        """Start one and return what it says first."""
        self._process = subprocess.Popen([*self._words, self.chain], cwd=CHECKOUT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        said = msgspec.json.decode(self._process.stdout.readline(), type=Pipeline)
        self.chain = said.id
        return said

    def see(self, step: str) -> Pipeline | None:
        """Return what a new one says, once the chain has noted the run of a step: it starts that a moment before."""
        self.kill()
        said = self.open()
        return said if any(one.name == step and one.run_id for one in said.steps) else None

    def kill(self) -> None:
        """Kill it without a goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.mark.slow
def test_consoles_that_are_killed_and_connections_that_are_cut_in_each_stage_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with VirtualHost(tmp_path / "host", 24, 3_000) as host, contextlib.ExitStack() as stack:
        config: Config = msgspec.structs.replace(host.config(), stages=stages(host, tmp_path / "flags"))
        (host.data / "chat.jsonl").write_bytes(host.corpus.read_bytes())
        path.write_bytes(msgspec.json.encode(config))
        watched, consoles = Watched(host, Fleet(config, archives=host.archive)), Consoles(path, host.root)
        stack.callback(consoles.kill)
        consoles.open()
        for step in ("prepare", "reset", "serve", "extract", "audit", "reset:2", "train"):
            run = watched.launched(step.partition(":")[0])
            assert runtree.signal_process(run["pid"], run["pid_start"], signal.SIGSTOP)
            consoles.kill()
            host.drop_connections()
            said = until(lambda step=step: consoles.see(step), 60)
            at = next(one for one in said.steps if one.name == step)
            assert (said.state, at.state, at.run_id) == ("running", "running", run["id"]), said
            assert runtree.signal_process(run["pid"], run["pid_start"], signal.SIGCONT)
        with watched.fleet as fleet:
            fleet.ready(NAME, 60).result()
            ended = watched.ended(consoles.chain)
        assert [one.state for one in ended.steps] == ["done", "done", "ended", "done", "done", "done", "done"], ended
        assert ended.state == "done"
