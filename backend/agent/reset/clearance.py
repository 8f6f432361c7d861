"""Is every GPU free, and stays so? Polled quickly, then slower; it ends the moment the answer is known.

Memory comes back before the process can be reaped, or after it, so both are required; and a GPU that reads
free once is not free yet: it has to stay so for STABLE_S and at least SAMPLES readings (facts: reset,
sections 2 and 4).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Set

from backend.agent import ours as registry
from backend.agent import procfs
from backend.agent.reset import baseline
from backend.agent.reset.look import Look, Occupancy, holds_context, look
from backend.agent.reset.plan import LONGEST_S
from backend.agent.reset.protect import protected
from backend.agent.reset.receipt import Journal
from backend.agent.reset.watch import Watch
from backend.agent.seam import ContextList, DeviceTable
from backend.wire import MIB, Reading, failed

STABLE_S, SAMPLES = 1.0, 3
SETTLED_S = 2.0
"""How long a GPU that somebody who lives on holds is watched before it is called not clean."""

FALLING_S = 5.0
"""While memory fell within so long, the deadline is not the end: only LONGEST_S is."""

LOOK_EVERY_S = 1.0


@dataclass
class GpuState:
    """What one GPU is at a moment. `why` is empty where it is free; `unknown` says why that cannot be
    told."""

    index: int
    uuid: str
    limit: baseline.Limit
    minor: int = 0
    used: Reading = field(default_factory=lambda: failed("not read"))
    why: List[str] = field(default_factory=list)
    pids: Set[int] = field(default_factory=set)
    held_by: Set[int] = field(default_factory=set)
    limited: List[str] = field(default_factory=list)
    drawn_on: bool = False  # by a display server, which is no reason against it
    unknown: str = ""

    @property
    def address(self) -> str:
        """Return what nvidia-smi takes after -i; a GPU that is lost may have no UUID."""
        return self.uuid or str(self.index)

    @property
    def free(self) -> bool:
        """Say whether it is known to be free."""
        return not self.why and not self.unknown


def states(seen: Look, unknown: Dict[int, str], stored: Dict[str, Any]) -> Dict[int, GpuState]:
    """Say of every GPU what keeps it from being free, with the processes named."""
    found = {}
    for gpu in seen.inventory.gpus:
        state = GpuState(gpu.index, gpu.uuid, baseline.limit(stored, seen.inventory, gpu.index))
        state.minor = seen.minor(gpu.index)
        found[gpu.index] = state
        if gpu.index not in seen.occupancy:
            state.unknown = unknown.get(gpu.index) or gpu.problem or "the driver does not answer"
            continue
        _memory_and_lists(state, *seen.occupancy[gpu.index])
        _holders(state, seen)
        state.limited.extend(seen.scan.unseen())
    return found


def _memory_and_lists(state: GpuState, used: Reading, contexts: ContextList) -> None:
    """Set a GPU's memory and process lists against what a free GPU shows."""
    state.used = used
    value = used.number()
    if used.unsupported:
        state.limited.append("this GPU does not report its memory")
    elif value is None:
        state.unknown = "its memory could not be read: %s" % used.problem
    elif value > state.limit.most_bytes:
        state.why.append("%s in use, at most %s expected (%s)" % (
            mib(value), mib(state.limit.most_bytes), state.limit.said or "no baseline"))  # fmt: skip
    if contexts.problem:
        state.unknown = state.unknown or "its process lists could not be read: %s" % contexts.problem
    for pid, _, kind in contexts.processes:
        if kind == "graphics" and protected(procfs.exe(pid)):
            state.drawn_on = True
            continue  # a display server draws on it; what it holds is part of the baseline
        state.pids.add(pid)
        state.why.append(_listed(pid, kind))


def _listed(pid: int, kind: str) -> str:
    if not lives(pid):
        return "the driver still names process %d, which is gone" % pid
    return "process %d (%s) has a %s context" % (pid, procfs.command(pid, 60), kind)


def _holders(state: GpuState, seen: Look) -> None:
    """Name who has the GPU's files and is neither ours, protected, nor a mere monitor."""
    ours = {pid for pid, start in registry.ours() if seen.family.is_(pid, start)}
    for pid, holding in seen.scan.holdings.items():
        if state.minor not in holding.minors:
            continue
        if holds_context(holding, state.minor) or pid in state.pids:
            state.held_by.add(pid)
        named = pid in state.pids or pid in ours or protected(procfs.exe(pid))
        if not named and holds_context(holding, state.minor):
            state.why.append("process %d (%s) has %s" % (pid, procfs.command(pid, 60), holding.how()))


def mib(count: float) -> str:
    """Write bytes for the operator."""
    return "%.1f GiB" % (count / (1 << 30)) if count >= 10 * 1024 * MIB else "%.0f MiB" % (count / MIB)


@dataclass
class Clearance:
    """How it ended: `release_s` is from the last signal to the first of the readings that stayed clear."""

    states: Dict[int, GpuState]
    release_s: Optional[float] = None
    waited_s: float = 0.0
    ended: str = ""  # clear, deadline, settled, unknown


class MemoryCurve:
    """What each GPU's memory did, as events of the journal; `fell_at` is when it last fell."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._used: Dict[int, float] = {}
        self.fell_at = 0.0

    def note(self, occupancy: Occupancy) -> None:
        """Take in one reading; changes of a MiB and more become events."""
        for index, (used, _) in occupancy.items():
            value, before = used.number(), self._used.get(index)
            if value is None or (before is not None and abs(value - before) < MIB):
                continue
            text = "GPU %d: %s in use" % (index, mib(value))
            self._journal.write("memory", text, gpu=index, used_bytes=int(value))
            if before is not None and value < before:
                self.fell_at = time.monotonic()
            self._used[index] = value


class Clearing:
    """Polls until every GPU that answers is free and stays so, or until it is known that it will not be."""

    def __init__(self, watch: Watch, devices: Callable[[], DeviceTable], curve: MemoryCurve) -> None:
        self._watch, self._devices, self._curve = watch, devices, curve
        self._stored = baseline.load()
        self._looked_at = 0.0
        self._states: Dict[int, GpuState] = {}

    def wait(self, since: float, deadline_s: float, living: Callable[[], List[int]]) -> Clearance:
        """Wait for the all-clear, counted from the last signal. `living` gives handles of victims not dead
        yet."""
        end, cap = since + deadline_s, since + max(deadline_s, LONGEST_S)
        clear_since, samples, settled_since = 0.0, 0, 0.0
        while True:
            began = time.monotonic()
            occupancy = self._sample(living, end)
            quick = self._quick(occupancy) and not living()
            if quick or began - self._looked_at >= LOOK_EVERY_S or not self._states:
                self._look(occupancy)
            clear = quick and all(state.free or state.unknown for state in self._states.values())
            samples, clear_since = (samples + 1, clear_since or began) if clear else (0, 0.0)
            now = time.monotonic()
            if clear and samples >= SAMPLES and now - clear_since >= STABLE_S:
                release_s = max(0.0, clear_since - since)
                return self._done("clear", since, release_s)
            if not self._watch.indices:
                self._look(occupancy)
                return self._done("unknown", since)
            explained = not clear and not living() and self._explained()
            settled_since = (settled_since or now) if explained else 0.0
            if settled_since and now - settled_since >= SETTLED_S:
                return self._done("settled", since)
            if not clear and ((now > end and now - self._curve.fell_at > min(FALLING_S, deadline_s)) or now > cap):
                self._look(occupancy)
                return self._done("deadline", since)
            self._watch.step(began + self._pace(began - since, clear), living(), lambda: bool(living()))

    def _done(self, how: str, since: float, release_s: Optional[float] = None) -> Clearance:
        return Clearance(self._states, release_s, time.monotonic() - since, how)

    @staticmethod
    def _pace(elapsed_s: float, clear: bool) -> float:
        if elapsed_s < 2.0:
            return 0.1
        return 0.25 if elapsed_s < 10.0 or clear else 1.0

    def _sample(self, living: Callable[[], List[int]], end: float) -> Occupancy:
        """Take one reading of every GPU that answers, until the deadline where the driver blocks behind a
        victim."""
        occupancy = self._watch.occupancy(lambda: bool(living()) and time.monotonic() < end)
        self._curve.note(occupancy)
        return occupancy

    def _quick(self, occupancy: Occupancy) -> bool:
        """Say whether memory and lists alone would allow a clear: only then are the processes scanned at each
        poll."""
        for gpu in self._watch.inventory.gpus:
            if gpu.index in occupancy:
                limit = baseline.limit(self._stored, self._watch.inventory, gpu.index)
                state = GpuState(gpu.index, gpu.uuid, limit)
                _memory_and_lists(state, *occupancy[gpu.index])
                if state.why:
                    return False
        return True

    def _look(self, occupancy: Occupancy) -> None:
        self._looked_at = time.monotonic()
        whole = look(self._devices(), self._watch.inventory, occupancy)
        self._states = states(whole, self._watch.unknown, self._stored)

    def _explained(self) -> bool:
        """Say whether every GPU that is not free is held by a process that lives on, so that waiting is in
        vain."""
        busy = [state for state in self._states.values() if state.why]
        return bool(busy) and all(any(lives(pid) for pid in state.held_by | state.pids) for state in busy)


def lives(pid: int) -> bool:
    """Say whether a process is more than a zombie: its leader may be one while a thread of it goes on."""
    stat = procfs.stat(pid)
    return stat is not None and (not stat.dead or len(procfs.threads(pid)) > 1)
