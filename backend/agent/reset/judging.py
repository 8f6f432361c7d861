"""From the end of the clearance to the verdicts: settled readings, health, and what the host as a whole lacks."""

from __future__ import annotations

import time
from typing import Dict, List, Mapping, Sequence

from backend.agent import procfs
from backend.agent.reset import baseline, health, verdict
from backend.agent.reset.clearance import GpuState
from backend.agent.reset.finding import FAIL, Finding
from backend.agent.reset.health import Snapshot
from backend.agent.reset.rules import host
from backend.agent.reset.rules.case import Case
from backend.agent.reset.settling import settle
from backend.agent.reset.watch import Watch
from backend.agent.reset.xids.blame import blame, of_receipt
from backend.agent.reset.xids.gathering import Gathering
from backend.agent.reset.xids.settled import settled
from backend.agent.reset.xids.weighing import Weighed, own_in_words, weigh
from backend.agent.seam import DeviceTable
from backend.wire import GpuVerdict, Receipt

NOT_ASKED = "its health was not read"


def judge_before(watch: Watch, states: Dict[int, GpuState], seen: Snapshot) -> List[GpuVerdict]:
    """Judge every GPU before the first signal: it may be busy, and nothing is compared with earlier readings."""
    return _judged(states, {index: _case(state, health.NOTHING, seen) for index, state in states.items()}, watch, {})


def judge(
    receipt: Receipt, watch: Watch, devices: DeviceTable, states: Dict[int, GpuState], before: Snapshot,
    cleared_at: float, tested: Mapping[int, Sequence[Finding]], xids: Gathering,
) -> str:  # fmt: skip
    """Judge every GPU and the host, write both into the receipt, and return the host's verdict.

    `cleared_at` is the monotonic time from which on the GPUs were free. A verification (nothing `before`) takes the
    GPUs to be at rest. `tested` is what the CUDA test found wrong, `xids` what the driver said of errors.
    A GPU that stops answering here is unknown, whatever it was before.
    """
    free = [index for index, state in states.items() if state.free]
    moments = settle(watch, free, cleared_at)
    now = health.read_surely(watch)
    cases = {index: _case(state, before, now) for index, state in states.items()}
    for index, case in cases.items():
        case.settled, case.drawn_on = moments.get(index, []), states[index].drawn_on
        case.idle = not before.gpus and states[index].free
    weighed = _weighed(receipt, xids, cases, devices)
    found = {index: [*tested.get(index, ()), *weighed.gpus.get(index, ())] for index in cases}
    receipt.after = _judged(states, cases, watch, found, xids.gaps())
    wrong = [*host.findings(baseline.load(), watch.inventory, devices), *weighed.host]
    receipt.host_findings = [one._asdict() for one in wrong]
    receipt.notes += ["%s: %s" % (_level(one), one.reason) for one in wrong]
    return verdict.of_host(receipt.after, wrong)


def _weighed(receipt: Receipt, xids: Gathering, cases: Mapping[int, Case], devices: DeviceTable) -> Weighed:
    """Weigh the XIDs, and write into the receipt which there were and what is not known of them."""
    sightings = xids.all()
    blame(sightings, of_receipt(receipt))
    weighed = weigh(sightings, cases, settled(baseline.load(), devices.withheld()))
    receipt.xids, receipt.kernel_log = weighed.rows, xids.problem
    receipt.notes += [*xids.notes(), *own_in_words(weighed.rows)]
    return weighed


def _level(finding: Finding) -> str:
    return "the host is unhealthy" if finding.level == FAIL else "warning"


def _case(state: GpuState, before: Snapshot, now: Snapshot) -> Case:
    """Set one GPU's readings against those before the reset and those of the baseline."""
    stored = baseline.load()
    return Case(
        state.address, now.gpus.get(state.index, {}), before.gpus.get(state.index, {}),
        baseline.counters(stored, state.uuid, procfs.boot_id()),
        elapsed_s=now.at - before.at, base_s=max(0.0, time.time() - float(stored["recorded_at"])),
    )  # fmt: skip


def _judged(
    states: Dict[int, GpuState],
    cases: Dict[int, Case],
    watch: Watch,
    found: Mapping[int, Sequence[Finding]],
    gaps: Sequence[str] = (),
) -> List[GpuVerdict]:
    """Judge each GPU by its health and by what else was `found`; `gaps` are of every GPU."""
    verdicts = []
    for index, state in sorted(states.items()):
        case = cases[index]
        state.unknown = state.unknown or watch.unknown.get(index, "")
        unread = [*(health.unread(case.now) if case.now else [NOT_ASKED]), *gaps]
        verdicts.append(verdict.judge(state, [*health.findings(case), *found.get(index, ())], unread))
    return verdicts
