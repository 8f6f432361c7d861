"""Gathering: the kernel log from boot on, and the driver's events from before the first signal on.

Each tells what the other may miss. The log has pids and words, and what was before; events need no right to read it.
What both tell is one sighting, the log's.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from backend.agent.kernelgpus import Address, address
from backend.agent.reset import baseline
from backend.agent.reset.watch import Watch
from backend.agent.reset.xids.sighting import AFTER, BEFORE, DRIVER, DURING, KERNEL_LOG, KILL, Sighting
from backend.agent.xid.kernellog import KernelLog, Record
from backend.agent.xid.lines import XID, Lines, Said

REGISTER_S = 1.0
"""How long the driver may take to register for events; it goes on without them, and says so."""


def newest_seq(path: str) -> int:
    """Return the number of the kernel log's newest record, -1 where it cannot be read or there is no log."""
    if not path:
        return -1
    log = KernelLog(path)
    log.read_all()
    log.close()
    return -1 if log.problem else log.newest_seq


class Gathering:
    """One reset's or verification's sightings, in order. `begin` it once the driver is open, before any signal.

    `gaps` says in words what could not be read, so that no XID seen is never taken for none.
    """

    def __init__(self, kernel_log: str, watch: Watch) -> None:
        self._watch, self._lines = watch, Lines()
        self._known: Dict[str, Any] = {}  # the GPUs of the baseline, by UUID
        self._log = KernelLog(kernel_log) if kernel_log else None
        self._phase = BEFORE
        self._signalled_at = self._cleared_at = float("inf")
        self._seen: List[Sighting] = []

    def begin(self) -> None:
        """Register for the driver's events, and read the log since boot."""
        self._known = baseline.load()["gpus"]
        self._watch.listen()
        end = time.monotonic() + REGISTER_S
        while self._watch.deaf is None and self._watch.indices and time.monotonic() < end:
            self._watch.step(end, [])
        self._read()
        self._phase = DURING

    def signalling(self) -> None:
        """Take note that the next thing is the first signal."""
        self._read()
        self._phase, self._signalled_at = KILL, time.monotonic()

    def cleared(self) -> None:
        """Take note that every GPU is free, or will not be."""
        self._read()
        self._phase, self._cleared_at = AFTER, time.monotonic()

    def all(self) -> List[Sighting]:
        """Return all sightings until now, each once."""
        self._read()
        return [*self._seen, *self._only_events()]

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            self._log.close()

    @property
    def problem(self) -> str:
        """Say why the log could not be read, or that there is none; empty where it was."""
        return "this machine has no kernel log of a driver" if self._log is None else self._log.problem

    def gaps(self) -> List[str]:
        """Say what is not known of XIDs; nothing on a machine whose driver says nothing to the kernel."""
        if self._log is None or not self._log.problem:
            return []
        return ["XIDs: %s%s" % (self._log.problem, self._deafness())]

    def notes(self) -> List[str]:
        """Say how far back the log goes, where that is not boot, and what of it was lost."""
        if self._log is None or self._log.problem:
            return []
        notes = []
        if not self._log.from_boot:
            since = Record(0, self._log.since_s, "").wall()
            stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
            notes.append("the kernel log goes back to %s only, not to boot: earlier XIDs are not known" % stamp)
        if self._log.lost:
            notes.append("the kernel log overwrote records before they were read: XIDs may be missing")
        return notes

    def _deafness(self) -> str:
        if self._watch.deaf == "":
            return "; those since its beginning were told by the driver"
        return "; the driver tells none either: %s" % (self._watch.deaf or "it does not answer")

    def _read(self) -> None:
        for one in self._log.read_all() if self._log is not None else ():
            said = self._lines.take(one.text)
            if said is not None:
                self._seen.append(self._placed(said, one.wall(), one.seq))

    def _placed(self, said: Said, at: float, seq: int) -> Sighting:
        """Find the GPU by its address, or by what the log and the baseline say was there."""
        gpus = self._watch.inventory.gpus
        sighting = Sighting(said, self._phase, at, seq, KERNEL_LOG)
        if said.bus is None or said.device:
            return sighting
        sighting.uuid = self._uuid_at(said.bus)
        for gpu in gpus:
            if address(gpu.bus_id) == said.bus or (gpu.uuid and gpu.uuid == sighting.uuid):
                sighting.gpu, sighting.uuid = gpu.index, gpu.uuid or sighting.uuid
                return sighting
        entry = self._known.get(sighting.uuid)
        nameless = [gpu.index for gpu in gpus if not gpu.uuid and not gpu.bus_id]
        if entry is not None and entry.get("index") in nameless:
            sighting.gpu = entry["index"]
        return sighting

    def _uuid_at(self, bus: Address) -> str:
        at_baseline = {address(entry.get("bus_id") or ""): uuid for uuid, entry in self._known.items()}
        return self._lines.uuids.get(bus) or at_baseline.get(bus, "")

    def _only_events(self) -> List[Sighting]:
        """Return the events that no line of the log tells of."""
        lines = [(one.gpu, one.said.number) for one in self._seen if one.phase != BEFORE and one.said.kind == XID]
        found = []
        for index, number, at in self._watch.raised:
            if (index, number) in lines:
                lines.remove((index, number))
                continue
            facts = next((gpu for gpu in self._watch.inventory.gpus if gpu.index == index), None)
            bus: Optional[Address] = address(facts.bus_id) if facts else None
            said = Said(XID, number, bus, "XID %d, told by the driver without its words" % number)
            phase = DURING if at < self._signalled_at else KILL if at < self._cleared_at else AFTER
            wall = time.time() - (time.monotonic() - at)
            found.append(Sighting(said, phase, wall, -1, DRIVER, index, facts.uuid if facts else ""))
        return found
