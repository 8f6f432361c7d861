"""What is known of the GPUs that are to be reset, read before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Set

from backend.agent import ours as registry
from backend.agent.holders import Holding, Scan
from backend.agent.reset import health
from backend.agent.reset.cycle import verify
from backend.agent.reset.gpureset import smi
from backend.agent.reset.gpureset.faults import faults
from backend.agent.reset.look import look
from backend.agent.reset.rules.case import Readings
from backend.agent.reset.watch import Watch
from backend.agent.reset.xids.gathering import newest_seq
from backend.agent.runtree import runs
from backend.agent.seam import Machine
from backend.wire import NOT_SUPPORTED, GpuFacts, GpuVerdict, Receipt, Refused, printable


@dataclass
class Target:
    """One GPU that is to be reset. `facts_unread` says why nvidia-smi told nothing of it."""

    facts: GpuFacts
    verdict: GpuVerdict
    minor: int
    readings: Readings
    faults: List[str] = field(default_factory=list)
    holders: List[Holding] = field(default_factory=list)
    said: Dict[str, str] = field(default_factory=dict)
    facts_unread: str = ""

    @property
    def address(self) -> str:
        """Return what nvidia-smi takes after -i."""
        return self.facts.uuid or self.facts.bus_id

    def number(self, name: str) -> Any:
        """Return a reading as a number, None where there is none."""
        return self.readings.get(name, NOT_SUPPORTED).number()


@dataclass
class Examined:
    """The targets, the indices of all GPUs, of those with links in use, and who could not be looked into.

    `receipt` is the verification that went before; `kernel_log_seq` the newest record of the kernel's log.
    """

    targets: List[Target]
    indices: Set[int]
    linked: Set[int]
    unseen: List[str]
    receipt: Receipt
    kernel_log_seq: int = -1


def examine(machine: Machine, named: Sequence[str], because: str) -> Examined:
    """Verify the host, then read of the named GPUs (by index or UUID) what a reset of them rests on.

    `because` is the operator's own reason, a fault like any other. Raises Refused where a GPU is not there.
    """
    receipt = verify(machine, accept_limited=False, keep=False)
    wanted = _indices(named, receipt.after)
    watch = Watch(machine.driver)
    try:
        watch.open()
        readings = health.read_surely(watch).gpus
        seen = look(machine.devices(), watch.inventory, watch.occupancy())
    finally:
        watch.close()
    linked = {index for index, one in readings.items() if one.get("nvlink_active", NOT_SUPPORTED).number()}
    targets = []
    for facts in watch.inventory.gpus:
        if facts.index not in wanted:
            continue
        target = Target(facts, wanted[facts.index], seen.minor(facts.index), readings.get(facts.index, {}))
        target.holders = [one for one in strangers(seen.scan) if target.minor in one.minors]
        target.faults = faults(target.verdict, receipt, target.readings, bool(target.holders))
        target.faults += ["the operator's reason: %s" % because] if because else []
        target.said, target.facts_unread = smi.query(machine.smi, target.address)
        targets.append(target)
    indices = {one.index for one in receipt.after}
    return Examined(targets, indices, linked, seen.scan.unseen(), receipt, newest_seq(machine.kernel_log))


def _indices(named: Sequence[str], known: Sequence[GpuVerdict]) -> Dict[int, GpuVerdict]:
    """Return the GPUs that are named. Raises Refused for one that is not there, and where none is named."""
    found = {}
    for name in named:
        one = next((one for one in known if name in (str(one.index), one.uuid)), None)
        if one is None:
            said = ", ".join("%d (%s)" % (gpu.index, gpu.uuid) for gpu in known) or "none"
            raise Refused("no-gpu", "there is no GPU %s on this host" % printable(name, 60), "GPUs: %s" % said)
        found[one.index] = one
    if not found:
        raise Refused("no-gpu", "name the GPUs that are to be reset")
    return found


def strangers(found: Scan) -> List[Holding]:
    """Return who of a scan lives and is no process of ours. One of ours that ended since is nobody's any more."""
    mine = {pid for pid, _ in registry.ours()}
    return [one for pid, one in sorted(found.holdings.items()) if pid not in mine and runs(pid, one.start_ticks)]
