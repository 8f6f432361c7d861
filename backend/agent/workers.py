"""Work that may block, each piece in a process of its own with a deadline, so that the loop never waits."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any, Callable, Dict, List, Set

from backend.wire import Refused, WireError, decode, encode, refusal, reply

PR_SET_PDEATHSIG = 1
AT_ONCE = 6
"""Workers at the same time; more wait, so that a console that asks too much cannot fork without end."""


class _Job:
    def __init__(self, number: Any, deadline_s: float, work: Callable[[], Any]) -> None:
        self.number, self.deadline_s, self.work = number, deadline_s, work
        self.pid, self.fd, self.ends = 0, -1, 0.0
        self.answer = b""


class Workers:
    """A source of the agent's loop: replies come when a worker is done, failed, or out of time."""

    def __init__(self) -> None:
        self._running: Dict[int, _Job] = {}
        self._waiting: List[_Job] = []
        self._unreaped: List[int] = []

    def start(self, number: Any, deadline_s: float, work: Callable[[], Any]) -> None:
        """Run `work` in a child; its result, or its refusal, becomes the reply to request `number`."""
        self._waiting.append(_Job(number, deadline_s, work))
        self._fill()

    def filenos(self) -> List[int]:
        """Return what to select on."""
        return list(self._running)

    def due(self) -> float:
        """Return when the next worker runs out of time, on the monotonic clock."""
        return min([job.ends for job in self._running.values()], default=time.monotonic() + 60.0)

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Collect answers and end what is over its time."""
        replies = [answer for fd in list(self._running) if fd in ready for answer in self._collect(fd)]
        now = time.monotonic()
        for fd, job in list(self._running.items()):
            if now >= job.ends:
                os.kill(job.pid, signal.SIGKILL)  # our own child, not yet reaped: the pid cannot be another's
                text = "no answer within %.0f s" % job.deadline_s
                replies.append(refusal(job.number, Refused("timeout", text, "is a filesystem or the driver stuck?")))
                self._end(fd)
        self._reap()
        self._fill()
        return replies

    def close(self) -> None:
        """End every worker. A process in an uninterruptible wait is left behind, not waited for."""
        for job in self._running.values():
            os.kill(job.pid, signal.SIGKILL)
        for fd in list(self._running):
            self._end(fd)
        self._waiting.clear()
        self._reap()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            self._spawn(self._waiting.pop(0))

    def _spawn(self, job: _Job) -> None:
        reader, writer = os.pipe()
        job.pid = os.fork()
        if job.pid == 0:
            _work(job, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        job.fd, job.ends = reader, time.monotonic() + job.deadline_s
        self._running[reader] = job

    def _collect(self, fd: int) -> List[Dict[str, Any]]:
        job = self._running[fd]
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return []
        if data:
            job.answer += data
            return []
        self._end(fd)
        try:
            return [decode(job.answer)]
        except WireError:
            return [refusal(job.number, Refused("failed", "the worker ended without an answer"))]

    def _end(self, fd: int) -> None:
        self._unreaped.append(self._running.pop(fd).pid)
        os.close(fd)

    def _reap(self) -> None:
        for pid in list(self._unreaped):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._unreaped.remove(pid)


def _work(job: _Job, writer: int) -> None:
    """Do the work in the child and leave without running anything of the parent's."""
    try:
        enter_child()
        answer = answer_of(job.number, job.work)
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


def enter_child() -> None:
    """Make the process that was just forked a worker: it ends with the agent, and cannot speak in its place."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def answer_of(number: Any, work: Callable[[], Any]) -> bytes:
    """Do the work and return the line that replies to request `number`, a refusal where it fails."""
    try:
        return encode(reply(number, work()))
    except WireError as error:
        return encode(refusal(number, Refused("too-large", str(error), "ask for less at a time")))
    except Exception as error:  # the reason goes to whoever asked
        return encode(refusal(number, error))
