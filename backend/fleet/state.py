"""What is known of each host: the newest values, a bounded history, and what follows from them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.link.status import LinkState, LinkStatus
from backend.wire import (
    NOT_READ,
    GpuFacts,
    GpuSample,
    GpuVerdict,
    Hello,
    Inventory,
    Plan,
    Reading,
    Receipt,
    ResetEvent,
    Run,
    Telemetry,
    Xid,
    failed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.config import Host, Thresholds

HISTORY = 240
"""Samples kept per GPU and reading for sparklines: four minutes at 1 Hz."""

HISTORY_KEYS = ("utilisation_percent", "memory_used_bytes", "power_w", "temperature_c")
EVENTS_KEPT = 500
XIDS_KEPT = 200
STALE_S = 3.5
"""A reading older than this is shown with its age: three missed ticks (DESIGN section 4)."""

THROTTLE_HARDWARE = 0x8 | 0x40 | 0x80
"""Clock event reasons that mean a fault: HW slowdown, HW thermal, power brake. The SW power cap (0x4) is normal
under load (facts: reset, section 2)."""

THROTTLE_THERMAL = 0x20


@dataclass(frozen=True)
class Badge:
    """A GPU's health in one word. `level` is ok, warn, bad or unknown."""

    word: str
    level: str
    detail: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened, for the event log. `level` is info, warn or bad; `at` is wall time in seconds."""

    at: float
    host: str
    level: str
    text: str


@dataclass
class ResetState:
    """The reset or verification that a host runs, or ran last."""

    plan: Plan | None = None
    events: list[ResetEvent] = field(default_factory=list)
    receipt: Receipt | None = None
    running: bool = False
    started_at: float = 0.0
    run_id: str = ""


@dataclass
class HostState:
    """One host as the console knows it. The backend's thread replaces whole values; readers never lock.

    `received_at` is this machine's monotonic clock when the newest telemetry came. `revision` grows with each change,
    so that a painter can tell whether to look.
    """

    name: str
    config: Host
    link: LinkStatus = field(default_factory=lambda: LinkStatus(LinkState.IDLE))
    hello: Hello | None = None
    inventory: Inventory | None = None
    telemetry: Telemetry | None = None
    received_at: float = 0.0
    history: dict[int, dict[str, deque[float | None]]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    reset: ResetState = field(default_factory=ResetState)
    verdicts: dict[int, GpuVerdict] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    revision: int = 0
    xids: list[Xid] = field(default_factory=list)  # the newest last
    xids_gap: str | None = None  # why not every XID can be told; None before the host has said
    caught_up: bool = False  # the runs that the host holds were asked for and came

    @property
    def virtual(self) -> bool:
        """Say whether the host's GPUs are virtual; then the screen says so too."""
        return bool(self.hello and self.hello.virtual)

    @property
    def gpu_indices(self) -> list[int]:
        """List the GPUs of the inventory; one that is lost stays listed."""
        return [gpu.index for gpu in self.inventory.gpus] if self.inventory else []

    def facts(self, index: int) -> GpuFacts | None:
        """Return what does not change about a GPU."""
        return next((gpu for gpu in (self.inventory.gpus if self.inventory else []) if gpu.index == index), None)

    def sample(self, index: int) -> GpuSample:
        """Return a GPU's newest sample; an empty one with its reason where none came."""
        found = next((gpu for gpu in (self.telemetry.gpus if self.telemetry else []) if gpu.index == index), None)
        return found or GpuSample(index, problem="no reading yet")

    def reading(self, index: int, name: str) -> Reading:
        """Return one reading of a GPU, failed with the GPU's problem where the GPU as a whole has one."""
        sample = self.sample(index)
        if sample.problem and name not in sample.readings:
            return failed(sample.problem)
        return sample.readings.get(name, NOT_READ)

    def age_s(self, now: float | None = None) -> float | None:
        """Return how old the newest telemetry is in seconds, or None where none came yet."""
        if not self.received_at:
            return None
        return (time.monotonic() if now is None else now) - self.received_at

    def live_runs(self) -> list[Run]:
        """List the runs that have not ended, newest first."""
        live = [run for run in self.runs.values() if run.state in ("starting", "running", "stopping")]
        return sorted(live, key=lambda run: run.started_at, reverse=True)

    def remember(self, telemetry: Telemetry) -> None:
        """Append the telemetry to the history; a reading that is no value leaves a gap, never a zero."""
        for gpu in telemetry.gpus:
            lines = self.history.setdefault(gpu.index, {})
            for key in HISTORY_KEYS:
                line = lines.setdefault(key, deque(maxlen=HISTORY))
                line.append(gpu.readings.get(key, NOT_READ).number())


def badge(host: HostState, index: int, limits: Thresholds) -> Badge:
    """Say how a GPU is. The worst finding wins; what could not be read is unknown and never ok."""
    sample = host.sample(index)
    if host.link.state not in (LinkState.LIVE, LinkState.STALE):
        return Badge(host.link.state.upper(), "unknown", host.link.reason)
    if host.link.state is LinkState.STALE:
        return Badge("STALE", "unknown", "telemetry stopped coming")
    if sample.problem:
        return Badge(*_problem_word(sample.problem), sample.problem)
    return _worst(_findings(sample, limits))


def _problem_word(problem: str) -> tuple[str, str]:
    words = (("lost", "LOST"), ("not answering", "HUNG"), ("hang", "HUNG"), ("reset", "RESET?"))
    found = next((word for part, word in words if part in problem.lower()), None)
    return (found, "bad") if found else ("UNKNOWN", "unknown")


def _findings(sample: GpuSample, limits: Thresholds) -> Iterable[Badge]:
    def number(name: str) -> float | None:
        return sample.readings.get(name, NOT_READ).number()

    reasons, heat = int(number("clock_reasons") or 0), number("temperature_c")
    if number("remapped_failed"):
        yield Badge("REMAP", "bad", "a row remap failed")
    if number("recovery_action"):
        yield Badge("RECOVER", "bad", f"the driver asks for recovery action {number('recovery_action'):.0f}")
    if number("ecc_uncorrected"):
        yield Badge("ECC", "bad", f"{number('ecc_uncorrected'):.0f} uncorrected ECC errors since the driver loaded")
    if reasons & THROTTLE_HARDWARE:
        yield Badge("SLOWED", "bad", f"the hardware slows the clocks (reasons 0x{reasons:x})")
    if heat is not None and heat >= limits.temperature_bad_c:
        yield Badge("HOT", "bad", f"{heat:.0f} °C")
    unread = [name for name in ("memory_used_bytes", "temperature_c", "utilisation_percent")
              if sample.readings.get(name, NOT_READ).failed]  # fmt: skip
    if unread:
        yield Badge("UNREAD", "unknown", f"{unread[0]}: {sample.readings.get(unread[0], NOT_READ).problem}")
    if number("remapped_pending"):
        yield Badge("REMAP", "warn", "a row remap waits for a reset")
    if reasons & THROTTLE_THERMAL:
        yield Badge("THERMAL", "warn", "the driver slows the clocks for heat")
    if heat is not None and heat >= limits.temperature_warn_c:
        yield Badge("WARM", "warn", f"{heat:.0f} °C")


def _worst(found: Iterable[Badge]) -> Badge:
    order = {"bad": 0, "unknown": 1, "warn": 2}
    return min(found, key=lambda item: order[item.level], default=Badge("OK", "ok"))


def host_event(host: HostState, level: str, text: str, at: float | None = None) -> Event:
    """Append an event to a host's log and return it."""
    event = Event(time.time() if at is None else at, host.name, level, text)
    host.events.append(event)
    host.revision += 1
    return event


ShardListing = dict[str, Any]
"""{"path", "entries": [{"name", "kind": "folder" | "shard" | "other", "bytes", "modified_at"}], "truncated"}"""
