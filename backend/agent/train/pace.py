"""How far a training is, how fast it goes, and what is wrong with its numbers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Deque, Dict, Iterable, List, Tuple

from backend.agent.train.lines import Bar, Reader
from backend.agent.train.metrics import EVAL, TRAIN, Update, Value, number
from backend.wire import Progress

WINDOW_S = 600.0
"""Over which steps are counted for the rate: one step of a large drafter takes seconds, an evaluation minutes."""

LEAST_STEPS = 3
STUCK_STEPS = 50
"""Steps with a loss and an accuracy of exactly 0 after which the data is at fault, not the start of the training."""


class Pace:
    """Takes what was said, step by step, and makes the run's progress of it.

    `order` is {max_steps, epochs, samples, tokens}: what is known beforehand, 0 where it is not.
    """

    def __init__(self, order: Dict[str, Any]) -> None:
        self._order = {name: int(order.get(name) or 0) for name in ("max_steps", "epochs", "samples", "tokens")}
        self._history: Deque[Tuple[float, int]] = deque()
        self._values: Dict[str, Value] = {}
        self._advanced_at = 0.0
        self._bad_since: Dict[str, int] = {}
        self._zero_since = -1
        self.step = 0

    def take(self, at: float, updates: Iterable[Update]) -> None:
        """Take updates that were read at a wall time."""
        for one in updates:
            if one.kind == EVAL and one.step < self.step:
                continue
            if one.kind == TRAIN:
                self._values.update(one.values)
                self._judge(one)
            self._reach(at, one.step)

    def take_bar(self, at: float, bar: Bar) -> Update:
        """Take the newest bar and return what it says of its step."""
        update = Update(TRAIN, bar.epoch * bar.total + bar.done, bar.values)
        self.take(at, [update])
        return update

    def progress(self, state: str, reader: Reader, said: List[str]) -> Progress:
        """Return how far it is. `reader` knows what the trainer says of its epochs; `said` is told beside."""
        values, rate = self._values, self._rate()
        samples_per_s = number(values.get("samples_per_s")) or 0.0
        tokens_per_s = number(values.get("tokens_per_s")) or samples_per_s * self._mean_tokens()
        return Progress(
            at=time.time(), state=state, steps_done=self.step,
            steps_total=self._total(reader), steps_per_s=rate,
            samples_per_s=samples_per_s, tokens_per_s=tokens_per_s,
            loss=number(values.get("loss")), accuracy=number(values.get("accuracy")),
            learning_rate=number(values.get("learning_rate")), advanced_at=self._advanced_at,
            message="; ".join(self.warnings() + said)[:900],
        )  # fmt: skip

    def warnings(self) -> List[str]:
        """Say what is wrong with the numbers."""
        found = ["the %s is %s since step %d" % (name.replace("_", " "), self._values[name], step)
                 for name, step in sorted(self._bad_since.items())]  # fmt: skip
        if 0 <= self._zero_since <= self.step - STUCK_STEPS:
            found.append("loss and accuracy are 0 since step %d: is the loss mask empty, or the vocabulary map of "
                         "another model?" % self._zero_since)  # fmt: skip
        return found

    def _reach(self, at: float, step: int) -> None:
        if step != self.step or not self._history:
            self._advanced_at = at
        if step < self.step:
            self._history.clear()  # it went back to a checkpoint
        self.step = step
        if self._history and self._history[-1][0] == at:
            self._history.pop()
        self._history.append((at, step))
        while len(self._history) > LEAST_STEPS and self._history[0][0] < at - WINDOW_S:
            self._history.popleft()

    def _judge(self, update: Update) -> None:
        for name in ("loss", "accuracy", "grad_norm"):
            value = update.values.get(name)
            if isinstance(value, str):
                self._bad_since.setdefault(name, update.step)
            elif value is not None:
                self._bad_since.pop(name, None)
        loss, accuracy = update.values.get("loss"), update.values.get("accuracy")
        if loss == 0 and accuracy == 0:
            self._zero_since = update.step if self._zero_since < 0 else self._zero_since
        elif loss is not None:
            self._zero_since = -1

    def _rate(self) -> float:
        """Return the steps a second."""
        if len(self._history) < 2:
            step_s = number(self._values.get("step_s")) or 0.0
            return 1.0 / step_s if step_s > 0 else 0.0
        (first_at, first), (last_at, last) = self._history[0], self._history[-1]
        return max(0.0, (last - first) / (last_at - first_at)) if last_at > first_at else 0.0

    def _mean_tokens(self) -> float:
        return self._order["tokens"] / self._order["samples"] if self._order["samples"] else 0.0

    def _total(self, reader: Reader) -> int:
        """Return how many steps there will be; 0 where nothing says it."""
        order, epochs = self._order, self._order["epochs"] or reader.epochs
        if order["max_steps"]:
            return max(self.step, order["max_steps"])
        if reader.epoch_steps:
            return max(self.step, epochs * reader.epoch_steps) if epochs else 0
        each = (number(self._values.get("samples_per_s")) or 0.0) * (number(self._values.get("step_s")) or 0.0)
        return max(self.step, round(order["samples"] * epochs / each)) if each > 0 and epochs else 0
