"""A driver with no GPU behind it: readings follow from what real processes claim, and from the clock.

It has the numbers of an H200 (read of one under R580): 143,771 MiB of which
615 MiB are reserved, 75 W idle to 690 W under load, memory back about 0.1 s after the last holder is gone
and 0.06 s later for each GB it had pinned, utilisation shown for 0.3 s longer and clocks for 1.5 s. Two
readers at the same moment read the same.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from typing import Dict, List, Optional, Tuple

from backend.agent.seam import ContextList, DeviceTable, Driver, DriverError
from backend.virtual.claims import Claim, Ledger, device_path, gpu_count
from backend.wire import MIB, NOT_SUPPORTED, GpuFacts, Inventory, Reading, failed

NAME = "NVIDIA H200 (virtual)"
TOTAL_BYTES = 143771 * MIB
RESERVED_BYTES = 615 * MIB
IDLE_W, FULL_W, LIMIT_W = 75.0, 690.0, 700.0
POWER_CAP_W = 680.0
IDLE_C, RISE_C, SLOWDOWN_C = 27.0, 41.0, 87.0
IDLE_MHZ, FULL_MHZ, CAPPED_MHZ = 345, 1980, 1740
UTILISATION_LAG_S = 0.3
CLOCK_LAG_S = 1.5
UNPIN_S_PER_BYTE = 0.06e-9
IDLE_REASON, POWER_CAP_REASON = 0x1, 0x4
CLIENT_FILES = 3
"""How often an NVML client has each GPU's device file open (read on an H200)."""

FALL = ((1 / 3, 1.0), (2 / 3, 0.6), (1.0, 0.25))
"""Up to this part of the release, this part of the memory is still held; afterwards none."""


class VirtualDevices(DeviceTable):
    """The device files of a virtual host, known by device and inode, as NVIDIA's are by major and minor."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._gpus: Dict[Tuple[int, int], Tuple[int, ...]] = {}
        for index in range(gpu_count(root)):
            self._gpus[_identity(device_path(root, "nvidia%d" % index))] = (index,)
        if self._gpus:
            self._gpus[_identity(device_path(root, "nvidiactl"))] = ()

    def gpus_of(self, st: os.stat_result) -> Optional[Tuple[int, ...]]:
        """Return the GPUs behind an open file."""
        return self._gpus.get((st.st_dev, st.st_ino))

    def gpus_of_map(self, device: Tuple[int, int], inode: int, path: str) -> Optional[Tuple[int, ...]]:
        """Return the GPUs behind a mapping."""
        return self._gpus.get((os.makedev(*device), inode))

    def scope(self) -> str:
        """Return the folder: virtual hosts beside each other are hosts of their own."""
        return os.path.realpath(self._root)


class VirtualDriver(Driver):
    """Reads the virtual host in the folder `root`. Like any NVML client it keeps the device files open."""

    virtual = True

    def __init__(self, root: str) -> None:
        self._root = root
        self._ledger = Ledger(root)
        self._files: List[int] = []

    def open(self) -> Inventory:
        """List the virtual GPUs. Raises DriverError where the folder holds none."""
        count = gpu_count(self._root)
        if not count:
            raise DriverError("%s holds no virtual GPU (no dev/nvidia0)" % self._root)
        names = ["nvidiactl"] + ["nvidia%d" % index for index in range(count)] * CLIENT_FILES
        self._files = [os.open(device_path(self._root, name), os.O_RDONLY | os.O_CLOEXEC) for name in names]
        gpus = [_facts(self._root, index) for index in range(count)]
        return Inventory(driver="virtual", cuda="virtual", gpus=gpus, virtual=True)

    def close(self) -> None:
        """Close the device files."""
        while self._files:
            os.close(self._files.pop())

    def lean(self, index: int) -> Tuple[Dict[str, Reading], ContextList]:
        """Read the 1 Hz set and the compute list."""
        try:
            claims, now = self._ledger.on(index), time.monotonic()
        except OSError as error:
            return {}, ContextList(problem=str(error))
        busy, power = _utilisation(claims, now), _power_w(claims, now)
        clocked = any(claim.released_at_s is None or now < claim.released_at_s + CLOCK_LAG_S for claim in claims)
        reasons = 0 if clocked and busy else IDLE_REASON
        values = {
            "memory_used_bytes": sum(_held(claim, now) for claim in claims),
            "memory_total_bytes": TOTAL_BYTES,
            "utilisation_percent": busy,
            "temperature_c": _temperature_c(claims, index, now),
            "power_w": power,
            "sm_clock_mhz": _clock_mhz(power) if clocked else IDLE_MHZ,
            "clock_reasons": POWER_CAP_REASON if power >= POWER_CAP_W else reasons,
            "ecc_uncorrected": 0,
        }
        return {name: Reading(value) for name, value in values.items()}, _contexts(claims, now)

    def slow(self, index: int) -> Dict[str, Reading]:
        """Read the slow set. There is no fan, as on an H200."""
        values = {
            "memory_reserved_bytes": RESERVED_BYTES,
            "power_limit_w": LIMIT_W,
            "ecc_corrected": 0,
            "remapped_pending": 0,
            "remapped_failed": 0,
            "recovery_action": 0,
            "persistence": 1,
            "mig": 0,
            "pcie_gen": 5,
            "pcie_width": 16,
        }
        readings = {name: Reading(value) for name, value in values.items()}
        readings["fan_percent"] = NOT_SUPPORTED
        try:
            heat = _temperature_c(self._ledger.on(index), index, time.monotonic())
            readings["thermal_margin_c"] = Reading(SLOWDOWN_C - heat)
        except OSError as error:
            readings["thermal_margin_c"] = failed(str(error))
        return readings

    def occupancy(self, index: int) -> Tuple[Reading, ContextList]:
        """Read memory used and who holds it."""
        try:
            claims, now = self._ledger.on(index), time.monotonic()
        except OSError as error:
            return failed(str(error)), ContextList(problem=str(error))
        return Reading(sum(_held(claim, now) for claim in claims)), _contexts(claims, now)


def release_s(claim: Claim) -> float:
    """Return how long the memory of a claim takes to go once nobody holds it, in seconds."""
    return claim.release_ms / 1000.0 + claim.pinned_bytes * UNPIN_S_PER_BYTE


def _identity(path: str) -> Tuple[int, int]:
    st = os.stat(path)
    return st.st_dev, st.st_ino


def _facts(root: str, index: int) -> GpuFacts:
    return GpuFacts(
        index,
        "VIRTUAL-%08x-%d" % (zlib.crc32(os.fsencode(os.path.abspath(root))), index),
        NAME,
        bus_id="virtual:%d" % index,
        minor=index,
        memory_total_bytes=Reading(TOTAL_BYTES),
        power_limit_w=Reading(LIMIT_W),
        sm_clock_max_mhz=Reading(FULL_MHZ),
    )


def _held(claim: Claim, now: float) -> int:
    """Return the bytes of a claim that the device still counts: they go in steps, not at once."""
    if claim.released_at_s is None:
        return claim.used_bytes
    done = (now - claim.released_at_s) / max(release_s(claim), 1e-3)
    return int(claim.used_bytes * next((part for end, part in FALL if done < end), 0.0))


def _contexts(claims: List[Claim], now: float) -> ContextList:
    """Name the openers, dead or not, for as long as the device counts their memory."""
    held = [(claim.pid, Reading(_held(claim, now)), "compute") for claim in claims]
    return ContextList([entry for entry in held if entry[1].value])


def _sway(claim: Claim, now: float) -> float:
    return 0.95 + 0.05 * math.sin(2 * math.pi * now / claim.period_s + claim.gpu)


def _utilisation(claims: List[Claim], now: float) -> int:
    shown = [
        claim.load * _sway(claim, min(now, claim.released_at_s or now))
        for claim in claims
        if claim.released_at_s is None or now < claim.released_at_s + UTILISATION_LAG_S
    ]
    return round(100 * min(1.0, sum(shown)))


def _activity(claim: Claim, now: float, rise_s: float, fall_s: float) -> float:
    """Return how much of its load a claim shows in a quantity that follows it with a delay, from 0 to 1."""
    until = claim.released_at_s if claim.released_at_s is not None else now
    level = claim.load * _sway(claim, until) * (1 - math.exp(-max(0.0, until - claim.claimed_at_s) / rise_s))
    return level * math.exp(-max(0.0, now - until) / fall_s)


def _power_w(claims: List[Claim], now: float) -> float:
    level = min(1.0, sum(_activity(claim, now, 1.0, 1.5) for claim in claims))
    return round(IDLE_W + (FULL_W - IDLE_W) * level, 1)


def _temperature_c(claims: List[Claim], index: int, now: float) -> int:
    level = min(1.0, sum(_activity(claim, now, 12.0, 9.0) for claim in claims))
    return round(IDLE_C + index * 5 % 4 + RISE_C * level)


def _clock_mhz(power_w: float) -> int:
    """Return the clock: full, until the power nears the limit."""
    near = max(0.0, (power_w - IDLE_W) / (FULL_W - IDLE_W) - 0.8) / 0.2
    return round(FULL_MHZ - (FULL_MHZ - CAPPED_MHZ) * near)
