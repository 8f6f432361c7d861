"""On a machine with NVIDIA GPUs: the CUDA test of a reset, again and again: does it pass, how long, what does it leave?

    python benchmarks/h200_cuda_test.py OUT.json [--trials N]

Needs pynvml alone. Each trial runs the agent's own test on every GPU at once and then reads, every 10 ms, until memory
used (v2) and the process list are back where they were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pynvml

from backend.agent.devices import NvidiaDevices
from backend.agent.main import relaunch
from backend.agent.nvml import NvmlDriver
from backend.agent.reset import cudatest
from backend.agent.seam import Machine

GIVE_UP_S = 10.0


def used(index: int) -> tuple[int, int]:
    """Return memory used and the number of compute processes."""
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    return int(memory.used), len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    root = str(Path(__file__).resolve().parent.parent)
    words = ["env", f"PYTHONPATH={root}", *relaunch()]
    machine = Machine(NvmlDriver, NvidiaDevices, words, cuda_library="libcuda.so.1")
    driver = NvmlDriver()
    inventory = driver.open()
    floor = {gpu.index: used(gpu.index) for gpu in inventory.gpus}
    result: dict[str, Any] = {"driver": inventory.driver, "gpus": [asdict(gpu) for gpu in inventory.gpus],
                              "floor": floor, "trials": []}  # fmt: skip
    for _ in range(options.trials):
        began = time.monotonic()
        outcomes = cudatest.run(machine, [cudatest.Subject(gpu) for gpu in inventory.gpus])
        ended = time.monotonic()
        while any(used(index) != idle for index, idle in floor.items()) and time.monotonic() < ended + GIVE_UP_S:
            time.sleep(0.01)
        result["trials"].append({
            "wall_s": round(ended - began, 3), "back_at_floor_s": round(time.monotonic() - ended, 3),
            "left": {index: used(index) for index in floor}, "outcomes": [asdict(one) for one in outcomes],
        })  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1))
    report(result)


def report(result: dict[str, Any]) -> None:
    last = result["trials"][-1]["outcomes"][0]
    print("driver", result["driver"], "floor", result["floor"], "left", result["trials"][-1]["left"])
    print("outcomes", sorted({one["outcome"] for row in result["trials"] for one in row["outcomes"]}), last["reason"])
    walls = [row["wall_s"] for row in result["trials"]]
    back = max(row["back_at_floor_s"] for row in result["trials"])
    print(f"whole test: first {walls[0]:.2f} s, median {statistics.median(walls):.2f}, longest {max(walls):.2f}, "
          f"n {len(walls)}; at the floor again within {back:.3f} s")  # fmt: skip
    print("steps", last["steps"])


if __name__ == "__main__":
    main()
