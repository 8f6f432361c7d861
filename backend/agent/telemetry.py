"""Telemetry once a second, from a driver that may hang: a source for the agent's select loop."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Dict, List, Set

from backend.agent.hostload import HostLoad
from backend.agent.owners import Owners
from backend.agent.seam import Machine
from backend.agent.watch import DriverWatch, Newest, Raised
from backend.wire import LEAN, NOT_READ, GpuSample, HostSample, Inventory, Reading, Telemetry

PERIOD_S = 1.0
SLOW_EVERY_S = 10.0

ANSWER_WAIT_S = 0.02
"""How long answers are left to gather before the agent wakes for them: one wake instead of one a GPU."""

EMIT_WAIT_S = 0.25
"""How long a tick waits for answers; later ones are shown with their age in the next."""

HOST_EVERY_TICKS = 5
"""The host's own numbers are read less often: /proc/stat costs more the more processors there are."""


class TelemetrySource:
    """Yields inventory and telemetry messages. `step` never blocks, whatever the driver does.

    The loop waits until a descriptor of `filenos` is readable or `due` has come, then calls `step`. Telemetry comes
    once a `period_s`: readings that are overdue grow old in it, and a GPU or driver that does not answer says so.
    """

    def __init__(self, machine: Machine, period_s: float = PERIOD_S, slow_every_s: float = SLOW_EVERY_S) -> None:
        self._watch = DriverWatch(machine.driver)
        self._virtual = machine.virtual
        self._period_s, self._slow_every_s = period_s, slow_every_s
        self._host, self._load, self._owners = HostLoad(), HostSample(), Owners()
        self._seq = 0
        self._tick_at = self._slow_at = self._wake_at = self._emit_by = 0.0
        self._pending = False  # a tick has begun and its telemetry is not written yet
        self._cpu_s = 0.0

    def filenos(self) -> List[int]:
        """List the descriptors to wait for; none in the moment after a question, so that answers gather."""
        if time.monotonic() < self._wake_at:
            return []
        return [child.fileno() for child in self._watch.children]

    def due(self) -> float:
        """Return the monotonic time when `step` must be called at the latest."""
        due = min(self._tick_at, self._watch.due())
        if self._pending:
            due = min(due, self._emit_by)
        return min(due, self._wake_at) if self._wake_at > time.monotonic() else due

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Take what the driver answered, and return the messages that are due. `ready` are readable descriptors."""
        began = time.process_time()
        self._watch.step()
        messages: List[Dict[str, Any]] = []
        if self._watch.changed:
            self._watch.changed = False
            messages.append({"t": "inventory", "inventory": self._inventory()})
            self._tick_at = self._slow_at = 0.0  # what is known of new GPUs comes at once
            self._pending = False
        now = time.monotonic()
        if now >= self._tick_at and not self._pending:
            self._begin(now)
        telemetry = None
        if self._pending and (now >= self._emit_by or (not self._watch.busy and now >= self._wake_at)):
            telemetry = self._emit()
            messages.append({"t": "telemetry", "telemetry": telemetry})
        self._cpu_s += time.process_time() - began
        if telemetry is not None:
            telemetry.tick_cpu_ms = round((self._cpu_s + self._watch.child_cpu_s) * 1000, 3)
            self._cpu_s = self._watch.child_cpu_s = 0.0
        return messages

    @property
    def inventory(self) -> Inventory:
        """Return the driver's GPUs, as far as they are known."""
        return self._watch.inventory

    @property
    def deaf(self) -> str:
        """Say why the driver tells no XIDs; empty where it does or that is not known yet."""
        return self._watch.deaf or ""

    def take_raised(self) -> List[Raised]:
        """Return the XIDs that the driver told since the last call."""
        raised, self._watch.raised = self._watch.raised, []
        return raised

    def close(self) -> None:
        """End the driver's child."""
        self._watch.close()

    def _begin(self, now: float) -> None:
        """Begin a tick: ask, and say until when its telemetry is written. Ticks that were missed are left out."""
        self._tick_at += self._period_s
        if self._tick_at <= now:
            self._tick_at = now + self._period_s
        self._watch.ask("lean")
        self._pending, self._emit_by, self._wake_at = True, now + EMIT_WAIT_S, now + ANSWER_WAIT_S

    def _emit(self) -> Telemetry:
        now, wall = time.monotonic(), time.time()
        self._pending = False
        self._seq += 1
        if now >= self._slow_at and not self._watch.busy:
            self._slow_at = now + self._slow_every_s
            self._watch.ask("slow")
            self._wake_at = now + ANSWER_WAIT_S
        self._owners.tick()
        if self._seq <= 2 or self._seq % HOST_EVERY_TICKS == 0:
            self._load = self._host.sample()
        gpus = [self._sample(gpu.index, now) for gpu in self._watch.inventory.gpus]
        self._owners.forget_others(holder.pid for gpu in gpus for holder in gpu.holders)
        return Telemetry(self._seq, wall, gpus, self._load)

    def _sample(self, index: int, now: float) -> GpuSample:
        newest = self._watch.newest.get(index) or Newest()
        readings = _aged(newest.readings, now - newest.at) if newest.at else dict.fromkeys(LEAN, NOT_READ)
        readings.update(_aged(newest.slow, now - newest.slow_at))
        problem = self._watch.problem_of(index)
        if not problem and newest.contexts.problem:
            readings.setdefault("holders", Reading(None, 0.0, newest.contexts.problem))
        return GpuSample(index, readings, self._owners.holders(newest.contexts.processes), problem)

    def _inventory(self) -> Inventory:
        return replace(self._watch.inventory, virtual=self._virtual)


def _aged(readings: Dict[str, Reading], age_s: float) -> Dict[str, Reading]:
    """Give readings their age, to a tenth of a second."""
    age_s = round(age_s, 1)
    if age_s <= 0:
        return dict(readings)
    return {name: Reading(value, age_s, problem) for name, (value, _, problem) in readings.items()}
