"""The plan of a reset: who would be ended and why, who is spared and why, and a digest of the former.

A process is a victim by what it holds, never by its name: it has a GPU's files open or mapped, and either the
driver names it for that GPU, or it belongs to a run of ours, or it holds what a ghost left. With it go its
descendants, and with a member of a run the whole run. In doubt a process is spared, and the verdict then says
who still holds what.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Protocol, Set, Tuple

from backend.agent import ours as registry
from backend.agent import procfs
from backend.agent.holders import PF_KTHREAD
from backend.agent.pidfd import Identity, identify
from backend.agent.reset import baseline
from backend.agent.reset.family import Family
from backend.agent.reset.look import Look, holds_context
from backend.agent.reset.losses import losses
from backend.agent.reset.protect import protected
from backend.wire import NOT_SUPPORTED, Plan, Process, Reading, Refused, Run, printable

ASK, ASK_FIRST = "SIGTERM, then SIGKILL", "SIGTERM first of all, SIGKILL last of all"
"""The methods: a run's supervisor is asked first, so that it restarts nothing, and killed last, so that it
can record how its run ended."""

GRACE_S, GRACE_S_PER_GB = 10.0, 0.25
DEADLINE_S, DEADLINE_LEAST_S = 15.0, 30.0
LONGEST_S = 600.0
"""Unpinning took 0.06 to 0.17 s a GB of RssShmem on H200s, 0.25 is planned (facts: reset, head and section
4)."""


class Runs(Protocol):
    """What a plan asks about detached runs; `runs.RunStore` answers it."""

    def run_of(self, pid: int) -> Optional[str]:
        """Return the id of the run that a process belongs to."""

    def get(self, run_id: str) -> Optional[Run]:
        """Return a run."""

    def list(self) -> Iterable[Run]:
        """Return every run that the host holds."""

    def members(self, run_id: str) -> Set[Tuple[int, int]]:
        """Return (pid, start ticks) of its live processes, without its supervisor."""


@dataclass
class _Draft:
    """A plan in the making: reasons by pid."""

    seen: Look
    other_users: bool
    spared_ids: Set[int]
    ours: Set[int]
    victims: Dict[int, str] = field(default_factory=dict)
    spared: Dict[int, str] = field(default_factory=dict)
    runs: Dict[str, Run] = field(default_factory=dict)
    run_of: Dict[int, str] = field(default_factory=dict)
    supervisors: Set[int] = field(default_factory=set)

    def take(self, pid: int, reason: str) -> None:
        """Make a process a victim, unless something spares it."""
        if pid in self.victims:
            return
        kept = self.spare_reason(pid)
        if kept:
            self.spared.setdefault(pid, kept + "; " + reason)
        else:
            self.victims[pid] = reason

    def spare_reason(self, pid: int) -> str:
        """Return why a process may not be signalled, in words, or an empty string where it may."""
        if pid == os.getpid() or pid in self.spared_ids:
            return "this reset's own process or an ancestor of it"
        if pid in self.ours and pid not in self.supervisors:
            return "eightzeros itself"
        stat = self.seen.family.stats.get(pid)
        if pid == 1 or stat is None or stat.flags & PF_KTHREAD:
            return "the kernel's or init"
        uid = procfs.uid(pid)
        if uid != os.geteuid() and not self.other_users:
            return "belongs to another user (%s)" % procfs.user_name(uid)
        return protected(procfs.exe(pid))


def make_plan(seen: Look, runs: Runs, other_users: bool) -> Plan:
    """Decide who would be ended. Reads only; the same host gives the same digest."""
    family, me = seen.family, os.getpid()
    ancestors = set(family.ancestors(me))
    own = {pid for pid, start in registry.ours() if family.is_(pid, start)}
    draft = _Draft(seen, other_users, ancestors, own)
    _take_runs(draft, runs)
    _take_named(draft)
    _take_heirs(draft)
    _take_descendants(draft)
    _spare_rest(draft)
    return _plan(draft, runs)


def _take_runs(draft: _Draft, runs: Runs) -> None:
    """Take every run of which a member holds a GPU: the whole run ends, its supervisor too."""
    family = draft.seen.family
    for pid in draft.seen.scan.holdings:
        name = runs.run_of(pid) if draft.seen.scan.holdings[pid].minors else None
        run = runs.get(name) if name and name not in draft.runs else None
        if name is None or run is None or run.stage == "reset":
            continue
        draft.runs[name] = run
        if family.is_(run.supervisor_pid, run.supervisor_start):
            draft.supervisors.add(run.supervisor_pid)
            draft.run_of[run.supervisor_pid] = name
            draft.take(run.supervisor_pid, "supervises run %s" % name)
        for member, start in sorted(runs.members(name)):
            if family.is_(member, start):
                draft.run_of[member] = name
                draft.take(member, "belongs to run %s" % name)


def _take_named(draft: _Draft) -> None:
    for pid, shares in draft.seen.named.items():
        which = ", ".join(str(index) for index in sorted(shares))
        draft.take(pid, "has a context on GPU %s" % which)
    for pid, shares in draft.seen.hidden.items():
        which = ", ".join(str(index) for index in sorted(shares))
        owner = procfs.user_name(procfs.uid(pid))
        draft.spared[pid] = "named by the driver for GPU %s, but it may not be looked into (%s)" % (which, owner)


def _take_heirs(draft: _Draft) -> None:
    for pid, holding in draft.seen.scan.holdings.items():
        for index, ghost in draft.seen.heir_of(holding):
            blamed = "process %d, which holds no file of it" % ghost if ghost else "nobody"
            draft.take(pid, "holds memory of GPU %d, for which the driver names %s" % (index, blamed))


def _take_descendants(draft: _Draft) -> None:
    """Take what the victims started. Nothing is taken through a process that is spared."""
    family, roots = draft.seen.family, sorted(draft.victims)
    kept = {pid for pid in family.descendants(roots) if pid not in draft.victims and draft.spare_reason(pid)}
    for pid in sorted(family.descendants(roots, stop=kept.__contains__)):
        if pid in draft.victims or not family.stats.get(pid) or family.stats[pid].dead:
            continue
        draft.take(pid, "started by victim %d" % next(up for up in family.ancestors(pid) if up in draft.victims))


def _spare_rest(draft: _Draft) -> None:
    """Say of everyone else who holds a GPU why it is left alone."""
    for pid, holding in draft.seen.scan.holdings.items():
        if pid in draft.victims or pid in draft.spared or not holding.minors:
            continue
        doubt = any(holds_context(holding, minor) for minor in holding.minors)
        text = "the driver names no context of it; in doubt" if doubt else "a monitor: no context"
        draft.spared[pid] = (draft.spare_reason(pid) or text) + "; has " + holding.how()


def _plan(draft: _Draft, runs: Runs) -> Plan:
    victims = [one for one in (_describe(draft, pid) for pid in draft.victims) if one is not None]
    victims.sort(key=lambda one: (one.method != ASK_FIRST, draft.seen.family.depth(one.pid), one.pid))
    spared = [one for one in (_describe(draft, pid) for pid in sorted(draft.spared)) if one is not None]
    pinned_gb = sum(one.pinned_bytes for one in victims) / 1e9
    seen = draft.seen
    return Plan(
        digest=digest(victims), victims=victims, spared=spared, ghosts=seen.ghosts, unseen=_unseen(seen),
        losses=losses(draft.runs, victims, runs.list()), baseline=baseline.in_words(baseline.load(), seen.inventory),
        grace_s=min(LONGEST_S, GRACE_S + GRACE_S_PER_GB * pinned_gb),
        deadline_s=min(LONGEST_S, max(DEADLINE_LEAST_S, DEADLINE_S + GRACE_S_PER_GB * pinned_gb)),
    )  # fmt: skip


def digest(victims: List[Process]) -> str:
    """Return what the operator confirms: who would be signalled, as which program and user, and how."""
    rows = sorted([one.pid, one.start_ticks, one.exe, one.uid, one.method] for one in victims)
    return hashlib.sha256(json.dumps(rows).encode("ascii")).hexdigest()


def difference(planned: List[Process], now: Plan, family: Family) -> str:
    """Say why a plan is no longer the one that was confirmed, or an empty string where it still is.

    Who has ended since is no difference, nor is what the planned ones have started since: a server forks all the time.
    """
    known = {(one.pid, one.start_ticks): one for one in planned}
    pids = {one.pid for one in planned}
    for one in now.victims:
        before = known.get((one.pid, one.start_ticks))
        if before is None and not pids & set(family.ancestors(one.pid)):
            return "process %d (%s) is new: it %s" % (one.pid, one.command[:80], one.reason)
        if before is not None and (before.exe, before.uid) != (one.exe, one.uid):
            return "process %d now runs %s, not %s" % (one.pid, one.exe, before.exe)
    return ""


def _describe(draft: _Draft, pid: int) -> Optional[Process]:
    """Read a process for the plan. A victim that cannot be bound is gone; a spared one need not be."""
    stat, victim = draft.seen.family.stats.get(pid), pid in draft.victims
    identity = _identify(pid) if victim else None
    if stat is None or (victim and (identity is None or identity.start_ticks != stat.start_ticks)):
        return None
    uid = identity.uid if identity else procfs.uid(pid)
    exe = identity.exe if identity else printable(procfs.exe(pid))
    holding = draft.seen.scan.holdings.get(pid)
    return Process(
        pid=pid, start_ticks=stat.start_ticks, pidfd_inode=identity.inode if identity else 0, ppid=stat.ppid,
        uid=-1 if uid is None else uid, user=procfs.user_name(uid), exe=exe,
        command=procfs.command(pid), age_s=procfs.age_s(stat.start_ticks),
        gpus=draft.seen.gpus(holding) if holding else sorted(draft.seen.hidden.get(pid, {})),
        used_bytes=_used(draft.seen.named.get(pid) or draft.seen.hidden.get(pid) or {}),
        pinned_bytes=procfs.kib(procfs.status(pid), "RssShmem"), run_id=draft.run_of.get(pid, ""),
        reason=draft.victims[pid] if victim else draft.spared[pid],
        method=(ASK_FIRST if pid in draft.supervisors else ASK) if victim else "",
    )  # fmt: skip


def _identify(pid: int) -> Optional[Identity]:
    """Identify a victim. Raises Refused where this kernel cannot bind a process: then nothing is signalled at
    all."""
    try:
        return identify(pid)
    except OSError as error:
        text = "this kernel gives no handle on a process (pidfd_open: %s)" % (error.strerror or error)
        hint = "Linux 5.3 or newer is needed; in a container, its seccomp profile must allow it"
        raise Refused("no-pidfd", text, hint) from None


def _used(shares: Dict[int, Reading]) -> Reading:
    """Add up what the driver attributes to a process; one share that is no value spoils the sum."""
    for reading in shares.values():
        if not reading.ok:
            return reading
    if not shares:
        return NOT_SUPPORTED  # the driver attributes nothing to it: a heir, or a process without a context
    return Reading(sum(int(reading.number() or 0) for reading in shares.values()))


def _unseen(seen: Look) -> List[str]:
    said = seen.scan.unseen()
    if seen.inventory.problem:
        said.append("the driver: %s" % seen.inventory.problem)
    for gpu in seen.inventory.gpus:
        if gpu.index not in seen.occupancy:
            said.append("GPU %d: the driver does not answer" % gpu.index)
        elif seen.occupancy[gpu.index][1].problem:
            said.append("GPU %d: its process lists: %s" % (gpu.index, seen.occupancy[gpu.index][1].problem))
    return said
