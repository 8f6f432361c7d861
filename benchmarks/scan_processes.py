"""What does it cost to look into every process of a host?

    python benchmarks/scan_processes.py [--processes N] [--rounds N] [--limit-ms MS]

Starts N sleeping processes (2,000), scans them all by device number as a reset does, and prints the CPU
milliseconds of the median scan and its ratio to the limit (300). Exits 1 where the median is over the limit.
Beside it stands the scan with every file asked for its numbers, which is what the hints of the device table
save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from backend.agent.devices import NvidiaDevices
from backend.agent.holders import scan

if TYPE_CHECKING:
    from backend.agent.seam import DeviceTable


class Unhinted(NvidiaDevices):
    """The same numbers, with no word on where devices may lie."""

    def hints(self) -> tuple[str, ...]:
        return ()


def cpu_ms(table: DeviceTable, rounds: int) -> list[float]:
    """Scan some times and return what each cost this process."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        scan(table)
        found.append((time.process_time() - began) * 1000)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="the CPU cost of one scan of all processes")
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-ms", type=float, default=300.0)
    options = parser.parse_args()
    sleepers = [subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) for _ in range(options.processes)]
    try:
        hinted = statistics.median(cpu_ms(NvidiaDevices(), options.rounds))
        unhinted = statistics.median(cpu_ms(Unhinted(), options.rounds))
    finally:
        for process in sleepers:
            process.kill()
        for process in sleepers:
            process.wait()
    print(json.dumps({
        "processes": options.processes, "scan_cpu_ms": round(hinted, 1), "unhinted_cpu_ms": round(unhinted, 1),
        "limit_ms": options.limit_ms, "ratio_to_limit": round(hinted / options.limit_ms, 3),
    }))  # fmt: skip
    return 0 if hinted <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
