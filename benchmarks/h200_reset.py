"""On a machine with one NVIDIA GPU: how long does a reset take beyond what the driver needs, and is it right?

    PYTHONPATH=. python3 benchmarks/h200_reset.py OUT.json [--trials N] [--jitter-s S] [--budget-s S] [--only NAME ...]

Needs pynvml, and torch for one scenario; no console. Each reset is the agent's own program in its role `reset`, started
from a plan like a console's. A sampler of its own reads NVML every 10 ms beside it. Readings are written after each
scenario; what no longer fits into the budget is named as skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_victims as victims
from gpu_recipe import recipe
from gpu_report import report
from gpu_sampler import Sampler, jitter

from backend.agent.devices import NvidiaDevices
from backend.agent.main import relaunch
from backend.agent.nvml import NvmlDriver
from backend.agent.reset import cudatest, ops, receipt
from backend.agent.seam import Machine
from backend.wire import Plan, Refused, RunSpec, plain

ROOT = str(Path(__file__).resolve().parent.parent)
MPS = "nvidia-cuda-mps-control"


def machine() -> Machine:
    """Return this host, with a program that finds the checkout from any folder."""
    return Machine(NvmlDriver, NvidiaDevices, ["env", f"PYTHONPATH={ROOT}", *relaunch()], cuda_library="libcuda.so.1")


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """Have a new process do it: NVML refuses a child forked from one that uses it already, as the sampler does."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(told, work, *given).result()


def told(work: Callable[..., Any], *given: Any) -> Any:
    """Do it; a refusal becomes an error that finds its way between processes."""
    try:
        return work(*given)
    except Refused as refused:
        raise RuntimeError(str(refused)) from None


def planned(name: str) -> tuple[Plan, RunSpec, float]:
    """Plan a reset as the agent does for a console; return the plan, what starts it, and the plan's seconds."""
    began = time.monotonic()
    plan = ops.op_plan(machine(), {})
    seconds = time.monotonic() - began
    return plan, ops.prepare_start(machine(), {"id": name, "digest": plan.digest}), seconds


def baseline_recorded() -> dict[str, Any]:
    """Record this host's baseline."""
    return ops.op_baseline_record(machine(), {})


def verified(name: str) -> str:
    """Return the verdict on the GPUs as they are."""
    return ops.op_verify(machine(), {"id": name}).verdict


class Measured:
    """One host and its sampler; every reset that is measured goes through `reset`."""

    def __init__(self, sampler: Sampler, scratch: Path, host: Machine) -> None:
        self.sampler, self.scratch, self.host = sampler, scratch, host
        self._count = 0

    def reset(self, victim: victims.Victim | None) -> dict[str, Any]:
        """Plan and reset, and set the receipt beside what the sampler saw."""
        self._count += 1
        held, name = self.sampler.used(), f"bench-{os.getpid()}-{self._count}"
        plan, spec, planned_s = apart(planned, name)
        folder = self.scratch / name
        folder.mkdir()
        words = [*spec.argv[:-2], str(folder), spec.argv[-1]]
        started = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        ended = time.monotonic()
        said = receipt.load(name)
        found = {
            "exit": done.returncode, "verdict": said.verdict, "held_mib": held >> 20, "plan_s": round(planned_s, 3),
            "start_s": victim.start_s if victim else None, "wall_s": round(ended - started, 3),
            "planned": [one.pid for one in plan.victims], "killed": [one.pid for one in said.killed],
            "left": victim.left() if victim else [], "durations": said.durations,
            **self._beside(folder, said.durations, started, ended), "receipt": plain(said),
        }  # fmt: skip
        if done.returncode not in (0, 1):
            found["output"] = (done.stdout + done.stderr)[-2000:]
        return found

    def _beside(self, folder: Path, durations: dict[str, float], started: float, ended: float) -> dict[str, Any]:
        """Compare our first clear reading, and the verdict, with the sampler's first clear sample."""
        rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text("utf-8").splitlines()]
        zero = rows[0]["data"]["monotonic_s"] - rows[0]["at_s"]
        signals = [row for row in rows if row["kind"] == "signal" and row["data"]["signal"] != "SIGCONT"]
        verdict = next(row["at_s"] for row in rows if row["kind"] == "verdict") + zero
        if not signals or "release" not in durations:
            return {"no_release": True}
        first, last = signals[0]["at_s"] + zero, signals[-1]["at_s"] + zero
        test_at = next((row["at_s"] for row in rows if "CUDA program" in row["text"]), verdict - zero) + zero
        seen, ours = self.sampler.cleared_after(last, test_at), last + durations["release"]
        # The grace of a victim that obeys lasts until it is gone, which is the driver's release too: counted once.
        waited = max(durations["grace"], (seen or ours) - first)
        return {
            "sampler_release_s": round(seen - last, 3) if seen else None,
            "ours_after_sampler_s": round(ours - seen, 3) if seen else None,
            "verdict_after_release_s": round(verdict - (seen or ours), 3),
            "above_grace_and_release_s": round(ended - started - waited, 3),
            "curve": self.sampler.curve(last, test_at),
        }  # fmt: skip


def holding(host: Measured, *options: str) -> Callable[[], dict[str, Any]]:
    """Make a scenario: a victim with these options, reset."""

    def scenario() -> dict[str, Any]:
        victim = victims.start(*options)
        try:
            return host.reset(victim)
        finally:
            victim.end()

    return scenario


def stopped(host: Measured) -> dict[str, Any]:
    """Stop a victim as by SIGSTOP, and reset."""
    victim = victims.start("--device-gb", "20")
    os.kill(victim.pid, 19)
    try:
        return host.reset(victim)
    finally:
        victim.end()


def by_torch(host: Measured) -> dict[str, Any]:
    """Reset a torch process of 60 GB that computes, ignores SIGTERM and has a forked heir."""
    victim = victims.torch_victim(host.scratch, 60)
    try:
        return host.reset(victim)
    finally:
        victim.end()


def mps(host: Measured) -> dict[str, Any]:
    """Reset a client of an MPS server; the server itself is protected and should be named."""
    folder = host.scratch / "mps"
    folder.mkdir()
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run([MPS, "-d"], env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if started.returncode:
        return {"not_run": (started.stdout + started.stderr)[-500:]}
    victim = None
    try:
        victim = victims.start("--device-gb", "5", env=env)
        listed = host.sampler.processes()
        found = host.reset(victim)
    finally:
        if victim is not None:
            victim.end()
        subprocess.run([MPS], input="quit\n", env={**os.environ, **env}, capture_output=True, text=True, timeout=30,
                       check=False)  # fmt: skip
    return {"listed": listed, **found, "after_quit": apart(verified, "after-mps")}


def cuda_tests(host: Measured) -> dict[str, Any]:
    """Run the CUDA test by itself."""
    driver = NvmlDriver()
    gpus = driver.open().gpus
    rows = []
    for _ in range(10):
        began = time.monotonic()
        outcomes = cudatest.run(host.host, [cudatest.Subject(gpu) for gpu in gpus])
        rows.append({"wall_s": round(time.monotonic() - began, 3), "outcomes": [asdict(one) for one in outcomes]})
    return {"trials": rows}


def scenarios(host: Measured, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what is measured, the shortest first and the pinned memory last: the largest takes a minute to start."""
    found: dict[str, Callable[[], Any]] = {
        "jitter": lambda: jitter(host.sampler, options.jitter_s),
        "baseline": lambda: apart(baseline_recorded),
        "cuda_test": lambda: cuda_tests(host),
    }
    for size in (1, 60, 120):
        for how in ("idle", "busy"):
            found[f"{size}_gb_{how}"] = holding(host, "--device-gb", str(size), *(["--busy"] if how == "busy" else []))
    found["stopped"] = lambda: stopped(host)
    found["heir"] = holding(host, "--device-gb", "20", "--heir")
    found["ignores_term"] = holding(host, "--device-gb", "20", "--ignore-term", "--busy")
    for number in range(options.trials):
        found[f"trial_{number}"] = holding(host, "--device-gb", "1", *(["--busy"] if number % 2 else []))
    found["mps"] = lambda: mps(host)
    found["recipe"] = lambda: recipe(host.scratch, host.sampler)
    found["torch_60_gb_busy_heir"] = lambda: by_torch(host)
    for size in (10, 40, 80):
        found[f"pinned_{size}_gb"] = holding(host, "--device-gb", "1", "--pinned-gb", str(size))
    wanted = tuple(options.only) or ("",)
    return {name: work for name, work in found.items() if name.startswith(wanted)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=22)
    parser.add_argument("--jitter-s", type=float, default=180.0)
    parser.add_argument("--budget-s", type=float, default=500.0)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # no receipt or baseline of this host's own is touched
        sampler = Sampler()
        sampler.start()
        host = Measured(sampler, Path(folder), machine())
        result: dict[str, Any] = {
            "gpu": plain(NvmlDriver().open()),
            "floor_bytes": sampler.floor_bytes,
            "scenarios": {},
        }
        for name, work in scenarios(host, options).items():
            since = time.monotonic()
            if since - began > options.budget_s:
                result["scenarios"][name] = {"skipped": "the budget was used up"}
                continue
            try:
                said = work()
            except Exception as error:  # one scenario that fails must not cost the others
                said = {"failed": f"{type(error).__name__}: {error}"}
            result["scenarios"][name] = {**said, "scenario_s": round(time.monotonic() - since, 2)}
            result["longest_sample_s"] = round(sampler.longest_s, 3)
            options.out.write_text(json.dumps(result, indent=1))
        sampler.stop()
        options.out.write_text(json.dumps(result, indent=1))
    report(result)


if __name__ == "__main__":
    main()
