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
from backend.agent.seam import DeviceTable
from backend.wire import GpuVerdict, Receipt

NOT_ASKED = "its health was not read"


def judge_before(watch: Watch, states: Dict[int, GpuState], seen: Snapshot) -> List[GpuVerdict]:
    """Judge every GPU before the first signal: it may be busy, and nothing is compared with earlier readings."""
    return _judged(states, {index: _case(state, health.NOTHING, seen) for index, state in states.items()}, watch, {})


def judge(
    receipt: Receipt, watch: Watch, devices: DeviceTable, states: Dict[int, GpuState], before: Snapshot,
    cleared_at: float, tested: Mapping[int, Sequence[Finding]],
) -> str:  # fmt: skip
    """Judge every GPU and the host, write both into the receipt, and return the host's verdict.

    `cleared_at` is the monotonic time from which on the GPUs were free. A verification (nothing `before`) takes the
    GPUs to be at rest. `tested` is what the CUDA test found wrong. A GPU that stops answering here is unknown, whatever
    it was before.
    """
    free = [index for index, state in states.items() if state.free]
    settled = settle(watch, free, cleared_at)
    now = health.read_surely(watch)
    cases = {index: _case(state, before, now) for index, state in states.items()}
    for index, case in cases.items():
        case.settled, case.drawn_on = settled.get(index, []), states[index].drawn_on
        case.idle = not before.gpus and states[index].free
    receipt.after = _judged(states, cases, watch, tested)
    wrong = host.findings(baseline.load(), watch.inventory, devices)
    receipt.host_findings = [one._asdict() for one in wrong]
    receipt.notes += ["%s: %s" % (_level(one), one.reason) for one in wrong]
    return verdict.of_host(receipt.after, wrong)


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
    states: Dict[int, GpuState], cases: Dict[int, Case], watch: Watch, tested: Mapping[int, Sequence[Finding]]
) -> List[GpuVerdict]:
    verdicts = []
    for index, state in sorted(states.items()):
        case = cases[index]
        state.unknown = state.unknown or watch.unknown.get(index, "")
        gaps = health.unread(case.now) if case.now else [NOT_ASKED]
        verdicts.append(verdict.judge(state, [*health.findings(case), *tested.get(index, ())], gaps))
    return verdicts
