"""Weighing: from sightings to findings, and to what the receipt keeps of them.

A fault from before the reset still counts, since nothing else may remember it; but not where the driver itself took
back what it asked for, nor where the operator has recorded a baseline since. A warning from before a baseline is not
said any more.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional

from backend.agent.kernelgpus import foreign, written
from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.gpureset.faults import INCURABLE_XIDS
from backend.agent.reset.rules.case import Case
from backend.agent.reset.rules.memory import ACTIONS
from backend.agent.reset.xids.settled import Settled
from backend.agent.reset.xids.sighting import BEFORE, Sighting
from backend.agent.xid.catalogue import INFO, RECOVERY_ACTION
from backend.agent.xid.lines import SXID, Said
from backend.wire import printable

ROWS_MOST = 100
"""Kinds of XID that a receipt keeps, the newest."""

TEXT_MOST = 300
THEN = "; once it is done and the GPU tested, eightzeros baseline record settles it"
NOT_GIVEN = "of a GPU of this host that was not given to this container"


class Weighed(NamedTuple):
    """What is to be said of each GPU and of the host, and the rows of the receipt."""

    gpus: Dict[int, List[Finding]]
    host: List[Finding]
    rows: List[Dict[str, Any]]


def weigh(sightings: List[Sighting], cases: Mapping[int, Case], known: Settled) -> Weighed:
    """Give each sighting its level, and say what follows for its GPU or for the host."""
    final = {one.said.bus: place for place, one in enumerate(sightings) if one.said.number == RECOVERY_ACTION}
    for place, one in enumerate(sightings):
        last = final.get(one.said.bus, -1)
        recovered = last > place and sightings[last].said.action == 0
        case = None if one.gpu is None else cases.get(one.gpu)
        if one.ours:
            one.level = INFO
        elif _foreign(one, known):
            one.level, one.why = INFO, NOT_GIVEN
        elif one.said.number == RECOVERY_ACTION:
            _weigh_action(one, place == last, case)
        else:
            _weigh_error(one, recovered, known)
        if one.phase == BEFORE and 0 <= one.seq <= known.baseline_seq and one.level != INFO:
            one.lighten("a baseline was recorded since")
    gpus: Dict[int, List[Finding]] = {}
    host = []
    for group in _groups(one for one in sightings if one.level != INFO):
        index = group[0].gpu
        if index is not None and index in cases:
            gpus.setdefault(index, []).append(_finding(group, cases[index].address, ""))
        else:
            host.append(_finding(group, _address(group[0]), _place(group[0])))
    return Weighed(gpus, host, [_row(group) for group in _groups(sightings, apart=True)][-ROWS_MOST:])


def _weigh_error(one: Sighting, recovered: bool, known: Settled) -> None:
    one.level = one.said.meaning.level
    if one.phase != BEFORE:
        return
    if recovered:
        one.lighten("the driver asks for nothing any more since")
    elif known.by_gpu_reset(one) and one.said.number not in INCURABLE_XIDS:
        one.lighten("the GPU was reset since")
    elif one.said.bus and known.by_reset(one, written(one.said.bus)):
        one.level, one.why = INFO, "an earlier reset caused it"


def _weigh_action(one: Sighting, last: bool, case: Optional[Case]) -> None:
    """The log's last word counts. Where it says no other than the driver now, or has no words, another rule has it."""
    now = None if case is None else case.value("recovery_action")
    one.level = one.said.meaning.level
    if not last:
        one.level, one.why = INFO, "the driver changed it again"
    elif now is not None and one.said.action in (None, int(now)):
        one.level, one.why = INFO, "what the driver asks for now counts"
    elif one.said.action in ACTIONS:
        one.level = ACTIONS[one.said.action][2]


def own_in_words(rows: List[Dict[str, Any]]) -> List[str]:
    """Say which XIDs the reset itself caused, for its notes: they count against nobody."""
    return ["XID %d on GPU %s, %s: %s" % (row["xid"], row["gpu"], "once" if row["count"] == 1 else "%d times" %
                                          row["count"], row["why"]) for row in rows if row["ours"]]  # fmt: skip


def _foreign(one: Sighting, known: Settled) -> bool:
    """Say whether it is of another container's GPU: the kernel's log is the host's, not this container's."""
    if one.gpu is not None or one.said.kind == SXID or one.said.bus in known.ours:
        return False
    return foreign(one.said.bus, known.withheld)


def _groups(sightings: Iterable[Sighting], apart: bool = False) -> List[List[Sighting]]:
    """Put together what is said again and again; `apart` keeps processes and reasons apart, as a receipt does."""
    groups: Dict[Any, List[Sighting]] = {}
    for one in sightings:
        said = one.said
        key = (said.kind, said.number, said.bus, one.gpu, said.device, said.caused_by, said.fatal, said.injected,
               one.level, one.phase == BEFORE, said.action, said.whole or said.text)  # fmt: skip
        detail = (said.pid, one.phase, one.ours, one.why, one.source) if apart else ()
        groups.setdefault((key, detail), []).append(one)
    return list(groups.values())


def _finding(group: List[Sighting], address: str, where: str) -> Finding:
    last, said = group[-1], group[-1].said
    text = where + said.what
    if said.number == RECOVERY_ACTION:
        text += " (it asks for %s)" % _action(said)
    if not said.whole or not said.number:
        text += ": `%s`" % printable(said.text, TEXT_MOST)
    text += "; " + _when(group)
    text += _by_whom(group)
    text += "" if not last.why else " (%s)" % last.why
    advice = said.meaning.advice.format(address=address)
    if last.phase == BEFORE and last.level == FAIL:
        advice += THEN
    shown = "sudo dmesg -T | grep -E 'NVRM|SXid'"
    return Finding(text, advice, shown, FAIL if last.level == FAIL else WARN)


def _action(said: Said) -> str:
    if said.action is None or said.action < 0:
        return "what is not known"
    return (
        ACTIONS[said.action][0]
        if said.action in ACTIONS
        else "action %d, which this version does not know" % said.action
    )


def _when(group: List[Sighting]) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(group[-1].at))
    since = "in the log since boot" if group[-1].phase == BEFORE else "during this check"
    return "%s, at %s" % (since, stamp) if len(group) == 1 else "%d times %s, last at %s" % (len(group), since, stamp)


def _by_whom(group: List[Sighting]) -> str:
    pids = list(dict.fromkeys(one.said.pid for one in group if one.said.pid is not None))
    if not pids:
        return ""
    name = next(one.said.name for one in reversed(group) if one.said.pid is not None)
    who = "process %d%s" % (pids[-1], " (%s)" % printable(name) if name else "")
    return ", by %s" % who if len(pids) == 1 else ", by %d processes, last %s" % (len(pids), who)


def _address(one: Sighting) -> str:
    return one.uuid or (written(one.said.bus) if one.said.bus else "the GPU")


def _place(one: Sighting) -> str:
    """Say which device it is, where it is none of the GPUs that the driver lists."""
    bus = written(one.said.bus) if one.said.bus else ""
    if one.said.device:
        return "%s at %s: " % (one.said.device, bus)
    known = " (%s)" % one.uuid if one.uuid else ""
    return "the GPU at %s%s, which the driver does not list: " % (bus, known) if bus else ""


def _row(group: List[Sighting]) -> Dict[str, Any]:
    """Write what a receipt keeps of one kind of XID: `seq` are the first and last record, -1 of the driver's events."""
    first, last, said = group[0], group[-1], group[-1].said
    return {
        "kind": said.kind, "xid": said.number, "gpu": last.gpu, "uuid": last.uuid,
        "bus": written(said.bus) if said.bus else "", "device": said.device, "level": last.level,
        "meaning": said.meaning.text, "phase": last.phase, "count": len(group), "first_at": round(first.at, 3),
        "last_at": round(last.at, 3), "pid": said.pid, "name": printable(said.name), "caused_by": said.caused_by,
        "ours": last.ours, "why": last.why, "source": last.source, "seq": [first.seq, last.seq],
        "text": printable(said.text, TEXT_MOST),
    }  # fmt: skip
