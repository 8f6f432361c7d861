"""XIDs for whoever watches: those of the kernel's log since boot, and each new one, from the log or the driver.

The log is read without waiting, in bounded bites; the driver's events come through the telemetry's child, in a thread
of its own, so that neither can hold up the agent. An event waits a moment for its line, which has words and a pid.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Set, Tuple

from backend.agent import ours, procfs
from backend.agent.kernelgpus import Address, address, foreign, written
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.agent.xid.catalogue import FAIL, OWN_KILL, WARN
from backend.agent.xid.kernellog import KernelLog
from backend.agent.xid.lines import SXID, XID, Lines, Said
from backend.wire import Xid, printable

PERIOD_S = 1.0
LINE_WAIT_S = 1.0
"""How long an event waits for its line; the driver writes the line first."""

FIRST_WAIT_S, SOON_S = 5.0, 0.1
"""How long the first tale waits until the log is read and the driver has listed its GPUs, which gives addresses their
numbers; and how often it looks whether it has."""

TOLD_MOST = 100
"""XIDs since boot that are told at first, the newest; later ones that are told at once."""

LEVELS = {FAIL: "bad", WARN: "warn"}
LOST = "XIDs: the kernel log overwrote records before they were read, so that some may be missing"
NO_LOG = "XIDs: %s; they are told from now on, as the driver raises them"
NOTHING = "XIDs: %s; the driver tells none either: %s"


@dataclass
class _Heard:
    said: Said
    id: str
    at: float
    gpu: Optional[int] = None
    count: int = 1


class XidSource:
    """A source of the agent's loop: {"t": "xids", "xids": [Xid], "gap": why not all can be told, "first": bool}.

    `first` is true once, of what the log had when the agent began.
    """

    def __init__(self, machine: Machine, telemetry: TelemetrySource) -> None:
        self._telemetry = telemetry
        self._log = KernelLog(machine.kernel_log) if machine.kernel_log else None
        self._withheld = [bus for bus in map(address, machine.devices().withheld()) if bus] if self._log else []
        self._lines, self._boot = Lines(), procfs.boot_id()
        self._began = time.monotonic()
        self._next = 0.0
        self._told_first = False
        self._told_gap = ""
        self._heard: List[_Heard] = []
        self._events: List[Tuple[int, int, float]] = []
        self._events_told = 0
        self._recent: List[Tuple[Optional[int], int, float]] = []  # lines that an event may still belong to

    def filenos(self) -> List[int]:
        """Return nothing: the log is looked at, not waited for, so that a flood of it wakes nobody."""
        return []

    def due(self) -> float:
        """Return when to look again, on the monotonic clock."""
        return self._next

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Tell what is new."""
        now = time.monotonic()
        self._events += self._telemetry.take_raised()
        if now < self._next:
            return []
        self._next = now + PERIOD_S
        if self._log is None and not self._events:
            return []
        self._read()
        if not self._told_first and now < self._began + FIRST_WAIT_S:
            if self._log is not None and self._log.behind:
                self._next = now
                return []
            if not self._telemetry.inventory.gpus and not self._telemetry.inventory.problem:
                self._next = now + SOON_S
                return []
        return self._tell(now)

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            self._log.close()

    def _read(self) -> None:
        """Take a bite of the log; of a flood only the newest are kept."""
        for one in self._log.read() if self._log is not None else ():
            said = self._lines.take(one.text)
            if said is not None:
                self._heard.append(_Heard(said, "%s:%d" % (self._boot, one.seq), one.wall()))
        del self._heard[: -10 * TOLD_MOST]

    def _tell(self, now: float) -> List[Dict[str, Any]]:
        for one in self._heard:
            one.gpu = self._gpu_at(one.said)
            if one.said.kind == XID:
                self._recent.append((one.gpu, one.said.number, now))
        self._recent = [one for one in self._recent if now - one[2] < 5 * LINE_WAIT_S]
        found = self._grouped([one for one in self._heard if not self._foreign(one)]) + self._unmatched(now)
        self._heard = []
        gap = self._gap()
        first, self._told_first = self._log is not None and not self._told_first, True
        if not (found or first or gap != self._told_gap):
            return []
        self._told_gap = gap
        rows = [self._row(one, first) for one in found[-TOLD_MOST:]]
        return [{"t": "xids", "xids": rows, "gap": gap, "first": first}]

    def _unmatched(self, now: float) -> List[_Heard]:
        """Return the events whose line did not come."""
        found, waiting = [], []
        for index, number, at in self._events:
            line = next((one for one in self._recent if one[:2] == (index, number)), None)
            if line is not None:
                self._recent.remove(line)
            elif self._log is not None and not self._log.problem and now - at < LINE_WAIT_S:
                waiting.append((index, number, at))
            else:
                self._events_told += 1
                said = Said(XID, number, self._bus_of(index), "")
                name = "event:%d:%d:%d" % (os.getpid(), int(self._began * 1e3), self._events_told)
                found.append(_Heard(said, name, time.time() - (now - at), index))
        self._events = waiting
        return self._grouped(found)

    @staticmethod
    def _grouped(heard: List[_Heard]) -> List[_Heard]:
        """Put together what came again and again by the same process."""
        groups: Dict[Any, _Heard] = {}
        for one in heard:
            said = one.said
            key = (said._replace(text=""), one.gpu, int(one.at))
            if key in groups:
                one.count += groups.pop(key).count
            groups[key] = one
        return list(groups.values())

    def _row(self, one: _Heard, first: bool) -> Xid:
        said, gpus = one.said, self._telemetry.inventory.gpus
        uuid = next((gpu.uuid for gpu in gpus if gpu.index == one.gpu), "")
        level, text = LEVELS.get(said.meaning.level, "info"), said.what
        if not said.whole or not said.number:
            text += ": `%s`" % printable(said.text, 200)
        if said.kind == XID and said.weighs_as in OWN_KILL and not first and ours.role_lives("reset"):
            level, text = "info", text + " (a reset runs: its receipt says whether its kill caused it)"
        target = uuid or (written(said.bus) if said.bus else "the GPU")
        return Xid(one.id, one.at, one.gpu, self._where(one), said.number, level, text,
                   said.meaning.advice.format(address=target), said.pid, printable(said.name), one.count)  # fmt: skip

    def _where(self, one: _Heard) -> str:
        if one.gpu is not None:
            return "GPU %d" % one.gpu
        bus = written(one.said.bus) if one.said.bus else "an unreadable address"
        uuid = self._lines.uuids.get(one.said.bus) if one.said.bus else None
        return "%s at %s%s" % (one.said.device or "the GPU", bus, " (%s)" % uuid if uuid else "")

    def _gpu_at(self, said: Said) -> Optional[int]:
        if said.bus is None or said.kind == SXID:
            return None
        uuid = self._lines.uuids.get(said.bus)
        return next((gpu.index for gpu in self._telemetry.inventory.gpus
                     if address(gpu.bus_id) == said.bus or (uuid and gpu.uuid == uuid)), None)  # fmt: skip

    def _bus_of(self, index: int) -> Optional[Address]:
        found = next((gpu.bus_id for gpu in self._telemetry.inventory.gpus if gpu.index == index), "")
        return address(found)

    def _foreign(self, one: _Heard) -> bool:
        return one.gpu is None and one.said.kind != SXID and foreign(one.said.bus, self._withheld)

    def _gap(self) -> str:
        """Say what cannot be told."""
        if self._log is None or not (self._log.problem or self._log.lost):
            return ""
        if not self._log.problem:
            return LOST
        deaf = self._telemetry.deaf
        return NOTHING % (self._log.problem, deaf) if deaf else NO_LOG % self._log.problem
