"""On a machine with one NVIDIA GPU and torch: is `status` right, and is a reset quick and right?

    python benchmarks/h200_reset.py OUT_DIR [--trials N]

Writes readings to OUT_DIR/h200_reset.json and prints a table. The victim is a torch process that holds 60 GB, ignores
SIGTERM and has a forked child that inherited its device files. A sampler of its own polls NVML every 10 ms, so that
our time to clearance is judged by something else. Beside it runs the recipe that operators type by hand, mended so
that it spares its own shell.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml

VICTIM = """
import os, signal, sys, time, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = [torch.ones(2**28, dtype=torch.float32, device="cuda") for _ in range(int(sys.argv[1]))]
torch.cuda.synchronize()
heir = os.fork()
if heir == 0:
    time.sleep(600)
    os._exit(0)
print(heir, flush=True)
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""
RECIPE = (
    "pkill -f '[v]ictim.py'; sleep 2; ps aux | grep '[v]ictim.py' | awk '{print $2}' | xargs -r kill -9; "
    "sleep 1; sleep 5; nvidia-smi --query-gpu=index,memory.used --format=csv,noheader"
)
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


class Sampler(threading.Thread):
    """Poll memory used (v2) and the compute list every 10 ms; remember when they last were not at the floor."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.floor_bytes = self.used()
        self.rows: list[tuple[float, int, int]] = []
        self.ended = threading.Event()

    def used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu, version=pynvml.nvmlMemory_v2).used)

    def run(self) -> None:
        while not self.ended.wait(0.01):
            count = len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu))
            self.rows.append((time.time(), self.used(), count))

    def cleared_after(self, at: float) -> float | None:
        """Return the wall time of the first sample after `at` from which on all were clear, or None."""
        dirty = [t for t, used, count in self.rows if t > at and (used > self.floor_bytes + (8 << 20) or count)]
        later = [t for t, _, _ in self.rows if t > (dirty[-1] if dirty else at)]
        return later[0] if later else None


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


def victim(folder: Path, gigabytes: int) -> tuple[subprocess.Popen[str], int]:
    path = folder / "victim.py"
    path.write_text(VICTIM)
    process = subprocess.Popen([sys.executable, str(path), str(gigabytes)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


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


def gone(pid: int) -> bool:
    """Say whether a process is gone, or a zombie that an init has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def trial(folder: Path, sampler: Sampler, gigabytes: int) -> dict[str, Any]:
    process, heir = victim(folder, gigabytes)
    time.sleep(1)
    held = sampler.used()
    code, receipt, seconds = eightzeros("reset", "--yes", "--json")
    process.wait()
    signals = receipt.get("signals", [])
    kills = [s for s in signals if s.get("signal") in ("SIGKILL", 9)]
    started = receipt.get("started_at", 0.0)
    last = max((s["at_s"] for s in kills), default=0.0)
    cleared = sampler.cleared_after(started + last)
    return {
        "held_gib": round(held / (1 << 30), 2), "exit": code, "verdict": receipt.get("verdict"),
        "seconds": round(seconds, 2),
        "durations": receipt.get("durations"), "killed": [p["pid"] for p in receipt.get("killed", [])],
        "spared": [[p["pid"], p["command"][:60], p["reason"]] for p in (receipt.get("plan") or {}).get("spared", [])],
        "victim": process.pid, "heir": heir, "heir_gone": gone(heir),
        "kills": len(kills), "sampler_clear_after_last_kill_s": round(cleared - started - last, 3) if cleared else None,
        "receipt": receipt,
    }  # fmt: skip


def recipe(folder: Path, sampler: Sampler) -> dict[str, Any]:
    process, heir = victim(folder, 60)
    time.sleep(1)
    code, text, seconds = run("bash", "-c", RECIPE)
    still = Path(f"/proc/{heir}").exists()
    result = {"exit": code, "output": text.strip(), "seconds": round(seconds, 2), "heir_alive": still,
              "used_mib": sampler.used() >> 20}  # fmt: skip
    process.kill()
    process.wait()
    if still:
        os.kill(heir, 9)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sampler = Sampler()
    sampler.start()
    result: dict[str, Any] = {"idle_used_bytes": sampler.floor_bytes}
    result["baseline"] = eightzeros("baseline", "record")
    result["idle"] = fields()
    result["ticks"] = ticks()
    process, heir = victim(options.out, 60)
    time.sleep(2)
    result["busy"] = fields()
    result["plan"] = eightzeros("reset", "--plan", "--json")[1]
    process.kill()
    process.wait()
    result["heir_only"] = {
        "fields": fields(),
        "plan": eightzeros("reset", "--plan", "--json")[1],
        "heir": heir,
    }
    result["heir_reset"] = eightzeros("reset", "--yes", "--json")
    result["trials"] = [trial(options.out, sampler, 60) for _ in range(options.trials)]
    result["verify"] = eightzeros("verify", "--json")
    result["recipe"] = recipe(options.out, sampler)
    sampler.ended.set()
    (options.out / "h200_reset.json").write_text(json.dumps(result, indent=1))
    report(result)


def report(result: dict[str, Any]) -> None:
    for when in ("idle", "busy"):
        for name, row in result[when]["fields"].items():
            print(f"{when:<5} {name:<24} {row}")
        print(
            when,
            result[when]["smi_compute"],
            result[when]["holders"],
            result[when]["badge"],
            result[when]["seconds"],
        )
    for row in result["trials"]:
        print({key: value for key, value in row.items() if key not in ("receipt", "spared")})
    print("spared", result["trials"][0]["spared"])
    releases = [row["durations"]["release"] for row in result["trials"] if "release" in (row["durations"] or {})]
    if releases:
        print(f"SIGKILL to clearance: median {statistics.median(releases):.2f} s, max {max(releases):.2f} s")
    print("agent", {key: value for key, value in result["ticks"].items() if key != "tick_cpu_ms"})
    print("recipe", result["recipe"])
    print("heir alone", result["heir_reset"][0], result["heir_reset"][1].get("verdict"))


if __name__ == "__main__":
    main()
