"""Whether GPUs that are free may be used: their own records, links, heat and settings, against before and baseline.

The rules are in `rules`, each with its limits; this reads what they need, and says what could not be read. Nothing
here is read once a second: a whole reading costs some milliseconds a GPU.

Temperature and power settle for 30 s, and would make every verdict late: at rest they are judged by a verification
alone, which ends nobody, and as warnings. A reset judges them against the hard limits only.
"""

from __future__ import annotations

import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

from backend.agent.reset.finding import Finding
from backend.agent.reset.rules import heat, links, memory, settings
from backend.agent.reset.rules.case import Case, Readings
from backend.agent.reset.watch import Watch
from backend.wire import NOT_SUPPORTED

RULES: Tuple[Callable[[Case], Iterator[Finding]], ...] = (
    memory.recovery, memory.memory_errors, memory.remapped_rows, memory.retired_pages,
    heat.temperature, heat.clocks, heat.stuck_utilisation, heat.power,
    links.pcie_width, links.pcie_replays, links.nvlinks, links.fabric,
    settings.persistence, settings.modes, settings.inforom,
)  # fmt: skip

NEEDED = {
    "recovery_action": "recovery action", "remapped_failed": "failed row remaps",
    "remapped_pending": "pending row remaps", "remapped_uncorrected": "remapped rows",
    "ecc_uncorrected": "uncorrectable errors", "sram_threshold_exceeded": "cache error threshold",
    "memory_unrepairable": "unrepairable memory", "retired_pending": "pending page retirements",
    "retired_double_bit": "retired pages", "temperature_c": "temperature", "thermal_margin_c": "thermal margin",
    "clock_reasons": "clock event reasons", "utilisation_percent": "utilisation", "pcie_width": "PCIe width",
    "nvlink_active": "NVLink states", "fabric_state": "fabric state", "inforom_valid": "infoROM",
}  # fmt: skip
"""Readings that a verdict rests on: one of them that failed is a gap. What only a warning rests on is none."""

RETRIES, RETRY_S = 2, 1.0
"""Some errors last two seconds (case N3): what failed is read again before it is called a gap."""


class Snapshot(NamedTuple):
    """The health readings of every GPU that answered, and when they were read, on the monotonic clock."""

    gpus: Dict[int, Readings]
    at: float


NOTHING = Snapshot({}, 0.0)


def means_gone(problem: str) -> bool:
    """Say whether a failed reading means that the GPU as a whole is gone (the words of NVML codes 15 and 16)."""
    return "GPU is lost" in problem or "reset required" in problem


def read(watch: Watch) -> Snapshot:
    """Read the health of every GPU that answers."""
    lean, slow, dear = watch.read("lean"), watch.read("slow"), watch.read("health")
    whole = set(lean) & set(slow) & set(dear)
    return Snapshot({index: {**slow[index], **dear[index], **lean[index][0]} for index in whole}, time.monotonic())


def read_surely(watch: Watch) -> Snapshot:
    """Read it again where a needed reading failed in a way that may pass."""
    seen = read(watch)
    for _ in range(RETRIES):
        if not any(_may_pass(readings) for readings in seen.gpus.values()):
            break
        due = time.monotonic() + RETRY_S
        while time.monotonic() < due:
            watch.step(due, [])
        seen = read(watch)
    return seen


def _may_pass(readings: Readings) -> bool:
    problems = [readings[name].problem for name in NEEDED if readings.get(name, NOT_SUPPORTED).failed]
    return any("no permission" not in text and not means_gone(text) for text in problems)


def findings(case: Case) -> List[Finding]:
    """Say what is wrong with a GPU: its records now, and what grew since before the reset or the baseline."""
    gone = [reading.problem for reading in case.now.values() if means_gone(reading.problem)]
    if gone:
        return [Finding(gone[0], "reboot the host; if it stays away, have it serviced", "nvidia-smi -L")]
    return [finding for rule in RULES for finding in rule(case)]


def unread(now: Readings) -> List[str]:
    """Name the records that should have been readable and were not. What a GPU does not offer is no gap."""
    if any(means_gone(reading.problem) for reading in now.values()):
        return []
    by_problem: Dict[str, List[str]] = {}
    for name, said in NEEDED.items():
        reading = now.get(name, NOT_SUPPORTED)
        if reading.failed:
            by_problem.setdefault(reading.problem, []).append(said)
    return ["%s: %s" % (", ".join(names), problem) for problem, names in by_problem.items()]
