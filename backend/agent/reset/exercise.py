"""Between clearance and verdict: the CUDA test on every GPU, and the clearance again, since a test may leave something.

It comes before the health is read, so that what it brings to light stands in the records that are judged.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Callable, Dict, List, NamedTuple

from backend.agent.reset import cudatest
from backend.agent.reset.clearance import Clearance, Clearing, GpuState, MemoryCurve
from backend.agent.reset.cudatest import Subject
from backend.agent.reset.finding import Finding
from backend.agent.reset.receipt import Journal
from backend.agent.reset.watch import Watch
from backend.agent.seam import Machine
from backend.wire import NOT_READ, Receipt

AGAIN_S = 10.0
"""How long a GPU may take to be free again after its test (facts: reset, section 5.8)."""

LONGEST_S = cudatest.LIMIT_S + cudatest.DEATH_S + AGAIN_S
"""How long all of this may take."""

NO_KERNEL = "no kernel was run on the GPUs: %s; memory, processes and records were checked"


class Exercised(NamedTuple):
    """Every GPU's state after the test, what it found wrong by GPU, and the monotonic time since when they are free."""

    states: Dict[int, GpuState]
    findings: Dict[int, List[Finding]]
    cleared_at: float


def exercise(
    machine: Machine, watch: Watch, receipt: Receipt, journal: Journal, cleared: Clearance, cleared_at: float,
    not_wanted: str = "",
) -> Exercised:  # fmt: skip
    """Run the test where every GPU that answers is free, and write into the receipt how it went, or why it was not run.

    A GPU on which something of it is left is not clean, and says so.
    """
    why = not_wanted or ("" if cleared.ended == "clear" else "not every GPU is free")
    if why or not machine.cuda_library:
        receipt.notes.append(NO_KERNEL % (why or "this machine has no CUDA library"))
        return Exercised(cleared.states, {}, cleared_at)
    journal.write("phase", "running a small CUDA program on every GPU")
    began = time.monotonic()
    outcomes = cudatest.run(machine, _subjects(watch, cleared.states))
    receipt.cuda_tests = [asdict(one) for one in outcomes]
    receipt.notes += cudatest.in_words(outcomes)
    for text in cudatest.in_words(outcomes):
        journal.write("note", text)
    receipt.durations["cuda_test"] = round(time.monotonic() - began, 3)
    ran = {one.gpu for one in outcomes if one.outcome != cudatest.NOT_RUN}
    if not ran:
        return Exercised(cleared.states, {}, cleared_at)
    nobody: Callable[[], List[int]] = list
    again_from = time.monotonic()
    again = Clearing(watch, machine.devices, MemoryCurve(journal)).wait(again_from, AGAIN_S, nobody)
    for index in ran & set(again.states):
        again.states[index].why = ["left by the CUDA test: " + text for text in again.states[index].why]
    findings = {one.gpu: one.findings() for one in outcomes}
    return Exercised(again.states, findings, again_from + (again.release_s or 0.0))


def _subjects(watch: Watch, states: Dict[int, GpuState]) -> List[Subject]:
    """Return the GPUs that answer; one that is split into instances is not tested as a whole."""
    slow = watch.read("slow")
    found = []
    for gpu in watch.inventory.gpus:
        if gpu.index in states and states[gpu.index].free:
            split = slow.get(gpu.index, {}).get("mig", NOT_READ).number()
            found.append(Subject(gpu, "MIG is on, and its instances are not tested" if split else ""))
    return found
