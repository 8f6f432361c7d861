"""A disposable child that talks to the driver, so that a call that never returns costs a process and not the agent.

Requests and answers are counted in order: the child answers GPU after GPU, so the GPU whose answer is missing is the
one that hangs. An abandoned child is killed and left: one in uninterruptible sleep dies when the driver lets it go,
and is reaped then.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from typing import Callable, Deque, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Tuple

from backend.agent import driverhold, driverloop
from backend.agent.driverloop import OPEN, Answer
from backend.agent.seam import Driver

FIRST_LIMIT_S = 15.0
"""For each step of opening: without persistence mode the driver initialises each GPU first, 1.5 s or more
(facts: monitors, section 2, system76-power#492)."""

LIMIT_S = 5.0
"""For each GPU's later answer: the slowest set takes milliseconds (facts: monitors, section 3). A call does block
for as long as a victim of a reset unpins memory, 6.6 s for 80 GB, so whoever resets waits longer (facts: reset, 2)."""

CLOSE_WAIT_S = 1.0
"""How long `close` lets a call end: killing a client inside the driver has hung GPUs (facts: monitors, dcgm#84)."""

EXIT_WAIT_S = 0.1

_abandoned: List[int] = []


class Gathered(NamedTuple):
    """What `gather` got. `hung` is the GPU whose answer is missing at the deadline (OPEN: the driver as a whole);
    `problem` says so in words, or that the child died."""

    answers: Dict[int, Answer]
    hung: Optional[int] = None
    problem: str = ""


class DriverChild:
    """One child with one open driver. `start` it, `ask` for "open" first, then for lean, slow, health or occupancy.

    Use `fileno` and `answers` in a select loop, or `gather` to wait. Not for use by several threads.
    """

    def __init__(self, make_driver: Callable[[], Driver], skip: Iterable[int] = ()) -> None:
        self.skip: FrozenSet[int] = frozenset(skip)
        self._make_driver = make_driver
        self.pid = 0
        self.ended = ""  # why the child is no more, in words
        self.answered = 0  # readings that came, opening left out
        self._pidfd, self._requests, self._answers = -1, -1, -1
        self._partial = b""
        self._pending: Deque[Tuple[str, int]] = deque()
        self._since = 0.0

    def start(self) -> None:
        """Fork the child. It closes everything else that it inherits, standard input and output too.

        While a GPU is reset none is started: `ended` says so.
        """
        reap()
        if driverhold.held():
            self.ended = driverhold.WHY
            return
        their_requests, self._requests = os.pipe()
        self._answers, their_answers = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            driverloop.main(self._make_driver, self.skip, their_requests, their_answers, parent)
        os.close(their_requests)
        os.close(their_answers)
        os.set_blocking(self._answers, False)
        os.set_blocking(self._requests, False)
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._pidfd = -1

    def fileno(self) -> int:
        """Return the descriptor that is readable when an answer (or the child's end) waits."""
        return self._answers

    @property
    def alive(self) -> bool:
        """Say whether it was started and neither ended nor was abandoned."""
        return self._answers >= 0 and not self.ended

    @property
    def waiting_for(self) -> Optional[Tuple[str, int]]:
        """Return the request whose answer comes next, (kind, GPU), or None where nothing is asked.

        While the driver opens, the GPU is the one that it touches at the moment, OPEN before the first.
        """
        return self._pending[0] if self._pending else None

    @property
    def waiting_since(self) -> float:
        """Return since when that answer is waited for, on the monotonic clock."""
        return self._since

    def waited_s(self) -> float:
        """Return for how long the next answer is waited for; 0 where nothing is asked."""
        return time.monotonic() - self._since if self._pending else 0.0

    def limit_s(self) -> float:
        """Return how long the next answer may take."""
        return FIRST_LIMIT_S if self._pending and self._pending[0][0] == "open" else LIMIT_S

    def overdue(self) -> bool:
        """Say whether the next answer took longer than it may."""
        return bool(self._pending) and self.waited_s() > self.limit_s()

    def ask(self, kind: str, indices: Iterable[int] = (OPEN,)) -> None:
        """Ask for open, lean, slow, health or occupancy of some GPUs: one answer each, in order. Never blocks."""
        wanted = list(indices)
        if not wanted or not self.alive:
            return
        try:
            os.write(self._requests, ("%s %s\n" % (kind, " ".join(map(str, wanted)))).encode("ascii"))
        except OSError:
            return  # the child has ended, and `answers` will say so
        if not self._pending:
            self._since = time.monotonic()
        self._pending.extend((kind, index) for index in wanted)

    def listen(self) -> None:
        """Ask for XIDs from now on: `answers` has them as they come, after one that says whether they will."""
        if self.alive:
            try:
                os.write(self._requests, b"listen\n")
            except OSError:
                return  # the child has ended, and `answers` will say so

    def answers(self) -> List[Answer]:
        """Return the answers that have come, without waiting. Sets `ended` where the child is gone."""
        found: List[Answer] = []
        while self.alive:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.ended = "the driver's child ended (%s)" % self._exit_words()
                break
            self._partial += data
            found.extend(self._whole())
        return found

    def gather(self, kind: str, indices: Iterable[int] = (OPEN,), deadline_s: Optional[float] = None) -> Gathered:
        """Ask and wait for all answers, at most `deadline_s` (the limit of one answer by default).

        The child goes on after a deadline: `collect` waits for the same answers again, `abandon` gives up.
        """
        self.ask(kind, indices)
        return self.collect(self.limit_s() if deadline_s is None else deadline_s)

    def collect(self, deadline_s: float) -> Gathered:
        """Wait for the answers that are still missing, at most `deadline_s` in all."""
        end = time.monotonic() + deadline_s
        got: Dict[int, Answer] = {}
        while True:
            got.update((answer.gpu, answer) for answer in self.answers())
            if not self.alive:
                hung = self._pending[0][1] if self._pending else OPEN
                return Gathered(got, hung, self.ended or "the driver's child was closed")
            left = end - time.monotonic()
            if self._pending and left > 0:
                select.select([self._answers], [], [], left)
                continue
            if not self._pending:
                return Gathered(got)
            hung = self._pending[0][1]
            who = "the driver" if hung == OPEN else "GPU %d" % hung
            return Gathered(got, hung, "%s is not answering for %.0f s" % (who, self.waited_s()))

    def abandon(self) -> None:
        """Kill the child and let it go. Never waits: one that sleeps inside the driver is reaped when it dies."""
        if self.pid:
            self._kill()
            _abandoned.append(self.pid)
            self.pid = 0
        self._close_files()
        reap()

    def retire(self) -> None:
        """Let an idle child leave by itself, without waiting and without a signal."""
        if self.pid:
            _abandoned.append(self.pid)
            self.pid = 0
        self._close_files()

    def close(self) -> None:
        """End the child: it leaves when its requests end; one that does not within a second is abandoned."""
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1
        end = time.monotonic() + CLOSE_WAIT_S
        while self.pid and time.monotonic() < end:
            if _reaped(self.pid):
                self.pid = 0
                break
            time.sleep(0.002)
        self.abandon()

    def _whole(self) -> List[Answer]:
        """Take the answers that are whole out of what came, and count them off the pending ones."""
        came, self._partial = driverloop.frames(self._partial)
        found = []
        for answer in came:
            if answer.kind in ("listening", "xid"):  # neither an answer nor a sign that a GPU still gives one
                found.append(answer)
                continue
            self._since = time.monotonic()
            if answer.kind == "opening":
                self._pending[0] = ("open", answer.gpu)
                continue
            self._pending.popleft()
            self.answered += answer.kind != "open"
            found.append(answer)
        return found

    def _kill(self) -> None:
        """Send SIGKILL. The pid is ours until it is reaped, so that it cannot be another process's; a pidfd is surer
        still, where something else in this process reaps any child."""
        try:
            if self._pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _exit_words(self) -> str:
        """Say how the child ended. Its pipes close a moment before it can be reaped, or long before where the
        driver holds it while it exits, so this waits only that moment."""
        end = time.monotonic() + EXIT_WAIT_S
        while True:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return "unknown how"
            if pid:
                self.pid = 0
                break
            if time.monotonic() > end:
                return "still exiting"
            time.sleep(0.001)
        return "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "exit %d" % os.WEXITSTATUS(status)

    def _close_files(self) -> None:
        for fd in (self._requests, self._answers, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._requests = self._answers = self._pidfd = -1
        self._pending.clear()


def reap() -> int:
    """Reap abandoned children that have died. Returns how many still hang in the driver."""
    _abandoned[:] = [pid for pid in _abandoned if not _reaped(pid)]
    return len(_abandoned)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


__all__ = ["FIRST_LIMIT_S", "LIMIT_S", "OPEN", "Answer", "DriverChild", "Gathered", "reap"]
