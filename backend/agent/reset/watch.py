"""The driver's word on every GPU, asked for through a disposable child, while something else is waited for
too.

A call may block for as long as a victim unpins its memory, 6.6 s for 80 GB, in every thread at once: that is
no hang (facts: reset, section 2). So nothing here waits for the driver alone, and whoever watches says
whether a victim is still exiting. Where none is, a GPU that has not answered for LIMIT_S is given up, and a
new child goes on without it.
"""

from __future__ import annotations

import select
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from backend.agent.child import FIRST_LIMIT_S, LIMIT_S, OPEN, Answer, DriverChild
from backend.agent.reset.look import Occupancy
from backend.agent.seam import Driver
from backend.agent.watch import Raised
from backend.wire import Inventory

RESTARTS = 3
"""How often a child that ended by itself, or was killed, is started again before its GPU is given up."""


def nobody_exits() -> bool:
    """Say that no victim is on its way out, so that a driver that does not answer hangs."""
    return False


class Watch:
    """One driver child after another. `unknown` says why a GPU is given up, by index.

    `raised` and `deaf` are as in `DriverWatch`.
    """

    def __init__(self, make_driver: Callable[[], Driver], limit_s: float = LIMIT_S) -> None:
        self._make_driver, self._limit_s = make_driver, limit_s
        self.inventory = Inventory(problem="the driver was not opened")
        self.unknown: Dict[int, str] = {}
        self.values: Dict[Tuple[str, int], Any] = {}
        self.longest_block_s = 0.0
        self._opened = False
        self._exited_at = 0.0
        self._restarts = 0
        self._listens = False
        self.raised: List[Raised] = []
        self.deaf: Optional[str] = None
        self._child = self._start()

    def _start(self) -> DriverChild:
        child = DriverChild(self._make_driver, skip=self.unknown)
        child.start()
        if child.ended:
            self.inventory = Inventory(problem=child.ended)
        child.ask("open")
        if self._listens:
            child.listen()
        return child

    def listen(self) -> None:
        """Ask for the driver's XIDs from now on: `raised` gathers them, `deaf` says why there are none."""
        self._listens = True
        self._child.listen()

    def open(self, exiting: Callable[[], bool] = nobody_exits) -> Inventory:
        """Wait until the driver is open. Where it cannot be used, the inventory says why."""
        self._settle(exiting)
        return self.inventory

    def _settle(self, exiting: Callable[[], bool]) -> None:
        while not self.idle:
            self.step(time.monotonic() + 0.5, [], exiting)

    def close(self) -> None:
        """End the child; one that hangs is left to the kernel."""
        self._child.close()

    @property
    def indices(self) -> List[int]:
        """Return the GPUs that still answer."""
        return [gpu.index for gpu in self.inventory.gpus if gpu.index not in self.unknown]

    @property
    def idle(self) -> bool:
        """Say whether no answer is being waited for."""
        return self._child.waiting_for is None or not self._child.alive

    def request(self, kind: str) -> None:
        """Ask for a reading of every GPU. Earlier values of it are forgotten."""
        for key in [key for key in self.values if key[0] == kind]:
            del self.values[key]
        self._child.ask(kind, self.indices)

    def read(self, kind: str, exiting: Callable[[], bool] = nobody_exits) -> Dict[int, Any]:
        """Ask and wait: what each GPU that answers said. GPUs that do not are in `unknown` afterwards."""
        self._settle(exiting)
        restarts = -1
        while restarts != self._restarts and self.indices:  # a child that ended took the question with it
            restarts = self._restarts
            self.request(kind)
            self.step(time.monotonic(), [], exiting)  # a child that died before the question is found out here
            self._settle(exiting)
        return self.latest(kind)

    def latest(self, kind: str) -> Dict[int, Any]:
        """Return the values that have come since the last request of this kind."""
        return {index: value for (name, index), value in self.values.items() if name == kind}

    def occupancy(self, exiting: Callable[[], bool] = nobody_exits) -> Occupancy:
        """Read memory and process lists of every GPU."""
        return self.read("occupancy", exiting)

    def step(self, until: float, fds: Iterable[int], exiting: Callable[[], bool] = nobody_exits) -> None:
        """Wait until the monotonic time, an answer, or one of the files; then take in what has come."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._child.alive:
            poll.register(self._child.fileno(), select.POLLIN)
        poll.poll(max(0, int((until - time.monotonic()) * 1000) + 1))
        self.longest_block_s = max(self.longest_block_s, self._child.waited_s() if not self.idle else 0.0)
        for answer in self._child.answers():
            self._take(answer)
        self._give_up(exiting())

    def _take(self, answer: Answer) -> None:
        if answer.kind == "xid":
            self.raised.append((answer.gpu, int(answer.value), answer.at))
            return
        if answer.kind == "listening":
            self.deaf = answer.problem
            return
        if answer.kind != "open":
            if answer.problem:
                self.unknown[answer.gpu] = answer.problem
            else:
                self.values[answer.kind, answer.gpu] = answer.value
        elif answer.problem:
            self.inventory = Inventory(problem=answer.problem)
        elif not self._opened:
            self.inventory, self._opened = answer.value, True

    def _give_up(self, exiting: bool) -> None:
        """Let go of a child that hangs or ended, and start the next without the GPU that it was busy with."""
        now, waiting = time.monotonic(), self._child.waiting_for
        if exiting:
            self._exited_at = now
        if self._child.ended and self._restarts < RESTARTS:
            self._again()  # somebody killed it: no fault of a GPU yet
        elif self._child.ended:
            self._without(waiting[1] if waiting else OPEN, self._child.ended)
        elif waiting is not None:
            limit_s = FIRST_LIMIT_S if waiting[0] == "open" else self._limit_s
            since = max(self._child.waiting_since, self._exited_at)
            if now - since > limit_s:
                self._without(waiting[1], "driver not answering for %.0f s" % (now - self._child.waiting_since))

    def _without(self, index: int, why: str) -> None:
        """Give up a GPU. Where a second one hangs too, it is the driver: every GPU is given up (as in telemetry)."""
        self._child.abandon()
        if index == OPEN or self.unknown:
            for gpu in self.inventory.gpus:
                self.unknown.setdefault(gpu.index, why)
            if not self.inventory.gpus:
                self.inventory = Inventory(problem=why)
            return
        self.unknown[index] = why
        self._again()

    def _again(self) -> None:
        """Start the next child, without the GPUs that are given up."""
        self._child.abandon()
        self._restarts += 1
        self._child = self._start()
