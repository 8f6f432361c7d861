"""The virtual host: a folder, a corpus, an SSH server on loopback, and processes that hold every GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import backend
from backend.config import Config, Console, Host, Stage
from backend.link import pack_agent
from backend.virtual import belongings
from backend.virtual.claims import lay_out
from backend.virtual.corpus import write_corpus
from backend.virtual.server import LOOPBACK, SshServer

if TYPE_CHECKING:
    from backend.link import Archive

NAME = "virtual"
GPUS = 8
CAST_S = 30.0
RANK_TITLE = "sglang::scheduler_TP{rank}"
SERVER_TITLE = "python3 -m sglang.launch_server --model-path /models/Kimi-K2.5 --tp-size 8"
HABITS = ("--ignore-term", "3", "--heir", "5", "--orphan", "6")
"""What makes the end of the server hard that is found on the host; one that is launched there later has none of it."""

SHIPPED = tuple(f"backend.virtual.{name}" for name in ("claims", "driver", "smi"))
PATIENCE_S = 2.0


class VirtualHost:
    """One virtual host in one folder. Use it with `with`: leaving it ends every process that it started.

    The cast: eight ranks that hold a GPU each under one parent (rank 3 ignores SIGTERM, 5 has a forked heir,
    6 is an orphan), a monitor that has the devices open and no memory, a bystander that only has the server's
    name in its title. They end with this process too, whatever becomes of it.
    """

    def __init__(self, folder: Path, samples: int, tokens: int) -> None:
        self.folder = folder.resolve()
        self.root, self.home, self.data = (self.folder / name for name in ("gpus", "home", "data"))
        self.corpus, self.out = self.data / "corpus.jsonl", self.data / "states"
        self.cast: list[dict[str, Any]] = []
        self.samples = samples
        self.tokens = 0
        self._wanted_tokens = tokens
        self._server = SshServer(self.folder / "ssh", self.home)
        self._started: list[subprocess.Popen[bytes]] = []
        self._lifeline: tuple[int, int] | None = None

    def __enter__(self) -> VirtualHost:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lay_out(str(self.root), GPUS)
        self.tokens = write_corpus(self.corpus, self.samples, self._wanted_tokens)
        self._server.start()
        self._lifeline = os.pipe()
        for words in (
            [*serving_words(self.root), *HABITS],
            [*_holder(self.root), "--gpus", f"0-{GPUS - 1}", "--monitor", "--title", "nvitop", "--role", "monitor"],
            [*_holder(self.root), "--title", "vim sglang_server.log", "--role", "bystander"],
        ):
            self._start([*words, "--lifeline", str(self._lifeline[0])])
        self.cast = self._gather(GPUS + 4)

    def _start(self, words: list[str]) -> None:
        assert self._lifeline is not None
        with (self.folder / "cast.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    pass_fds=[self._lifeline[0]], env={**os.environ, **_importable()},
                )
            )  # fmt: skip

    def _gather(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many processes have said that they hold what they should."""
        end = time.monotonic() + CAST_S
        while True:
            files = [path for path in (self.root / "cast").iterdir() if not path.name.startswith(".")]
            if len(files) >= count:
                return sorted((json.loads(path.read_bytes()) for path in files), key=lambda one: one["pid"])
            if time.monotonic() > end:
                log = (self.folder / "cast.log").read_text("utf-8", "replace")[-2000:]
                raise TimeoutError(f"{len(files)} of {count} processes started within {CAST_S:.0f} s: {log}")
            time.sleep(0.02)

    def close(self) -> None:
        """End what was started here, on this host and through its server. The folder stays."""
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        belongings.end([(one["pid"], one["start_ticks"]) for one in self.cast], PATIENCE_S)
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()
        belongings.end(belongings.started_under(self.home))
        self._server.close()

    def drop_connections(self) -> None:
        """Cut every SSH connection without a goodbye, as a network does; the next one is let in."""
        self._server.drop_connections()

    def of_role(self, *roles: str) -> list[dict[str, Any]]:
        """Return the processes of the cast with one of these roles."""
        return [one for one in self.cast if one["role"] in roles]

    def archive(self, name: str = NAME) -> Archive:
        """Return the agent that this host is sent: the same roles, with the virtual driver."""
        return pack_agent("backend.virtual.agent", SHIPPED, [str(self.root)])

    def config(self) -> Config:
        """Return the configuration of a console that knows this host and its stages."""
        host = Host(
            address=LOOPBACK,
            user=self._server.user,
            port=self._server.port,
            identity_file=str(self._server.keys.client),
            python=sys.executable,
            roots=[str(self.data)],
            accept_limited=os.geteuid() != 0,  # the files of other users cannot be looked into, as on a real host
        )
        serve = Stage(
            hosts=[NAME], command=serving_words(self.root), needs=["clean-gpus"], env=_importable(), grace_s=10.0
        )
        extract = Stage(
            kind="extract", hosts=[NAME], engine="embedded", python=sys.executable, corpus=str(self.corpus),
            out=str(self.out), disk_gib=0.25,
        )  # fmt: skip
        console = Console(known_hosts=str(self._server.keys.known_hosts))
        return Config(hosts={NAME: host}, stages={"serve": serve, "extract": extract}, console=console)


def _holder(root: Path) -> list[str]:
    return [sys.executable, "-m", "backend.virtual.holder", "--root", str(root)]


def serving_words(root: Path) -> list[str]:
    """Return the command of a server with a rank on every GPU."""
    return [
        *_holder(root), "--gpus", f"0-{GPUS - 1}", "--per-gpu", "--gib", "60-110", "--load", "0.9",
        "--title", RANK_TITLE, "--parent-title", SERVER_TITLE,
    ]  # fmt: skip


def _importable() -> dict[str, str]:
    """Return what lets another interpreter find this package, installed or not."""
    ours = str(Path(backend.__file__).resolve().parent.parent)
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [ours, others]))}
