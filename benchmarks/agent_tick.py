"""What does one telemetry tick cost the agent at 8 GPUs?

    python benchmarks/agent_tick.py [--gpus N] [--ticks N] [--limit-ms MS] [--out FILE]

Runs the agent's telemetry at 1 Hz against a double of NVIDIA's library, with one holder a GPU, and prints the CPU
milliseconds of a tick (agent and driver's child together, writing the line included): median and 95th percentile, the
part of a core, and the ratio to the limit (1 ms). Beside it, in the same run, a loop that asks the set that other
monitors ask at each tick: both PCIe directions, fan, energy, process utilisation, every clock and list, and each
process's names anew. The double takes as long for its expensive calls as an H200 did, sleeping, so CPU is the cost of
asking, carrying and describing; the time that the driver is kept busy stands beside it as the wall time of one round.
Exits 1 where the median is over the limit. `--out` writes the readings as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pynvml

from backend.agent import procfs
from backend.agent.child import OPEN, DriverChild
from backend.agent.devices import NvidiaDevices
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.wire import encode
from tests.nvml import NvmlDouble

PERIOD_S = 1.0
H200_MS = {
    "nvmlDeviceGetPcieThroughput": 20.97,
    "nvmlDeviceGetTotalEnergyConsumption": 3.253,
    "nvmlDeviceGetFieldValues": 3.18,
    "nvmlDeviceGetProcessUtilization": 3.082,
    "nvmlDeviceGetFanSpeed": 0.369,
    "nvmlDeviceGetMigMode": 0.156,
}
"""Medians of one H200 with driver 580, 2026-12-01; every other call took 31 us or less."""


def agent_ticks(nvml: NvmlDouble, count: int) -> list[float]:
    """Run the source as the agent's loop does, and return the CPU ms of each tick after the first slow round."""
    source = TelemetrySource(Machine(nvml.make_driver, NvidiaDevices, [sys.executable]), period_s=PERIOD_S)
    found: list[float] = []
    while len(found) < count + 3:
        ready, _, _ = select.select(source.filenos(), [], [], max(0.0, source.due() - time.monotonic()))
        for message in source.step(set(ready)):
            began = time.process_time()
            encode(message)
            if message["t"] == "telemetry":
                found.append(message["telemetry"].tick_cpu_ms + (time.process_time() - began) * 1000)
    source.close()
    return found[3:]


def lean_round_ms(nvml: NvmlDouble, count: int) -> float:
    """Return the median wall milliseconds in which the child answers for every GPU."""
    child = DriverChild(nvml.make_driver)
    child.start()
    gpus = range(len(child.gather("open").answers[OPEN].value.gpus))
    found = []
    for _ in range(count):
        began = time.monotonic()
        child.gather("lean", gpus)
        found.append((time.monotonic() - began) * 1000)
    child.close()
    return statistics.median(found)


def naive_ticks(nvml: NvmlDouble, count: int) -> tuple[list[float], float]:
    """Ask everything of every GPU at each tick, in this process: the CPU ms of each, and the median wall ms."""
    os.environ.update(nvml.env)
    ctypes.CDLL(str(nvml.library), ctypes.RTLD_GLOBAL)
    pynvml.nvmlInit()
    found, walls = [], []
    for _ in range(count + 1):
        began, wall = time.process_time(), time.monotonic()
        rows = [_everything(index) for index in range(pynvml.nvmlDeviceGetCount())]
        json.dumps(rows)
        found.append((time.process_time() - began) * 1000)
        walls.append((time.monotonic() - wall) * 1000)
        time.sleep(PERIOD_S)
    pynvml.nvmlShutdown()
    return found[1:], statistics.median(walls)


def _everything(index: int) -> dict[str, Any]:
    n = pynvml
    gpu = n.nvmlDeviceGetHandleByIndex(index)
    getters = {
        "name": lambda: n.nvmlDeviceGetName(gpu),
        "uuid": lambda: n.nvmlDeviceGetUUID(gpu),
        "memory": lambda: n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2).used,
        "memory_v1": lambda: n.nvmlDeviceGetMemoryInfo(gpu).used,
        "utilisation": lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "temperature": lambda: n.nvmlDeviceGetTemperature(gpu, 0),
        "power": lambda: n.nvmlDeviceGetPowerUsage(gpu),
        "limit": lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu),
        "performance": lambda: n.nvmlDeviceGetPerformanceState(gpu),
        "fan": lambda: n.nvmlDeviceGetFanSpeed(gpu),
        "energy": lambda: n.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "clocks": lambda: [n.nvmlDeviceGetClockInfo(gpu, kind) for kind in range(4)],
        "clocks_max": lambda: [n.nvmlDeviceGetMaxClockInfo(gpu, kind) for kind in range(2)],
        "reasons": lambda: n.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "persistence": lambda: n.nvmlDeviceGetPersistenceMode(gpu),
        "mig": lambda: n.nvmlDeviceGetMigMode(gpu),
        "ecc": lambda: [n.nvmlDeviceGetTotalEccErrors(gpu, kind, 0) for kind in range(2)],
        "remapped": lambda: n.nvmlDeviceGetRemappedRows(gpu),
        "pcie": lambda: [n.nvmlDeviceGetPcieThroughput(gpu, way) for way in range(2)],
        "pcie_gen": lambda: n.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_width": lambda: n.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "process_use": lambda: n.nvmlDeviceGetProcessUtilization(gpu, 0),
        "compute": lambda: [_process(p) for p in n.nvmlDeviceGetComputeRunningProcesses_v3(gpu)],
        "graphics": lambda: [_process(p) for p in n.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu)],
        "mps": lambda: [_process(p) for p in n.nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu)],
    }
    return {name: _or_none(get) for name, get in getters.items()}


def _or_none(get: Any) -> Any:
    try:
        return get()
    except pynvml.NVMLError:
        return None


def _process(process: Any) -> tuple[Any, ...]:
    found = procfs.stat(process.pid)
    owner = procfs.user_name(procfs.uid(process.pid))
    return process.pid, process.usedGpuMemory, found, owner, procfs.command(process.pid)


def spread(found: list[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the part of a core at one tick a second."""
    ordered = sorted(found)
    median = statistics.median(ordered)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    mean = statistics.fmean(ordered)
    return {"median_ms": median, "p95_ms": p95, "core_percent": mean / (PERIOD_S * 1000) * 100}


def main() -> int:
    """Run both, print the table, and say by the exit code whether the limit is kept."""
    parser = argparse.ArgumentParser(description="what one telemetry tick costs the agent")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--ticks", type=int, default=30)
    parser.add_argument("--limit-ms", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, NvmlDouble(options.gpus, tmp_path=Path(folder)) as nvml:
        os.environ["HOME"] = folder
        holders = [subprocess.Popen(["sleep", "3600"]) for _ in range(options.gpus)]
        for index, holder in enumerate(holders):
            nvml.gpu(index).hold(holder.pid, 100 << 30, owner=0)
            for function, milliseconds in H200_MS.items():
                nvml.gpu(index).delay(milliseconds, function)
        agent = spread(agent_ticks(nvml, options.ticks))
        agent["round_ms"] = lean_round_ms(nvml, options.ticks)
        ticks, wall_ms = naive_ticks(nvml, options.ticks)
        naive = {**spread(ticks), "round_ms": wall_ms}
        for holder in holders:
            holder.kill()
            holder.wait()
    print(f"{options.gpus} GPUs, {options.ticks} ticks at 1 Hz, one holder a GPU; CPU of a tick")
    for name, row in (("agent", agent), ("asking everything each tick", naive)):
        print(
            f"  {name:28} median {row['median_ms']:6.2f} ms  p95 {row['p95_ms']:6.2f} ms"
            f"  {row['core_percent']:5.2f} % of a core  one round {row['round_ms']:7.2f} ms"
        )
    limit, rival = agent["median_ms"] / options.limit_ms, naive["median_ms"] / agent["median_ms"]
    busy = naive["round_ms"] / agent["round_ms"]
    print(f"  agent / limit of {options.limit_ms:g} ms: {limit:.2f}")
    print(f"  everything / agent: CPU {rival:.1f}, time that the driver is kept busy {busy:.0f}")
    if options.out:
        record = {"gpus": options.gpus, "ticks": options.ticks, "limit_ms": options.limit_ms}
        options.out.write_text(json.dumps({**record, "agent": agent, "naive": naive}, indent=1) + "\n")
    return 0 if limit <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
