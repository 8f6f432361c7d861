"""The signals of a reset: ask, wait on the handles, kill what is left, look again for what they left behind.

Every signal goes through a pidfd that was bound before the first of them, so that none can reach another
process. Nothing waits a fixed time: each wait ends when its processes are gone.
"""

from __future__ import annotations

import errno
import signal
import time
from dataclasses import replace
from typing import Any, Callable, Dict, List, Set, Tuple

from backend.agent import procfs
from backend.agent.pidfd import Bound, Identity, same
from backend.agent.reset.clearance import MemoryCurve
from backend.agent.reset.look import Look
from backend.agent.reset.plan import ASK_FIRST
from backend.agent.reset.receipt import Journal
from backend.agent.reset.watch import Watch
from backend.wire import Plan, Process

ROUNDS = 3
"""How often what appears after a kill (heirs, late children) is killed too, before it is named instead."""

RECORD_S = 2.0
"""How long a run's supervisor may take to record the end of its run, after that end and before it is
killed."""

READ_EVERY_S = 0.1
"""How often the memory is read while victims are waited for: for the journal, nothing depends on it."""

Key = Tuple[int, int]
LookAgain = Callable[[], Tuple[Look, Plan]]


class PlanChanged(Exception):
    """What would be killed is no longer what was confirmed. Raised before any signal."""


def key(one: Process) -> Key:
    """Return what tells one process from another with the same pid, as far as /proc says."""
    return one.pid, one.start_ticks


class Ladder:
    """One reset's processes: bound, asked, killed. `look_again` takes a fresh look and plans from it."""

    def __init__(self, watch: Watch, curve: MemoryCurve, journal: Journal, look_again: LookAgain) -> None:
        self._watch, self._curve, self._journal, self._look_again = watch, curve, journal, look_again
        self._rounds = ROUNDS
        self.bound: Dict[Key, Bound] = {}
        self.victims: Dict[Key, Process] = {}
        self.signals: List[Dict[str, Any]] = []
        self.respawned: List[str] = []
        self.last_signal_at = time.monotonic()
        self._told: Set[Key] = set()
        self._next_reading = 0.0

    def bind(self, victims: List[Process]) -> None:
        """Hold every victim by a handle. One that has gone is noted; one that is no longer itself stops the
        reset."""
        for one in victims:
            bound = Bound.open(one.pid)
            if bound is None:
                self._journal.write("gone", "process %d had already ended" % one.pid, pid=one.pid)
                continue
            wanted = Identity(one.pid, one.start_ticks, one.uid, one.exe, one.pidfd_inode)
            if not same(wanted, bound.identity):
                bound.close()
                raise PlanChanged("process %d is no longer the one in the plan: %s" % (one.pid, bound.identity.exe))
            self.bound[key(one)], self.victims[key(one)] = bound, one

    def close(self) -> None:
        """Give the handles back."""
        for bound in self.bound.values():
            bound.close()

    def living(self) -> List[Process]:
        """Return the bound victims that are not dead."""
        return [self.victims[which] for which, bound in self.bound.items() if not bound.gone()]

    def exiting(self) -> bool:
        """Say whether a victim is still on its way out, so that a blocked driver is no hang."""
        return any(not bound.gone() for bound in self.bound.values())

    def fds(self) -> List[int]:
        """Return the handles of the victims that still live: each becomes readable when its process is
        dead."""
        return [bound.fd for bound in self.bound.values() if not bound.gone()]

    def stop(self, grace_s: float, deadline_s: float) -> Dict[str, float]:
        """End every bound victim and what they leave behind. Returns the seconds of grace and kill."""
        began = time.monotonic()
        first = [one for one in self.victims.values() if one.method == ASK_FIRST]
        rest = [one for one in self.victims.values() if one.method != ASK_FIRST]
        deaf = {key(one) for one in first + rest if procfs.ignores(one.pid, signal.SIGTERM)}
        for one in first + rest:
            self._send(one, signal.SIGTERM)
            self._send(one, signal.SIGCONT)  # a stopped process would not see it before
        for pid, _ in sorted(deaf):
            self._journal.write("note", "process %d ignores SIGTERM: it is not waited for" % pid, pid=pid)
        self._wait([which for which in self.victims if which not in deaf], began + grace_s)
        asked = time.monotonic()
        self._kill(rest, asked + deadline_s)
        self._wait([key(one) for one in first], time.monotonic() + RECORD_S)
        self._kill(first, asked + deadline_s)
        while self.another_round(asked + deadline_s):
            continue
        return {"grace": round(asked - began, 3), "kill": round(time.monotonic() - asked, 3)}

    def _kill(self, which: List[Process], until: float) -> None:
        """Kill those of a list that still live, in one pass, and wait for their death."""
        left = [one for one in which if not self.bound[key(one)].gone()]
        for one in left:
            self._send(one, signal.SIGKILL)
        self._wait([key(one) for one in left], until)

    def another_round(self, until: float) -> bool:
        """Look for what the dead left: heirs of their memory and late children are killed, others are named.

        Returns whether anything was killed; never more than ROUNDS times.
        """
        seen, plan = self._look_again()
        fresh = [one for one in plan.victims if key(one) not in self.victims]
        heirs = [one for one in fresh if self._related(one, seen)]
        for one in fresh:
            if one not in heirs and key(one) not in self._told:
                self._told.add(key(one))
                self.respawned.append(self._stranger(one))
                self._journal.write("note", self.respawned[-1], pid=one.pid)
        if not heirs or not self._rounds:
            return False
        self._rounds -= 1
        for one in heirs:
            self._journal.write("note", "left behind: process %d (%s)" % (one.pid, one.reason), pid=one.pid)
        try:
            self.bind([replace(one, reason="left behind by a victim: " + one.reason) for one in heirs])
        except PlanChanged as error:  # it became something else since the look a moment ago
            self._journal.write("note", str(error))
        self._kill([self.victims[key(one)] for one in heirs if key(one) in self.bound], until)
        return True

    def _related(self, one: Process, seen: Look) -> bool:
        """Say whether a process is of the victims: born of one, in a group or session that one led, or its
        heir."""
        dead = {pid for pid, _ in self.victims}
        stat = seen.family.stats.get(one.pid)
        if stat is None:
            return False
        if dead & ({stat.pgid, stat.sid} | set(seen.family.ancestors(one.pid))):
            return True
        runs = {victim.run_id for victim in self.victims.values() if victim.run_id}
        holding = seen.scan.holdings.get(one.pid)
        inherits = holding is not None and any(ghost in dead for _, ghost in seen.heir_of(holding))
        return one.run_id in runs or inherits

    def _stranger(self, one: Process) -> str:
        """Say who appeared since the plan, and who started it where that looks like a respawn."""
        parent = "process %d (%s)" % (one.ppid, procfs.command(one.ppid, 60))
        twins = [victim for victim in self.victims.values() if victim.exe == one.exe and victim.command == one.command]
        if twins or any(victim.ppid == one.ppid != 1 for victim in self.victims.values()):
            return "process %d came back after the kill: %s starts it again; stop that first" % (one.pid, parent)
        return "process %d (%s) appeared during the reset and was left alone" % (one.pid, one.command[:60])

    def _send(self, one: Process, number: int) -> None:
        """Send one signal through the handle and journal it with its errno."""
        code = self.bound[key(one)].send(number)
        if number != signal.SIGCONT:
            self.last_signal_at = time.monotonic()
        name = signal.Signals(number).name
        said = "" if not code else ": %s" % errno.errorcode.get(code, str(code))
        event = self._journal.write("signal", "%s to %d%s" % (name, one.pid, said), pid=one.pid, signal=name,
                                    errno=code)  # fmt: skip
        self.signals.append({"at_s": event.at_s, "pid": one.pid, "signal": name, "error": said[2:]})

    def _wait(self, which: List[Key], until: float) -> None:
        """Wait until these are dead, taking in what the driver says meanwhile."""
        living = which
        while True:
            living = [one for one in living if not self._gone(one)]
            if not living or time.monotonic() >= until:
                return
            now = time.monotonic()
            if self._watch.idle and now >= self._next_reading:
                self._curve.note(self._watch.latest("occupancy"))
                self._watch.request("occupancy")
                self._next_reading = now + READ_EVERY_S
            until_next = min(until, max(self._next_reading, now + 0.02))
            self._watch.step(until_next, [self.bound[one].fd for one in living], self.exiting)

    def _gone(self, which: Key) -> bool:
        if not self.bound[which].gone():
            return False
        if which not in self._told:
            self._told.add(which)
            self._journal.write("gone", "process %d is gone" % which[0], pid=which[0])
        return True


def describe_stuck(pid: int) -> str:
    """Say what a process that does not die is doing: its state, where in the kernel, whether the kill is
    pending."""
    fields = procfs.status(pid)
    where = (procfs.read_bytes("/proc/%d/wchan" % pid) or b"").decode("ascii", "replace").strip("\0 \n")
    pending = int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16)
    words = ["state %s" % (fields.get("State") or "unknown")]
    if where and where != "0":
        words.append("waits in %s" % where)
    if pending & (1 << (signal.SIGKILL - 1)):
        words.append("SIGKILL is pending")
    return ", ".join(words)
