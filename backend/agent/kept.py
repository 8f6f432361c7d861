"""A worker that is kept: it answers, one after the other, what a console asks again and again.

A fork costs a host 5 ms of CPU and the import of the readers of shards 20 ms; describing a shard takes 0.6 ms.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import time
from functools import partial
from typing import Any, Callable, Dict, List, NoReturn, Optional, Set

from backend.agent.workers import answer_of, enter_child
from backend.wire import Refused, WireError, decode, encode, refusal

MODULES = ("backend.agent.shards.show", "backend.agent.shards.listing", "backend.agent.shards.lengths")
"""Loaded by the worker before it is asked anything."""

QUIET_S = 1.5
"""When it is started: the console has its first telemetry by then, which is more urgent."""

MAX_ANSWERS = 1000
"""After so many another takes its place, whatever reading thousands of files has left in its memory."""

_NEVER_S = 3600.0

Answer = Callable[[str, Dict[str, Any]], Any]


class Kept:
    """A source of the agent's loop. `answer` does in the worker what an operation's name and arguments ask for."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pid, self._answers = 0, 0
        self._link: Optional[socket.socket] = None
        self._unreaped: List[int] = []
        self._start_at = time.monotonic() + QUIET_S
        self._number: Any = None
        self._busy, self._deadline_s, self._ends = False, 0.0, 0.0
        self._received = b""

    def ask(self, number: Any, deadline_s: float, op: str, args: Dict[str, Any]) -> bool:
        """Take a request, whose reply comes by `step`; return False where another is being answered."""
        if self._busy or self._link is None:
            return False
        try:
            self._link.sendall(encode({"id": number, "op": op, "args": args}))
        except OSError:  # it has died, of which nobody was told
            self._end()
            return False
        self._number, self._busy = number, True
        self._deadline_s, self._ends = deadline_s, time.monotonic() + deadline_s
        return True

    def filenos(self) -> List[int]:
        """Return what to select on."""
        return [self._link.fileno()] if self._link is not None and self._busy else []

    def due(self) -> float:
        """Return when the answer is overdue, or when the worker is to be started."""
        if self._busy:
            return self._ends
        return self._start_at if self._link is None else time.monotonic() + _NEVER_S

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Collect an answer, give up one that does not come, and start the worker where there is none."""
        replies: List[Dict[str, Any]] = []
        if self._link is not None and self._busy and self._link.fileno() in ready:
            replies = self._collect(self._link.recv(1 << 20))
        if self._busy and time.monotonic() >= self._ends:
            text = "no answer within %.0f s" % self._deadline_s
            replies.append(refusal(self._number, Refused("timeout", text, "is a filesystem stuck?")))
            self._end()
        if self._link is None and time.monotonic() >= self._start_at:
            self._spawn()
        for pid in list(self._unreaped):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._unreaped.remove(pid)
        return replies

    def close(self) -> None:
        """End the worker. One in an uninterruptible wait is left behind, not waited for."""
        self._end()
        self._start_at = float("inf")

    def _collect(self, data: bytes) -> List[Dict[str, Any]]:
        self._received += data
        if data and not self._received.endswith(b"\n"):
            return []
        try:
            answer = decode(self._received)
        except WireError:
            answer = refusal(self._number, Refused("failed", "the worker ended without an answer"))
        self._busy, self._received = False, b""
        self._answers += 1
        if not data or self._answers >= MAX_ANSWERS:
            self._end()
        return [answer]

    def _spawn(self) -> None:
        self._link, theirs = socket.socketpair()
        self._answers = 0
        self._pid = os.fork()
        if self._pid == 0:
            _serve(self._answer, theirs)
        theirs.close()

    def _end(self) -> None:
        """Let the worker go; the next is started in a moment."""
        self._busy, self._received, self._start_at = False, b"", time.monotonic() + QUIET_S
        if self._link is not None:
            self._link.close()
            self._link = None
            os.kill(self._pid, signal.SIGKILL)  # our own child, not yet reaped: the pid cannot be another's
            self._unreaped.append(self._pid)


def _serve(answer: Answer, link: socket.socket) -> NoReturn:
    """Answer until the other end is closed, and leave without running anything of the parent's."""
    try:
        enter_child()
        for name in os.listdir("/proc/self/fd"):  # what the agent closes must not stay open here
            if int(name) > 2 and int(name) != link.fileno():
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the descriptor of the listing itself
        for module in MODULES:
            importlib.import_module(module)
        with link.makefile("rb") as asks:
            for line in asks:
                request = decode(line)
                op, args = str(request["op"]), request["args"]
                link.sendall(answer_of(request["id"], partial(answer, op, args)))
    finally:
        os._exit(0)
