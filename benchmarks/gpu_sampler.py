"""What NVML says of one GPU every 10 ms, kept beside what is measured so that it is judged by something else."""

from __future__ import annotations

import threading
import time
from typing import Any

import pynvml

MIB = 1 << 20
EVERY_S = 0.01
IDLE_MIB = 8
"""How far above the floor counts as clear: half of what a bare context adds on an H200."""


class Sampler(threading.Thread):
    """Memory used (v2) and the number of compute processes, with the monotonic time at which a reading was had.

    A reading that begins while a victim unpins memory comes seconds later, and tells of the time at its end."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.floor_bytes = self.used()
        self.rows: list[tuple[float, int, int]] = []
        self.longest_s = 0.0
        self._ended = threading.Event()

    def used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu, version=pynvml.nvmlMemory_v2).used)

    def processes(self) -> list[int]:
        return [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)]

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            began = time.monotonic()
            used, processes = self.used(), len(self.processes())
            ended = time.monotonic()
            self.longest_s = max(self.longest_s, ended - began)
            self.rows.append((ended, used, processes))

    def stop(self) -> None:
        self._ended.set()
        self.join(30)

    def cleared_after(self, at: float, until: float) -> float | None:
        """Return the time of the first sample after `at` from which on all up to `until` were clear, or None."""
        within = [row for row in self.rows if at < row[0] < until]
        first = None
        for had_at, used, count in within:
            clear = used <= self.floor_bytes + IDLE_MIB * MIB and not count
            first = (first or had_at) if clear else None
        return first

    def curve(self, at: float, until: float) -> list[tuple[float, int, int]]:
        """Return the changes between two times: (seconds after `at`, MiB, processes)."""
        found: list[tuple[float, int, int]] = []
        for had_at, used, count in self.rows:
            row = (round(had_at - at, 3), used // MIB, count)
            if at < had_at < until and (not found or found[-1][1:] != row[1:]):
                found.append(row)
        return found


def jitter(sampler: Sampler, seconds: float) -> dict[str, Any]:
    """Read memory used for a while and say how far it moves."""
    end = time.monotonic() + seconds
    seen: dict[int, int] = {}
    while time.monotonic() < end:
        value = sampler.used()
        seen[value] = seen.get(value, 0) + 1
        time.sleep(0.02)
    values = {str(value): count for value, count in sorted(seen.items())[:20]}
    return {"seconds": seconds, "samples": sum(seen.values()), "least_bytes": min(seen), "most_bytes": max(seen),
            "jitter_bytes": max(seen) - min(seen), "values": values}  # fmt: skip
