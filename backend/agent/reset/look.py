"""One look at a host: what the driver says, who has the device files open, who descends from whom.

The driver names processes; the kernel knows which of them hold its files. Neither is believed alone. A name
without files is a ghost: the process is gone while a forked child keeps its memory, or the number is of
another pid namespace and means some innocent process here (facts: reset, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Set, Tuple

from backend.agent.holders import Holding, Scan, scan
from backend.agent.reset import baseline
from backend.agent.reset.family import Family
from backend.agent.seam import ContextList, DeviceTable
from backend.wire import Inventory, Reading

CONTEXT_FILES = 8
"""From so many open files of one GPU's device a process counts as one that has, or inherited, a CUDA context.

Measured on an H200 (R580.159): an NVML client (nvidia-smi dmon, a library user) has 3 open and maps none; a
process that only called cuInit has 4 open and 2 mappings; one context has 20 open and 3 mappings, and so has
a forked child of it, whether its parent lives or not."""

MONITOR_FILES = 3


def holds_context(holding: Holding, minor: int) -> bool:
    """Say whether a process holds a GPU as a context does. Mappings whose file was closed are no monitor's
    either."""
    files, maps = holding.fds.get(minor, 0), holding.maps.get(minor, 0)
    return files >= CONTEXT_FILES or (maps > 0 and files == 0)


def more_than_monitor(holding: Holding, minor: int) -> bool:
    """Say whether a process holds more of a GPU than an NVML client does."""
    return holding.fds.get(minor, 0) > MONITOR_FILES or holding.maps.get(minor, 0) > 0


Occupancy = Dict[int, Tuple[Reading, ContextList]]
"""What `Driver.occupancy` said, by GPU index; a GPU that did not answer is absent."""


@dataclass
class Look:
    """Driver, files and families at one moment.

    `named` is (GPU index -> bytes) of each process that the driver names and that holds that GPU's files; `hidden` are
    processes that it names and that may not be looked into; `ghosts` the names without files; `haunted` the ghosts by
    GPU, where 0 stands for memory that nobody is named for.
    """

    inventory: Inventory
    occupancy: Occupancy
    scan: Scan
    family: Family
    named: Dict[int, Dict[int, Reading]] = field(default_factory=dict)
    hidden: Dict[int, Dict[int, Reading]] = field(default_factory=dict)
    ghosts: List[Dict[str, Any]] = field(default_factory=list)
    haunted: Dict[int, Set[int]] = field(default_factory=dict)

    def minor(self, index: int) -> int:
        """Return a GPU's device minor; where the driver does not say, its index."""
        for gpu in self.inventory.gpus:
            if gpu.index == index and gpu.minor >= 0:
                return gpu.minor
        return index

    def gpus(self, holding: Holding) -> List[int]:
        """Return the indices of the GPUs that a process holds."""
        by_minor = {self.minor(gpu.index): gpu.index for gpu in self.inventory.gpus}
        return sorted(by_minor.get(minor, minor) for minor in holding.minors)

    def heir_of(self, holding: Holding) -> List[Tuple[int, int]]:
        """Return (GPU index, ghost) for each GPU whose memory a process is taken to hold after somebody else.

        It holds as much of the GPU as a context does; or, in the ghost's own group or session, more than a
        monitor.
        """
        found = []
        stat = self.family.stats.get(holding.pid)
        for index, ghosts in self.haunted.items():
            minor = self.minor(index)
            kin = ghosts & {stat.pgid, stat.sid} if stat is not None else set()
            if holds_context(holding, minor):
                found.append((index, min(kin or ghosts)))
            elif kin and more_than_monitor(holding, minor):
                found.append((index, min(kin)))
        return found


def look(table: DeviceTable, inventory: Inventory, occupancy: Occupancy) -> Look:
    """Scan the processes and set what the driver says against what they hold."""
    seen = Look(inventory, occupancy, scan(table), Family())
    for index, (used, contexts) in sorted(occupancy.items()):
        for pid, share, _kind in contexts.processes:
            _place(seen, index, pid, share)
        if not contexts.processes and not contexts.problem and _beyond_baseline(inventory, index, used):
            seen.haunted.setdefault(index, set()).add(0)
    return seen


def _place(seen: Look, index: int, pid: int, share: Reading) -> None:
    holding = seen.scan.holdings.get(pid)
    if holding is not None and seen.minor(index) in holding.minors:
        seen.named.setdefault(pid, {})[index] = share
    elif pid in seen.scan.unreadable:
        seen.hidden.setdefault(pid, {})[index] = share
    else:
        seen.ghosts.append({"pid": pid, "gpu": index, "used_bytes": share})
        seen.haunted.setdefault(index, set()).add(pid)


def _beyond_baseline(inventory: Inventory, index: int, used: Reading) -> bool:
    """Say whether memory is in use that a baseline does not explain."""
    value = used.number()
    return value is not None and value > baseline.limit(baseline.load(), inventory, index).most_bytes
