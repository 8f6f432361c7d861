"""On a machine with one NVIDIA GPU and torch: is what `status` says right, and what does a tick of the agent cost?

    python benchmarks/h200_status.py OUT.json

Reads `status` between two calls of nvidia-smi, idle, under a torch load with a forked heir, and with the heir alone,
which the console then resets. Needs the console's packages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_victims import torch_victim

FIELDS = {
    "memory_used_bytes": ("memory.used", 1 << 20),
    "memory_total_bytes": ("memory.total", 1 << 20),
    "memory_reserved_bytes": ("memory.reserved", 1 << 20),
    "utilisation_percent": ("utilization.gpu", 1),
    "temperature_c": ("temperature.gpu", 1),
    "power_w": ("power.draw.instant", 1),
    "power_limit_w": ("power.limit", 1),
    "sm_clock_mhz": ("clocks.sm", 1),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", 1),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", 1),
    "pcie_gen": ("pcie.link.gen.current", 1),
    "pcie_width": ("pcie.link.width.current", 1),
}


def run(*words: str, timeout_s: float = 300) -> tuple[int, str, float]:
    started = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout or done.stderr, time.monotonic() - started


def eightzeros(*words: str) -> tuple[int, Any, float]:
    code, text, seconds = run(sys.executable, "-m", "tui.cli", *words)
    try:
        return code, json.loads(text), seconds
    except ValueError:
        return code, {"text": text}, seconds


def fields() -> dict[str, Any]:
    """Read `status` between two calls of nvidia-smi, so that a value that moves can be told from one that is wrong."""
    names = [name for name, _ in FIELDS.values()]
    words = [
        "nvidia-smi",
        "--query-gpu=uuid,name,driver_version," + ",".join(names),
        "--format=csv,noheader,nounits",
    ]
    before = run(*words)[1].strip().split(", ")
    code, said, seconds = eightzeros("status", "--json")
    after = run(*words)[1].strip().split(", ")
    host = said["hosts"][0]
    gpu = host["gpus"][0]
    rows = {
        "uuid": [before[0], gpu["uuid"]],
        "name": [before[1], gpu["name"]],
        "driver": [before[2], host["driver"]],
    }
    for at, (ours, (_, scale)) in enumerate(FIELDS.items(), 3):
        reading = gpu["readings"][ours]
        value = reading.get("value")
        rows[ours] = [before[at], after[at], value / scale if value is not None else reading]
    compute = run("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")[1].strip()
    holders = [[h["pid"], h["user"], h["kind"], h["used_bytes"]] for h in gpu["holders"]]
    return {"exit": code, "seconds": round(seconds, 2), "fields": rows, "smi_compute": compute, "holders": holders,
            "badge": gpu["badge"], "problem": gpu["problem"]}  # fmt: skip


def ticks(count: int = 20) -> dict[str, Any]:
    """Let the agent run for some ticks and return what each cost it, in ms of CPU, and how long the first took."""
    from backend.config import Config, Host
    from backend.fleet import Fleet

    began, costs = time.monotonic(), []
    with Fleet(Config(hosts={"here": Host(python=sys.executable)})) as fleet:
        host = fleet.ready("here", 60).result()
        first_s, seen = time.monotonic() - began, 0
        while len(costs) < count:
            time.sleep(0.1)
            if host.telemetry and host.telemetry.seq != seen:
                seen = host.telemetry.seq
                costs.append(host.telemetry.tick_cpu_ms)
    return {"first_telemetry_s": round(first_s, 3), "tick_cpu_ms": costs, "median_ms": statistics.median(costs[3:])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"baseline": eightzeros("baseline", "record"), "idle": fields(), "ticks": ticks()}
    victim = torch_victim(options.out.parent, 60)
    time.sleep(2)
    result["busy"], result["plan"] = fields(), eightzeros("reset", "--plan", "--json")[1]
    victim.process.kill()
    victim.process.wait()
    result["heir_only"] = {"fields": fields(), "plan": eightzeros("reset", "--plan", "--json")[1], "heir": victim.heir}
    result["heir_reset"] = eightzeros("reset", "--yes", "--json")
    options.out.write_text(json.dumps(result, indent=1))
    for when in ("idle", "busy"):
        for name, row in result[when]["fields"].items():
            print(f"{when:<5} {name:<24} {row}")
        print(when, *(result[when][key] for key in ("smi_compute", "holders", "badge", "seconds")))
    print("agent", {key: value for key, value in result["ticks"].items() if key != "tick_cpu_ms"})
    print("heir alone", result["heir_reset"][0], result["heir_reset"][1].get("verdict"))


if __name__ == "__main__":
    main()
