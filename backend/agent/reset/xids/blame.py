"""Whether an XID is of our own making: what a kill leaves behind is no fault of a GPU.

Ending a process in the middle of its kernels may log errors of that process. Everybody else's errors are theirs,
and a GPU's faults are its own, whenever they come.
"""

from __future__ import annotations

from typing import FrozenSet, List, NamedTuple, Sequence, Set, Tuple

from backend.agent import procfs
from backend.agent.reset.cudatest import PASSED
from backend.agent.reset.xids.sighting import AFTER, KILL, Sighting
from backend.agent.xid.catalogue import OWN_KILL, SWITCH_TIMEOUT
from backend.agent.xid.lines import XID
from backend.wire import Receipt


class Kill(NamedTuple):
    """What a reset did: the pids that its signals reached, the GPUs that those held, the GPUs that compute since.

    `comparable` says that the pids are of the initial namespace, as those of the kernel's lines are.
    """

    pids: FrozenSet[int] = frozenset()
    gpus: FrozenSet[int] = frozenset()
    computing: FrozenSet[int] = frozenset()
    comparable: bool = True


def of_receipt(receipt: Receipt) -> Kill:
    """Say what a reset did, from what it has written down so far."""
    pids = {int(one["pid"]) for one in receipt.signals if not one["error"]}
    victims = [*receipt.killed, *receipt.survivors, *(receipt.plan.victims if receipt.plan else ())]
    held = {index for one in victims if one.pid in pids for index in one.gpus}
    passed = {int(one["gpu"]) for one in receipt.cuda_tests if one["outcome"] == PASSED}
    return Kill(frozenset(pids), frozenset(held), frozenset(passed), procfs.in_initial_pid_namespace())


def blame(sightings: Sequence[Sighting], kill: Kill) -> None:
    """Mark what the kill caused, and say why."""
    mine: List[Tuple[Sighting, str]] = [(one, why) for one in sightings for why in [_why(one, kill)] if why]
    timeouts = [one.gpu for one, _ in mine if one.said.number == SWITCH_TIMEOUT]
    forgiven: Set[int] = {gpu for gpu in kill.computing if timeouts.count(gpu) == 1}
    for one, why in mine:
        if one.said.weighs_as == SWITCH_TIMEOUT and one.gpu not in forgiven:
            continue
        one.ours, one.why = True, why


def _why(one: Sighting, kill: Kill) -> str:
    """Say why an XID may be the kill's doing; empty where it is not."""
    said = one.said
    if said.kind != XID or said.weighs_as not in OWN_KILL | {SWITCH_TIMEOUT}:
        return ""
    if not said.whole or one.phase not in (KILL, AFTER):
        return ""
    if said.pid is not None:
        ended = kill.comparable and said.pid in kill.pids
        return "process %d was ended by this reset" % said.pid if ended else ""
    if one.phase == KILL and one.gpu in kill.gpus and said.weighs_as != SWITCH_TIMEOUT:
        return "it came while this reset ended the processes on this GPU"
    return ""
