"""The host beside its GPUs: load, processor, memory and /dev/shm, from /proc."""

from __future__ import annotations

import os
from typing import Dict, Optional, Tuple

from backend.agent.procfs import kib, read_bytes
from backend.wire import HostSample


class HostLoad:
    """Reads a HostSample; keeps the last counters of /proc/stat, since a percentage needs two readings."""

    def __init__(self, shm: str = "/dev/shm") -> None:
        self._shm = shm
        self._before: Optional[Tuple[int, int]] = None

    def sample(self) -> HostSample:
        """Read everything now; what cannot be read is None. The first sample has no processor percentage."""
        memory = _meminfo()
        return HostSample(
            load1=_load1(),
            cpu_percent=self._cpu_percent(),
            memory_total_bytes=kib(memory, "MemTotal") or None,
            memory_available_bytes=kib(memory, "MemAvailable") if "MemAvailable" in memory else None,
            shm_free_bytes=_free_bytes(self._shm),
        )

    def _cpu_percent(self) -> Optional[float]:
        now = _cpu_ticks()
        before, self._before = self._before, now
        if now is None or before is None or now[1] <= before[1]:
            return None
        busy, total = now[0] - before[0], now[1] - before[1]
        return round(min(100.0, max(0.0, 100.0 * busy / total)), 1)


def _cpu_ticks() -> Optional[Tuple[int, int]]:
    """Return (busy, all) ticks of all processors. Guest time is in user time already; waiting for disks is not busy."""
    line = (read_bytes("/proc/stat", 4096) or b"").split(b"\n", 1)[0].split()
    if len(line) < 9 or line[0] != b"cpu":
        return None
    ticks = [int(word) for word in line[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _load1() -> Optional[float]:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _meminfo() -> Dict[str, str]:
    """Read the first lines of /proc/meminfo: total and available are among them on every kernel since 3.14."""
    head = (read_bytes("/proc/meminfo", 256) or b"").decode("ascii", "replace")
    pairs = (line.partition(":") for line in head.split("\n"))
    return {name: value.strip() for name, _, value in pairs if value}


def _free_bytes(path: str) -> Optional[int]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
