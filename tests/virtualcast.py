"""Holders of virtual GPUs for tests: started for real, found by what they say of themselves, always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.agent import procfs
from backend.virtual.claims import lay_out
from tests.waiting import until

if TYPE_CHECKING:
    from types import TracebackType

CHECKOUT = Path(__file__).resolve().parent.parent


class Cast:
    """A virtual host's folder and the processes that a test started on it."""

    def __init__(self, root: Path, gpus: int = 2, python: str = sys.executable) -> None:
        self.root = root
        self._python = python
        self._read_end, self._write_end = os.pipe()
        self._started: list[subprocess.Popen[bytes]] = []
        lay_out(str(root), gpus)

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write_end)
        os.close(self._read_end)
        for record in self.records():
            if procfs.alive(record["pid"], record["start_ticks"]):
                kill(record)
        for process in self._started:
            process.kill()
            process.wait()

    def hold(self, *words: str, processes: int = 1) -> list[dict[str, Any]]:
        """Start a holder and return what its processes say of themselves, once so many do."""
        before = {record["pid"] for record in self.records()}
        self._started.append(
            subprocess.Popen(
                [self._python, "-m", "backend.virtual.holder", "--root", str(self.root),
                 "--lifeline", str(self._read_end), *words],
                cwd=CHECKOUT, pass_fds=[self._read_end],
            )
        )  # fmt: skip

        def told() -> list[dict[str, Any]]:
            new = [record for record in self.records() if record["pid"] not in before]
            return new if len(new) == processes else []

        return until(told)

    def let_go(self) -> None:
        """End the pipe that every holder watches."""
        os.close(self._write_end)
        self._write_end = os.open(os.devnull, os.O_RDONLY)

    def records(self) -> list[dict[str, Any]]:
        """Return what the processes say of themselves, the ranks in order."""
        folder = self.root / "cast"
        found = [json.loads(path.read_bytes()) for path in folder.iterdir() if path.name[0] != "."]
        return sorted(found, key=lambda record: (record["rank"], record["role"] == "heir"))


def kill(record: dict[str, Any], number: int = signal.SIGKILL) -> None:
    """Signal a process of the cast, by pidfd and only if it is still the one that spoke."""
    pidfd = os.pidfd_open(record["pid"])
    try:
        if procfs.alive(record["pid"], record["start_ticks"]):
            signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


def gone(record: dict[str, Any]) -> bool:
    """Say whether a process has ended; a zombie has."""
    return not procfs.alive(record["pid"], record["start_ticks"])
