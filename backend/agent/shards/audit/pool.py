"""Many files looked at at once, each by a process: one that dies or hangs costs one file, and is named.

A process has bounded memory; tasks and answers are JSON lines on a socket, many at a time where each takes little. A
process that waits for ever on a dead filesystem cannot be killed: it is left behind, never waited for.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NoReturn, Tuple

from backend.agent.workers import PR_SET_PDEATHSIG

AHEAD_S = 0.05
FEWEST_AHEAD, MOST_AHEAD = 4, 64
"""A process is given so many tasks ahead as it does in that time, so that it never waits for the next."""

FLUSH_S = 0.05
"""How long answers may be held back, to be sent together."""

PATIENCE_S = 120.0
"""How long a process may say nothing; a deep look says that it goes on with every piece."""

MAX_MEMORY_BYTES = 4 << 30
MAX_PROCESSES = 32
TICK_S = 1.0
NICE = 5
"""An audit gives way to the extraction beside it."""

Task = List[Any]
Work = Callable[[Task, Callable[[], None]], Any]


def processes(wanted: int) -> int:
    """Return how many processes to use for so many files."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_PROCESSES, wanted))


class _Worker:
    """A process as its parent sees it. `begun` is a number in memory of both: how many tasks it has begun."""

    def __init__(self, pid: int, link: socket.socket, begun: mmap.mmap) -> None:
        self.pid, self.link, self._begun = pid, link, begun
        self.tasks: Deque[Task] = deque()
        self.ahead = FEWEST_AHEAD
        self.answered = 0
        self.heard_at = time.monotonic()
        self._tail = b""

    def answers(self, data: bytes) -> List[Tuple[Task, Any]]:
        """Take what it sent: whole lines are answers, empty ones say that it lives."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        lines = [line for line in lines if line]
        now = time.monotonic()
        if lines:
            pace_s = max(now - self.heard_at, 1e-6) / len(lines)
            self.ahead = max(FEWEST_AHEAD, min(MOST_AHEAD, int(AHEAD_S / pace_s)))
        self.heard_at = now
        self.answered += len(lines)
        return [(self.tasks.popleft(), answer) for answer in json.loads(b"[" + b",".join(lines) + b"]")]

    def culprit(self) -> Task:
        """Take the task that it was at out of those that it has not answered. Answers it held back are lost."""
        (begun,) = _BEGUN.unpack(self._begun[:])
        at = max(0, begun - self.answered - 1)
        task = self.tasks[at]
        del self.tasks[at]
        return task


_BEGUN = struct.Struct("<Q")


class Pool:
    """Does tasks with `work` in processes. `patience_s` is how long one may be silent."""

    def __init__(self, work: Work, wanted: int, patience_s: float = PATIENCE_S) -> None:
        self._work, self._patience_s = work, patience_s
        self._count = processes(wanted)
        self._workers: Dict[int, _Worker] = {}

    def run(self, tasks: Iterable[Task], stopped: Callable[[], bool]) -> Iterator[Tuple[Task, Any, str]]:
        """Yield (task, answer, why) as they come; `why` says why there is no answer. Ends early where `stopped`."""
        source, waiting = iter(tasks), True
        try:
            while not stopped():
                while waiting and len(self._workers) < self._count:
                    self._spawn()
                waiting = self._feed(source) if waiting else False
                if not waiting and not any(worker.tasks for worker in self._workers.values()):
                    return
                for found in self._collect():
                    yield found
        finally:
            self._end()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        begun = mmap.mmap(-1, _BEGUN.size)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(self._work, theirs, begun)
        theirs.close()
        self._workers[ours.fileno()] = _Worker(pid, ours, begun)

    def _feed(self, source: Iterator[Task]) -> bool:
        """Give every process enough to do; say whether there may be more."""
        for worker in list(self._workers.values()):
            batch: List[Task] = []
            if len(worker.tasks) * 2 > worker.ahead:
                continue
            while len(worker.tasks) + len(batch) < worker.ahead:
                task = next(source, None)
                if task is None:
                    self._give(worker, batch)
                    return False
                batch.append(task)
            if batch:
                self._give(worker, batch)
        return True

    def _give(self, worker: _Worker, batch: List[Task]) -> None:
        if not worker.tasks:
            worker.heard_at = time.monotonic()
        worker.tasks.extend(batch)
        try:
            worker.link.sendall(b"".join(json.dumps(task).encode("ascii") + b"\n" for task in batch))
        except OSError:
            pass  # it has died; that is noticed when it is read

    def _collect(self) -> Iterator[Tuple[Task, Any, str]]:
        ready, _, _ = select.select(list(self._workers), [], [], TICK_S)
        for fd in ready:
            worker = self._workers[fd]
            data = b""
            try:
                data = worker.link.recv(1 << 20)
            except OSError:
                pass
            if not data:
                for found in self._died(fd, "reader-died", "the process that read it died"):
                    yield found
                continue
            for task, answer in worker.answers(data):
                yield task, answer, ""
        now = time.monotonic()
        for fd, worker in list(self._workers.items()):
            if worker.tasks and now - worker.heard_at > self._patience_s:
                _kill(worker.pid)
                for found in self._died(fd, "no-answer", "no answer within %.0f s" % self._patience_s):
                    yield found

    def _died(self, fd: int, code: str, why: str) -> Iterator[Tuple[Task, Any, str]]:
        """Blame the file that a process was at, and give the others to a new one."""
        worker = self._workers.pop(fd)
        worker.link.close()
        os.waitpid(worker.pid, os.WNOHANG)
        if not worker.tasks:
            return
        yield worker.culprit(), None, "%s: %s" % (code, why)
        if worker.tasks:
            self._spawn()
            self._give(list(self._workers.values())[-1], list(worker.tasks))

    def _end(self) -> None:
        for worker in self._workers.values():
            _kill(worker.pid)
            worker.link.close()
            try:
                os.waitpid(worker.pid, os.WNOHANG)
            except ChildProcessError:
                pass
        self._workers.clear()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # our own child, not yet reaped: the pid cannot be another's


class _Answers:
    """What a process has to say: answers, some at a time, and with every look that goes on that it lives."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._held: List[bytes] = []
        self._told_at = time.monotonic()

    def add(self, answer: Any) -> None:
        """Take one answer."""
        self._held.append(_compact(answer).encode("ascii") + b"\n")
        if time.monotonic() - self._told_at > FLUSH_S:
            self.flush()

    def tick(self) -> None:
        """Say now and then that a long look goes on."""
        if time.monotonic() - self._told_at > TICK_S:
            self._held.append(b"\n")
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        self._told_at = time.monotonic()
        data, self._held = b"".join(self._held), []
        self._link.sendall(data)


_compact = json.JSONEncoder(separators=(",", ":")).encode


def _serve(work: Work, link: socket.socket, begun: mmap.mmap) -> NoReturn:
    """Answer tasks until the other end is closed, and leave without running anything of the parent's."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(NICE)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        bound = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        gc.freeze()
        gc.set_threshold(100_000)  # a look makes many objects and leaves no cycles
        answers, number, tail = _Answers(link), 0, b""
        data = link.recv(1 << 20)
        while data:
            lines = (tail + data).split(b"\n")
            tail = lines.pop()
            for line in lines:
                number += 1
                begun[:] = _BEGUN.pack(number)
                answers.add(work(json.loads(line), answers.tick))
            answers.flush()
            data = link.recv(1 << 20)
    finally:
        os._exit(0)
