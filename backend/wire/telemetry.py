"""Hosts, GPUs and what was read of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Union


class Reading(NamedTuple):
    """One value from a device: a value, `unsupported`, or failed with a reason. A failed reading is never zero.

    `value` is None unless it is a value. `age_s` is the seconds since it was read. `problem` is empty for a value,
    the word "unsupported", or the reason of the failure in words.
    """

    value: Union[int, float, str, None]
    age_s: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Say whether this is a value."""
        return self.problem == ""

    @property
    def unsupported(self) -> bool:
        """Say whether the device does not offer this reading at all."""
        return self.problem == UNSUPPORTED

    @property
    def failed(self) -> bool:
        """Say whether the device should have answered and did not."""
        return self.problem not in ("", UNSUPPORTED)

    def number(self) -> Optional[float]:
        """Return the value as a number, or None where there is none."""
        return float(self.value) if self.ok and isinstance(self.value, (int, float)) else None


UNSUPPORTED = "unsupported"
NOT_SUPPORTED = Reading(None, 0.0, UNSUPPORTED)
NOT_READ = Reading(None, 0.0, "not read yet")


def failed(reason: str, age_s: float = 0.0) -> Reading:
    """Make the reading of a value that could not be read."""
    return Reading(None, age_s, reason or "failed")


@dataclass
class Hello:
    """The agent's first line. `nonce` proves that the agent wrote it and not a start-up file that prints."""

    protocol: int
    nonce: str
    hostname: str
    user: str
    uid: int
    boot_id: str
    python: str
    system: str
    agent_pid: int
    virtual: bool = False


@dataclass
class GpuFacts:
    """What seldom changes about a GPU. `persistence`, `mig` and `ecc_mode` (0 or 1) are as the driver was opened."""

    index: int
    uuid: str
    name: str
    bus_id: str = ""
    minor: int = -1
    memory_total_bytes: Reading = NOT_READ
    power_limit_w: Reading = NOT_READ
    sm_clock_max_mhz: Reading = NOT_READ
    persistence: Reading = NOT_SUPPORTED
    mig: Reading = NOT_SUPPORTED
    ecc_mode: Reading = NOT_SUPPORTED
    problem: str = ""


@dataclass
class Inventory:
    """The driver and its GPUs. `problem` says why there are none to be read (no driver, mismatch, no GPU).

    `memory_api` is the memory call in use: "v1", which counts what the driver reserves, only where there is no "v2".
    """

    driver: str = ""
    cuda: str = ""
    gpus: List[GpuFacts] = field(default_factory=list)
    problem: str = ""
    virtual: bool = False
    memory_api: str = "v2"


@dataclass
class Holder:
    """A process that holds a GPU. `kind` is compute, graphics, mps or device-file (open, but no context)."""

    pid: int
    user: str = ""
    command: str = ""
    age_s: Optional[float] = None
    used_bytes: Reading = NOT_READ
    kind: str = "compute"
    alive: bool = True


@dataclass
class GpuSample:
    """The newest readings of one GPU, by name; units stand in the names (`LEAN` and `SLOW` list them).

    Where the list of holders could not be read, the failed reading "holders" says why: no holder is then no news.
    """

    index: int
    readings: Dict[str, Reading] = field(default_factory=dict)
    holders: List[Holder] = field(default_factory=list)
    problem: str = ""


LEAN = (
    "memory_used_bytes",  # v2: without what the driver reserves
    "memory_total_bytes",
    "utilisation_percent",
    "temperature_c",
    "power_w",
    "sm_clock_mhz",
    "clock_reasons",  # bit mask, nvmlClocksEventReasons*
    "ecc_uncorrected",  # volatile, since the driver was loaded
)
"""The 1 Hz set: about 26 us a GPU on an H200 (facts: monitors, section 3)."""

SLOW = (
    "memory_reserved_bytes",
    "power_limit_w",
    "ecc_corrected",
    "remapped_pending",  # 0 or 1
    "remapped_failed",  # 0 or 1
    "recovery_action",  # nvmlDeviceGpuRecoveryAction; 0 is none
    "persistence",  # 0 or 1
    "mig",  # 0 or 1
    "pcie_gen",
    "pcie_width",
    "fan_percent",
    "thermal_margin_c",  # degrees left before the slowdown temperature
)
"""Readings on the slow cadence, 10 s by default: each costs up to 3 ms (facts: monitors, section 3)."""


@dataclass
class HostSample:
    """The host beside its GPUs. Bytes are bytes; `load1` is the one-minute load average."""

    load1: Optional[float] = None
    cpu_percent: Optional[float] = None
    memory_total_bytes: Optional[int] = None
    memory_available_bytes: Optional[int] = None
    shm_free_bytes: Optional[int] = None


@dataclass
class Telemetry:
    """One tick of a host: every GPU's newest readings. `tick_cpu_ms` is what the tick cost the agent."""

    seq: int
    at: float
    gpus: List[GpuSample] = field(default_factory=list)
    host: HostSample = field(default_factory=HostSample)
    tick_cpu_ms: float = 0.0
