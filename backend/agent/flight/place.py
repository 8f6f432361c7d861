"""Where the record lies, who may write it, and how the recorder is started."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any, Dict, List, Optional, Set

from backend.agent import runfiles
from backend.agent.paths import state_dir
from backend.agent.runs import RunStore
from backend.agent.seam import Machine

TROUBLE = "recorder.log"
KEEP_EVERY_S = 10.0


def flight_dir() -> str:
    """Return this host's folder: a home may be shared by several."""
    return state_dir(os.path.join("flight", re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "host"))


def take_lock(folder: str) -> Optional[int]:
    """Become the one recorder: return the descriptor that holds the lock, or None where another has it."""
    try:
        return runfiles.take_lock(folder)
    except BlockingIOError:
        return None


def start_recorder(machine: Machine) -> None:
    """Start the recorder, detached, unless one runs. Where it cannot be started there is no record, and no more."""
    try:
        folder = flight_dir()
        if not runfiles.locked(folder):
            _spawn([*machine.relaunch, "record"], os.path.join(folder, TROUBLE))
    except OSError:
        pass  # no process or no disk to be had: what it was started for matters more


def _spawn(argv: List[str], trouble: str) -> None:
    """Start a program that belongs to nobody: its parent ends at once and is reaped here."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            said = os.open(trouble, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for target, source in ((0, null), (1, said), (2, said)):
                os.dup2(source, target)
            os.execvp(argv[0], argv)
    finally:
        os._exit(0)


class RecorderKeeper:
    """A source of the agent's loop: starts the recorder again where one is missing while runs live."""

    def __init__(self, machine: Machine, store: RunStore) -> None:
        self._machine, self._store = machine, store
        self._next = time.monotonic() + KEEP_EVERY_S

    def filenos(self) -> List[int]:
        """Return nothing: only time passes."""
        return []

    def due(self) -> float:
        """Return when to look again, on the monotonic clock."""
        return self._next

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Look, and start it where it is missing."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + KEEP_EVERY_S
            if self._store.any_live():
                start_recorder(self._machine)
        return []

    def close(self) -> None:
        """Nothing is held open; the recorder is on its own."""
