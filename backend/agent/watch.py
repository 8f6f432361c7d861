"""Keeping one driver child answering, whatever a GPU does.

A child that hangs or dies is abandoned, the GPU that it hung on is given up, and a new child goes on without it. A
given-up GPU is tried again by a second child, so that the try cannot cost the others their readings. Where a new
child gets no answer at all, the driver as a whole is not answering, and every GPU says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple

from backend.agent import child as children
from backend.agent import driverhold
from backend.agent.child import OPEN, Answer, DriverChild
from backend.agent.seam import ContextList, Driver
from backend.wire import Inventory, Reading

OVERDUE_S = 3.0
"""From when on a GPU's problem says that it is not answering: the readings' age has shown it since the second."""

REOPEN_S = 10.0
"""How often a driver that could not be opened is tried again."""

RETRY_S = 10.0
"""When a GPU (or driver) that hung is first tried again; the pause doubles up to RETRY_MOST_S. A victim that unpins
80 GB blocks its GPU for 6.6 s, and is no longer at it then (h200 readings, 2026-12-01)."""

RETRY_MOST_S = 60.0
HANGING_MOST = 4
"""No new try while so many abandoned children still hang in the driver: each holds the driver's locks."""


Raised = Tuple[int, int, float]
"""An XID that the driver told: GPU index, number, and when, on the monotonic clock."""


@dataclass
class Newest:
    """The newest answers of one GPU. `at` and `slow_at` are on the monotonic clock, 0 before the first."""

    readings: Dict[str, Reading] = field(default_factory=dict)
    contexts: ContextList = field(default_factory=ContextList)
    at: float = 0.0
    slow: Dict[str, Reading] = field(default_factory=dict)
    slow_at: float = 0.0
    problem: str = ""


@dataclass
class GivenUp:
    """A GPU that hung: since when it does not answer, why, and when it is tried again."""

    since: float
    reason: str
    retry_at: float
    pause_s: float = RETRY_S


class DriverWatch:
    """Owns the children. `step` never blocks; `changed` is true once after the inventory changed.

    `raised` gathers the XIDs that the driver told, for whoever takes them away; `deaf` says why it tells none, empty
    where it does, None where that is not known yet.
    """

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._make_driver = make_driver
        self._serving: Optional[DriverChild] = None
        self._trial: Optional[DriverChild] = None
        self._given_up: Dict[int, GivenUp] = {}
        self._start_at = self._reopen_at = self._no_trial_before = 0.0
        self._pause_s = RETRY_S
        self._down_since = 0.0  # since when the driver as a whole is not answering, 0 while it does
        self._down_words = ""
        self._replacing = False  # the child before hung, and this one has read nothing yet
        self._cpu_s: Dict[int, float] = {}
        self.inventory = Inventory()
        self.newest: Dict[int, Newest] = {}
        self.changed = False
        self.child_cpu_s = 0.0
        self.raised: List[Raised] = []
        self.deaf: Optional[str] = None

    @property
    def children(self) -> List[DriverChild]:
        """List the children to wait for."""
        return [child for child in (self._serving, self._trial) if child is not None and child.alive]

    @property
    def busy(self) -> bool:
        """Say whether an answer of the serving child is waited for."""
        return self._serving is not None and self._serving.waiting_for is not None

    def due(self) -> float:
        """Return when `step` must be called at the latest: at a deadline, or at the next try."""
        ends = [child.waiting_since + child.limit_s() for child in self.children if child.waiting_for]
        if self._trial is None:
            ends.append(self._next_trial_at())
        return min(ends, default=time.monotonic() + REOPEN_S)

    def ask(self, kind: str) -> None:
        """Ask the serving child about every GPU that is not given up, where it has nothing else to answer."""
        if self._serving is not None and not self.busy:
            self._serving.ask(kind, self._order())

    def step(self) -> None:
        """Take what came, abandon what is overdue, start what is due."""
        if driverhold.held():
            return self._let_go()
        for child in self.children:
            for answer in child.answers():
                self._take(child, answer)
            if child.ended or child.overdue():
                self._failed(child)
        self._say_slow_opening()
        if self._trial is None and time.monotonic() >= self._next_trial_at():
            self._try()

    def problem_of(self, index: int) -> str:
        """Say why a GPU as a whole is not read at this moment; empty where it is."""
        now = time.monotonic()
        if self._down_since:
            return self._down_words or "the driver is not answering for %.0f s" % (now - self._down_since)
        trial = self._trial
        if self._serving is None and self._replacing and trial is not None and trial.waited_s() > OVERDUE_S:
            return "the driver is not answering for %.0f s" % trial.waited_s()
        given_up = self._given_up.get(index)
        if given_up is not None:
            return given_up.reason or "not answering for %.0f s" % (now - given_up.since)
        waiting = self._serving.waiting_for if self._serving is not None else None
        if self._serving is not None and waiting and waiting[1] == index and self._serving.waited_s() > OVERDUE_S:
            return "not answering for %.0f s" % self._serving.waited_s()
        newest = self.newest.get(index)
        if newest is None and self.inventory.problem:
            return self.inventory.problem
        return newest.problem if newest is not None else ""

    def close(self) -> None:
        """End the children; one inside the driver is given a moment and then left."""
        for child in self.children:
            child.close()
        self._serving = self._trial = None

    def _let_go(self) -> None:
        """Leave the driver alone while a GPU is reset: no child may have it open, and every GPU says so."""
        now = time.monotonic()
        for child in self.children:
            self._forget(child)
            child.retire()
        self._serving = self._trial = None
        self._down_since, self._down_words = self._down_since or now, driverhold.WHY
        self._no_trial_before = now + driverhold.LOOK_EVERY_S

    def _order(self) -> List[int]:
        """List the GPUs to ask. A child that replaces one that hung asks those first that answered last: it proves
        so that the driver answers, before it comes to a GPU that may hang as well."""
        skip: FrozenSet[int] = self._serving.skip if self._serving is not None else frozenset()
        wanted = [g.index for g in self.inventory.gpus if g.index not in self._given_up or g.index not in skip]
        if not self._replacing:
            return wanted
        return sorted(wanted, key=lambda i: (i in self._given_up, -self.newest.get(i, Newest()).at))

    def _take(self, child: DriverChild, answer: Answer) -> None:
        if answer.kind == "xid":
            self.raised.append((answer.gpu, int(answer.value), answer.at))
            return
        if answer.kind == "listening":
            self.deaf = answer.problem
            return
        self.child_cpu_s += max(0.0, answer.cpu_s - self._cpu_s.get(id(child), 0.0))
        self._cpu_s[id(child)] = answer.cpu_s
        if answer.kind == "open":
            self._opened(child, answer)
            return
        self._down_since, self._replacing, self._pause_s = 0.0, False, RETRY_S
        newest = self.newest.setdefault(answer.gpu, Newest())
        if answer.problem:
            newest.problem = answer.problem
        elif answer.kind == "lean":
            newest.readings, newest.contexts = answer.value
            newest.at, newest.problem = answer.at, _whole_problem(newest.readings)
        elif answer.kind == "slow":
            newest.slow, newest.slow_at = answer.value, answer.at
        self._given_up.pop(answer.gpu, None)
        if child is self._trial and not child.waiting_for:
            self._promote()

    def _opened(self, child: DriverChild, answer: Answer) -> None:
        if answer.problem:
            child.retire()
            self._trial = None
            self._start_at = self._no_trial_before = time.monotonic() + REOPEN_S
            if self._serving is None:
                self._down_since = 0.0
                self.newest.clear()
                self._adopt(Inventory(problem=answer.problem, gpus=self.inventory.gpus, virtual=self.inventory.virtual))
            return
        self._adopt(answer.value)
        suspects = [index for index in self._given_up if index not in child.skip]
        if self._serving is not None and suspects:
            child.ask("lean", suspects)
            return
        self._promote()

    def _promote(self) -> None:
        """Let the trial serve. It opened, and the GPUs that it was to try have answered."""
        if self._serving is not None:
            self._forget(self._serving)
            self._serving.retire()
        self._serving, self._trial = self._trial, None
        if self._serving is not None:
            self._serving.listen()
        self._reopen_at = time.monotonic() + (RETRY_MOST_S if self.inventory.gpus else REOPEN_S)

    def _adopt(self, found: Inventory) -> None:
        """Take a new inventory; a GPU that could not be asked keeps what was known of it, and its place."""
        known = {gpu.index: gpu for gpu in self.inventory.gpus}
        found.gpus = [known[gpu.index] if gpu.problem and gpu.index in known else gpu for gpu in found.gpus]
        if found != self.inventory:
            self.inventory, self.changed = found, True

    def _failed(self, child: DriverChild) -> None:
        """Leave a child that hangs or died, and decide whom to blame: a GPU, or the driver as a whole."""
        index = child.waiting_for[1] if child.waiting_for else OPEN
        since, ended = child.waiting_since, child.ended
        child.abandon()
        self._forget(child)
        now = time.monotonic()
        if index != OPEN:
            before = self._given_up.get(index)
            pause_s = min(RETRY_MOST_S, before.pause_s * 2) if before else RETRY_S
            reason = "%s while it read this GPU" % ended if ended else ""
            self._given_up[index] = GivenUp(before.since if before else since, reason, now + pause_s, pause_s)
        if child is self._trial:
            self._trial = None
            if self._serving is not None:
                self._no_trial_before = now + RETRY_S
                self._reopen_at = now + RETRY_MOST_S
                return
        else:
            self._serving = None
        self._replace(index, since, child.answered, ended)

    def _replace(self, index: int, since: float, answered: int, ended: str) -> None:
        """Start over without the GPU at once; after a pause where the driver as a whole seems to hang."""
        now = self._start_at = time.monotonic()
        if answered == 0 and (index == OPEN or self._replacing):
            self._down_since, self._down_words = self._down_since or since, ended
            self._start_at, self._pause_s = now + self._pause_s, min(RETRY_MOST_S, self._pause_s * 2)
            if not self.inventory.gpus:
                self._adopt(Inventory(problem=ended or "the driver is not answering; it is tried again"))
        self._replacing = True

    def _say_slow_opening(self) -> None:
        """Say on a host that has shown no GPU yet that the driver takes long: it may be initialising each GPU."""
        trial = self._trial
        if trial is None or self.inventory.gpus or self.inventory.problem or trial.waited_s() < OVERDUE_S:
            return
        self._adopt(Inventory(problem="the driver is still opening; without persistence mode this takes seconds a GPU"))

    def _next_trial_at(self) -> float:
        if self._serving is None:
            return max(self._start_at, self._no_trial_before)
        times = [given_up.retry_at for given_up in self._given_up.values()]
        whole = any(newest.problem for newest in self.newest.values()) or any(g.problem for g in self.inventory.gpus)
        if whole or not self.inventory.gpus:
            times.append(self._reopen_at)
        return max(min(times), self._no_trial_before) if times else float("inf")

    def _try(self) -> None:
        now = time.monotonic()
        if children.reap() >= HANGING_MOST:
            self._no_trial_before = now + RETRY_S
            return
        skip = [index for index, given_up in self._given_up.items() if given_up.retry_at > now]
        trial = DriverChild(self._make_driver, skip)
        trial.start()
        if trial.alive:  # else a reset of a GPU has begun this moment
            trial.ask("open")
            self._trial = trial

    def _forget(self, child: DriverChild) -> None:
        self._cpu_s.pop(id(child), None)


def _whole_problem(readings: Dict[str, Reading]) -> str:
    """Say why a GPU as a whole cannot be read, where every reading that it should give failed for the same reason."""
    problems = {reading.problem for reading in readings.values() if not reading.unsupported}
    return problems.pop() if len(problems) == 1 else ""
