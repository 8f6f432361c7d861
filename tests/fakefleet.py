"""A fleet of made-up hosts with the surface that the console calls: real records, no network, no threads of its own."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backend.config import Config, Console, Host, Stage
from backend.fleet import HostState, LinkState, LinkStatus
from backend.fleet.state import host_event
from backend.wire import (
    CLEAN,
    GIB,
    MIB,
    NOT_SUPPORTED,
    Gate,
    GpuFacts,
    GpuSample,
    GpuVerdict,
    Hello,
    Holder,
    HostSample,
    Inventory,
    Plan,
    Process,
    Progress,
    Reading,
    Receipt,
    Refused,
    ResetEvent,
    Run,
    Telemetry,
)
from tests.flights import flights

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.fleet import Event

TOTAL = 140 * GIB
BASELINE = 4 * MIB
SERVER = "/opt/venv/bin/python3 -m sglang.launch_server --model-path /models/kimi-k2.5 --tp 8 --chunked-prefill-size -1"
STAGES = ("prepare", "serve", "extract", "audit", "train")


def config(hosts: int = 1, **changes: Any) -> Config:
    """Make a configuration of so many hosts and the usual stages."""
    names = [f"gpu-{number:02d}" for number in range(1, hosts + 1)]
    stages = {
        name: Stage(command=[f"/opt/{name}"], needs=["clean-gpus"] if name != "prepare" else []) for name in STAGES
    }
    stages["extract"] = Stage(kind="extract", corpus="/data/corpus.jsonl", out="/data/hidden")
    return Config(
        hosts={name: Host(address=f"{name}.cluster") for name in names},
        stages=stages,
        console=changes.pop("console", Console(fps=20)),
        **changes,
    )


class FakeFleet:
    """Answers every action at once from the values a test sets; `calls` holds what was asked, in order."""

    def __init__(self, settings: Config, gpus: int = 8, listener: Callable[[Event], None] | None = None) -> None:
        self.config, self.listener = settings, listener
        self.hosts = {name: make_host(name, host, gpus) for name, host in settings.hosts.items()}
        self.calls: list[tuple[Any, ...]] = []
        self.flights = flights()
        self.plan = make_plan()
        self.gate_list = [
            Gate("gpus", True, "8 of 8 GPUs at their baseline"),
            Gate("disk", True, "2.1 TiB free"),
        ]
        self.files: dict[str, Any] = {}
        self.logs: dict[str, str] = {}
        self.error: Exception | None = None
        self.hold = False
        self.on_reset: Callable[[str], None] | None = None
        self.ticks = 0

    def start(self) -> None:
        """Say that it was started."""
        self.calls.append(("start",))

    def stop(self) -> None:
        """Say that it was stopped."""
        self.calls.append(("stop",))

    def event(self, host: str, level: str, text: str) -> None:
        """Let something happen on a host."""
        happened = host_event(self.hosts[host], level, text)
        if self.listener:
            self.listener(happened)

    def tick(self) -> None:
        """Give every live host one more second of telemetry."""
        self.ticks += 1
        for number, host in enumerate(self.hosts.values()):
            if host.link.state is LinkState.LIVE:
                feed(host, self.ticks, number)

    def _answer(self, name: str, *args: Any, value: Any) -> Future[Any]:
        self.calls.append((name, *args))
        future: Future[Any] = Future()
        if self.hold:
            return future
        if self.error:
            future.set_exception(self.error)
        else:
            future.set_result(value() if callable(value) else value)
        return future

    def plan_reset(self, host: str) -> Future[Plan]:
        """Answer with the plan that the test set."""
        return self._answer("plan_reset", host, value=self.plan)

    def start_reset(self, host: str, plan: Plan) -> Future[Run]:
        """Begin a reset, which goes on when the test calls `reset_step`."""

        def begin() -> Run:
            state = self.hosts[host].reset
            state.plan, state.events, state.receipt, state.running = plan, [], None, True
            state.started_at = time.time()
            if self.on_reset:
                self.on_reset(host)
            return Run("reset-1", "reset", "running")

        return self._answer("start_reset", host, plan.digest, value=begin)

    def reset_step(self, host: str, at_s: float, kind: str, text: str, **data: Any) -> None:
        """Append one event to the reset that runs."""
        self.hosts[host].reset.events.append(ResetEvent(at_s, kind, text, data))
        self.hosts[host].revision += 1

    def end_reset(self, host: str, receipt: Receipt) -> None:
        """End the reset that runs with a receipt."""
        state = self.hosts[host]
        state.reset.receipt, state.reset.running = receipt, False
        state.verdicts = {gpu.index: gpu for gpu in receipt.after}
        state.revision += 1

    def verify(self, host: str) -> Future[Receipt]:
        """Answer with a clean receipt."""

        def done() -> Receipt:
            receipt = make_receipt(host, kind="verify")
            self.end_reset(host, receipt)
            return receipt

        return self._answer("verify", host, value=done)

    def record_baseline(self, host: str) -> Future[dict[str, Any]]:
        """Answer with eight baselines."""
        return self._answer("record_baseline", host, value={"schema": 1, "gpus": {f"GPU-{i}": {} for i in range(8)}})

    def gates(self, host: str, stage: str) -> Future[list[Gate]]:
        """Answer with the gates that the test set."""
        return self._answer("gates", host, stage, value=lambda: list(self.gate_list))

    def launch(self, host: str, stage: str, force: str = "") -> Future[Run]:
        """Start a run, or refuse like the host does while a gate is shut."""

        def begin() -> Run:
            if not force and any(gate.ok is not True for gate in self.gate_list):
                raise Refused("gate", "a gate is shut")
            run = make_run(f"{stage}-1", stage, forced=force)
            self.hosts[host].runs[run.id] = run
            return run

        self.calls.append(("launch", host, stage, force))
        future: Future[Run] = Future()
        try:
            future.set_result(begin())
        except Refused as refused:
            future.set_exception(refused)
        return future

    def stop_run(self, host: str, run_id: str) -> Future[Run]:
        """Mark a run as stopping."""

        def halt() -> Run:
            run = replace(self.hosts[host].runs[run_id], state="stopping")
            self.hosts[host].runs[run_id] = run
            return run

        return self._answer("stop_run", host, run_id, value=halt)

    def log(self, host: str, run_id: str, offset: int, limit: int = 65536) -> Future[dict[str, Any]]:
        """Answer with a piece of the log that the test set."""

        def piece() -> dict[str, Any]:
            whole = self.logs.get(run_id, "").encode()
            start = max(0, len(whole) - limit) if offset < 0 else offset
            part = whole[start : start + limit]
            return {
                "offset": start,
                "next": start + len(part),
                "size": len(whole),
                "text": part.decode(errors="replace"),
            }

        return self._answer("log", host, run_id, offset, value=piece)

    def list_shards(self, host: str, path: str, offset: int = 0, since: float = 0.0) -> Future[dict[str, Any]]:
        """Answer with the folder that the test set."""
        return self._answer("list_shards", host, path, value=lambda: {"next": None, **self._file(path)})

    def show_shard(self, host: str, path: str, values: bool = False) -> Future[dict[str, Any]]:
        """Answer with the shard that the test set."""
        return self._answer("show_shard", host, path, value=lambda: self._file(path))

    def shard_lengths(self, host: str, path: str) -> Future[dict[str, Any]]:
        """Answer that nothing tells a length."""
        return self._answer("shard_lengths", host, path, value=lambda: {"samples": 0})

    def _file(self, path: str) -> Any:
        if path not in self.files:
            raise Refused("not-found", f"{path}: no such file", "check the path")
        return self.files[path]

    def trust(self, host: str, host_key: Any) -> Future[None]:
        """Accept a key."""
        return self._answer("trust", host, host_key, value=None)

    def retry(self, host: str) -> Future[None]:
        """Connect again."""
        return self._answer("retry", host, value=None)


def make_host(name: str, settings: Host, gpus: int = 8) -> HostState:
    """Make a live host whose GPUs are free."""
    host = HostState(name, settings, link=LinkStatus(LinkState.LIVE))
    host.hello = Hello(1, "n", name, "root", 0, "boot", "3.10.12", "Linux", 4000)
    host.inventory = Inventory("580.159.04", "13.0", [make_facts(index) for index in range(gpus)])
    feed(host, 0, 0, busy=False)
    return host


def make_facts(index: int) -> GpuFacts:
    """Describe an H200."""
    return GpuFacts(
        index,
        f"GPU-{index:08d}-0000-0000-0000-000000000000",
        "NVIDIA H200",
        f"00000000:{index + 1:02X}:00.0",
        index,
        Reading(TOTAL),
        Reading(700.0),
        Reading(1980),
    )


def make_sample(index: int, **readings: Any) -> GpuSample:
    """Make a free GPU's sample; keywords replace readings (a value, or a Reading)."""
    values: dict[str, Any] = {
        "memory_used_bytes": BASELINE,
        "memory_total_bytes": TOTAL,
        "utilisation_percent": 0,
        "temperature_c": 34,
        "power_w": 118.0,
        "sm_clock_mhz": 345,
        "clock_reasons": 1,
        "ecc_uncorrected": 0,
        "memory_reserved_bytes": 615 * MIB,
        "power_limit_w": 700.0,
        "ecc_corrected": 0,
        "remapped_pending": 0,
        "remapped_failed": 0,
        "recovery_action": 0,
        "persistence": 1,
        "mig": 0,
        "pcie_gen": 5,
        "pcie_width": 16,
        "fan_percent": NOT_SUPPORTED,
        "thermal_margin_c": 51,
    }
    values.update(readings)
    return GpuSample(index, {key: v if isinstance(v, Reading) else Reading(v) for key, v in values.items()})


def feed(host: HostState, seq: int, number: int = 0, busy: bool = True) -> None:
    """Give a host the telemetry of one second; busy GPUs all change with every tick."""
    samples = []
    for index in host.gpu_indices:
        if not busy:
            samples.append(make_sample(index))
            continue
        load = 50 + 46 * math.sin(seq / 9 + index * 0.7 + number)
        sample = make_sample(
            index,
            memory_used_bytes=int((91 + index * 3.1 + 3 * math.sin(seq / 5 + index)) * GIB),
            utilisation_percent=round(load),
            temperature_c=round(44 + load / 4),
            power_w=180 + load * 4.9,
            sm_clock_mhz=1980 - 15 * (seq + index & 3),
            clock_reasons=4,
        )
        sample.holders = [Holder(41210 + index, "root", SERVER, 18720.0, Reading(90 * GIB))]
        samples.append(sample)
    host.telemetry = Telemetry(seq, time.time(), samples, HostSample(12.4 if busy else 0.3, 8.0), 0.4)
    host.received_at = time.monotonic()
    host.remember(host.telemetry)
    host.revision += 1


def make_run(run_id: str, stage: str, state: str = "running", **changes: Any) -> Run:
    """Make a run that began two hours ago."""
    fields: dict[str, Any] = {
        "started_at": time.time() - 8040,
        "pid": 4711,
        "argv": [f"/opt/{stage}"],
        **changes,
    }
    return Run(run_id, stage, state, **fields)


def make_progress(done: int = 4320, total: int = 10_000, **changes: Any) -> Progress:
    """Make the progress of an extraction as the reference run had it."""
    now = time.time()
    fields: dict[str, Any] = {
        "samples_done": done,
        "samples_total": total,
        "tokens_done": done * 1730,
        "tokens_total": total * 1730,
        "bytes_written": done * 99_250_000,
        "bytes_total": total * 99_250_000,
        "shard": f"rows_{done // 2000 * 2000}-{done // 2000 * 2000 + 2000}/data_{done}.ckpt",
        "samples_per_s": 1.5,
        "tokens_per_s": 2400.0,
        "bytes_per_s": 0.14e9,
        "advanced_at": now,
        "disk_free_bytes": int(2.1 * 1024 * GIB),
        **changes,
    }
    return Progress(now, "running", **fields)


def make_plan(victims: int = 2) -> Plan:
    """Make a plan with so many victims, one spared process and a loss."""
    killed = [
        Process(
            41210 + number, 9, user="root", command=SERVER, age_s=18720.0, gpus=list(range(number, 8, max(1, victims))),
            used_bytes=Reading(int(373.2 * GIB)), pinned_bytes=30 * GIB, reason="holds 4 GPUs",
            method="TERM, 15 s, KILL",
        )
        for number in range(victims)
    ]  # fmt: skip
    spared = [
        Process(
            911,
            3,
            user="root",
            command="/usr/bin/nvidia-persistenced --user nvpd",
            reason="a daemon of the driver",
        )
    ]
    losses = ["5 h 12 min of run serve-0412"] if victims else []
    return Plan("d1", killed, spared, [], [], losses, "recorded 2026-12-01 14:02", 15.0, 60.0)


def make_tree_plan() -> Plan:
    """Make the plan of a host that serves and extracts: a supervisor, its server with eight ranks, a heir of one."""
    ask, first = "SIGTERM, then SIGKILL", "SIGTERM first of all, SIGKILL last of all"
    run = "belongs to run serve-1201-1142-8f3a"

    def one(pid: int, ppid: int, command: str, reason: str, **more: Any) -> Process:
        fields = {"method": ask, "age_s": 18720.0, "user": "root", "used_bytes": NOT_SUPPORTED, **more}
        return Process(pid, pid, ppid=ppid, command=command, reason=reason, **fields)

    ranks = [
        one(41210 + gpu, 41205, f"sglang::scheduler_TP{gpu}", f"{run}", gpus=[gpu], used_bytes=Reading(93 * GIB),
            pinned_bytes=30 * GIB) for gpu in range(8)
    ]  # fmt: skip
    victims = [
        one(41200, 1, "python3 eightzeros-agent supervise serve-1201-1142-8f3a", "supervises run serve-1201-1142-8f3a",
            method=first),
        one(41205, 41200, SERVER, run),
        *ranks,
        one(41301, 41213, "python3 -c from multiprocessing.spawn import spawn_main", "started by victim 41213"),
        one(52017, 1, "python3 notebook.py --device 5", "holds memory of GPU 5, for which the driver names process"
            " 51990, which holds no file of it", gpus=[5], user="mira", age_s=340.0),
    ]  # fmt: skip
    spared = [
        one(911, 1, "/usr/bin/nvidia-persistenced --user nvpd", "the driver's persistence daemon; has 3 open files of"
            " GPU minor 0", gpus=list(range(8)), method=""),
        one(60733, 60700, "nvitop", "a monitor: no context; has 3 open files of GPU minor 0", user="mira", method=""),
    ]  # fmt: skip
    losses = [
        "5 h 12 min of run serve-1201-1142-8f3a (serve)",
        "2 h 14 min of run extract-1201-1309-41c2 (extract), which asks a server that is killed, 3 uncommitted samples",
    ]
    unseen = ["12 processes of other users could not be looked into"]
    return Plan("d2", victims, spared, [], unseen, losses, "recorded 2026-12-01 14:02", 15.0, 75.0)


def make_receipt(host: str, verdict: str = CLEAN, kind: str = "reset", **bad: Any) -> Receipt:
    """Make a receipt for eight GPUs; `bad` replaces fields of GPU 3's verdict."""
    after = [
        GpuVerdict(
            index,
            f"GPU-{index}",
            CLEAN,
            "at its baseline",
            used_bytes=Reading(BASELINE),
            baseline_bytes=BASELINE,
        )
        for index in range(8)
    ]
    if bad:
        after[3] = replace(after[3], verdict=verdict, **bad)
    return Receipt(
        f"{kind}-1", kind, host=host, started_at=time.time() - 7, after=after, verdict=verdict,
        killed=make_plan().victims if kind == "reset" else [],
        durations={"scan": 0.2, "grace": 1.9, "kill": 0.1, "release": 3.2, "verdict": 1.1, "total": 6.5},
        path=f"/root/.cache/eightzeros/receipts/{kind}-1.json",
    )  # fmt: skip
