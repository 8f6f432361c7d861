"""Made-up fleets for the pictures of the console, one for each scene of screenshots/make.py."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.fleet import HostKey, LinkState, LinkStatus
from backend.wire import GIB, MIB, NOT_CLEAN, NOT_SUPPORTED, Gate, GpuSample, Holder, Reading, failed
from tests.fakefleet import FakeFleet, config, feed, make_plan, make_progress, make_receipt, make_run, make_tree_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "/data/hidden/rows_4000-6000"


@contextmanager
def scene_fleet(name: str) -> Iterator[FakeFleet]:
    """Give the fleet of one scene."""
    hosts = {"wall": 8, "mixed": 4}.get(name, 1)
    fleet = FakeFleet(config(hosts))
    for _ in range(200):
        fleet.tick()
    _history(fleet)
    {
        "mixed": _mixed,
        "first": _first,
        "reset-plan": _plan,
        "reset-running": _running,
        "reset-clean": _clean,
        "reset-not-clean": _not_clean,
        "reset-nothing": _nothing,
        "launch": _launch,
        "launch-refused": _refused,
        "shards": _shards,
        "log": _log,
        "host-key": _host_key,
    }.get(name, lambda fleet: None)(fleet)
    yield fleet


def _history(fleet: FakeFleet) -> None:
    now = time.time()
    host = fleet.hosts["gpu-01"]
    host.runs = {
        "prepare-1": make_run(
            "prepare-1", "prepare", "exited", exit_code=0, started_at=now - 30000, ended_at=now - 29000
        ),
        "serve-1": make_run("serve-1201-1142-8f3a", "serve", started_at=now - 19000),
        "extract-1": make_run(
            "extract-1201-1309-41c2",
            "extract",
            label="extract (embedded)",
            progress=make_progress(),
            out_dir="/data/hidden",
        ),
    }
    fleet.end_reset("gpu-01", replace(make_receipt("gpu-01"), started_at=now - 19100))
    for ago, level, text in (
        (19400, "info", "connected: driver 580.159.04, 8 GPUs"),
        (19100, "info", "reset: 2 processes killed, CLEAN in 6.5 s"),
        (19000, "info", "serve-1201-1142-8f3a launched"),
        (8040, "info", "extract-1201-1309-41c2 launched"),
        (3020, "warn", "connection lost: no answer for 10 s"),
        (3012, "info", "live again; the run went on meanwhile, 12 samples"),
        (640, "warn", "sample 4102 failed twice and is listed: prompt over 8,192 tokens"),
    ):
        fleet.event("gpu-01", level, text)
        host.events[-1] = replace(host.events[-1], at=now - ago)


def _mixed(fleet: FakeFleet) -> None:
    one, two, three, four = fleet.hosts.values()
    assert one.telemetry
    gpus = list(one.telemetry.gpus)
    gpus[2] = GpuSample(2, problem="GPU is lost: NVML_ERROR_GPU_IS_LOST (XID 79 at 03:12:07)")
    gpus[3].readings["temperature_c"] = Reading(84)
    gpus[4].readings["utilisation_percent"] = failed("NVML_ERROR_UNKNOWN (999)")
    gpus[5].readings["power_w"] = NOT_SUPPORTED
    gpus[6].holders.append(Holder(51877, "mira", "python3 probe.py", 340.0, Reading(2 * GIB), alive=False))
    gpus[7].readings["ecc_uncorrected"] = Reading(2)
    one.telemetry = replace(one.telemetry, gpus=gpus)
    two.link = LinkStatus(LinkState.LOST, "no answer for 10 s", "unreachable", retry_in_s=8.0)
    two.received_at = time.monotonic() - 42
    key = HostKey("gpu-03", 22, "ssh-ed25519", "SHA256:" + "q7Yk" * 10 + "abc", "unknown")
    three.link = LinkStatus(LinkState.REFUSED, "the host key is not known", "host-key", "C shows the key", host_key=key)
    three.inventory = three.telemetry = None
    assert four.hello
    four.hello = replace(four.hello, virtual=True)
    feed(four, 201, busy=False)
    run = one.runs["extract-1"]
    assert run.progress
    stuck = replace(
        run.progress, advanced_at=run.progress.at - 380, tokens_per_s=0.0, samples_per_s=0.0, bytes_per_s=0.0
    )
    one.runs["extract-1"] = replace(run, progress=replace(stuck, disk_free_bytes=38 * GIB))


def _first(fleet: FakeFleet) -> None:
    host = fleet.hosts["gpu-01"]
    host.runs, host.events, host.reset.receipt = {}, host.events.__class__(), None
    feed(host, 201, busy=False)


def _plan(fleet: FakeFleet) -> None:
    fleet.plan = make_tree_plan()


def _steps(fleet: FakeFleet) -> None:
    pids = (41210, 41211)
    for at_s, kind, text, data in (
        (0.0, "phase", "looking at the host", {}),
        *((0.1, "memory", "", {"gpu": gpu, "used_bytes": int(93.3 * GIB)}) for gpu in range(8)),
        (0.2, "phase", "stopping 2 processes, 15 s of grace", {}),
        *((0.3, "signal", f"SIGTERM to {pid}", {"pid": pid, "signal": "SIGTERM", "errno": 0}) for pid in pids),
        (1.9, "gone", "process 41211 is gone", {"pid": 41211}),
        (15.3, "signal", "SIGKILL to 41210", {"pid": 41210, "signal": "SIGKILL", "errno": 0}),
        (15.4, "gone", "process 41210 is gone", {"pid": 41210}),
        (15.5, "phase", "waiting for every GPU to be free", {}),
        *((16.0, "memory", "", {"gpu": gpu, "used_bytes": (616 if gpu == 3 else 4) * MIB}) for gpu in range(8)),
    ):
        fleet.reset_step("gpu-01", at_s, kind, text, **data)


def _running(fleet: FakeFleet) -> None:
    fleet.start_reset("gpu-01", make_plan())
    _steps(fleet)
    fleet.hosts["gpu-01"].reset.started_at = time.time() - 16.8


def _clean(fleet: FakeFleet) -> None:
    def finish(host: str) -> None:
        feed(fleet.hosts[host], 201, busy=False)
        fleet.end_reset(host, make_receipt(host))

    fleet.on_reset = finish


def _not_clean(fleet: FakeFleet) -> None:
    receipt = make_receipt(
        "gpu-01",
        NOT_CLEAN,
        used_bytes=Reading(616 * MIB),
        reason="612 MiB above the baseline after 60 s: pid 41213 is in state D and still holds it",
        action="wait for the driver, or reset GPU 3 once nothing else uses it",
        command="nvidia-smi -i 3 --query-compute-apps=pid,used_memory --format=csv; cat /proc/41213/stat",
    )
    fleet.on_reset = lambda host: fleet.end_reset(host, receipt)


def _nothing(fleet: FakeFleet) -> None:
    fleet.plan = make_plan(0)
    feed(fleet.hosts["gpu-01"], 201, busy=False)


def _launch(fleet: FakeFleet) -> None:
    fleet.gate_list = [
        Gate("gpus", True, "8 of 8 GPUs at their baseline, verified just now"),
        Gate("disk", True, "2.1 TiB free in /data/hidden, 924 GiB needed"),
        Gate("python", True, "/opt/venv/bin/python3 is 3.10.12 and imports numpy"),
    ]


def _refused(fleet: FakeFleet) -> None:
    fleet.gate_list = [
        Gate("gpus", False, "GPU 3 holds 612 MiB above its baseline (pid 41213)", "R: reset this host"),
        Gate("disk", True, "2.1 TiB free in /data/hidden, 924 GiB needed"),
        Gate("shm", None, "/dev/shm could not be read: permission denied", "ask the host's owner"),
    ]


def _shards(fleet: FakeFleet) -> None:
    names = [f"data_{4300 + number}.ckpt" for number in (21, 9, 8, 100, 7, 20, 101, 19, 10, 18, 11, 17, 12, 16)]
    entries = [
        {"name": name, "kind": "shard", "bytes": 99_250_000 + 1000 * len(name), "modified_at": 0.0} for name in names
    ]
    fleet.files["/data/hidden"] = {
        "path": FOLDER,
        "truncated": False,
        "entries": [
            *entries,
            {"name": "old", "kind": "folder", "bytes": 0},
            {"name": "data_config.json", "kind": "other", "bytes": 812},
        ],
    }
    tensors = [
        ("input_ids", [1731], "int64", 13848),
        ("loss_mask", [1731], "int64", 13848),
        ("aux_hidden_state", [1, 1731, 21504], "bf16", 74446848),
        ("hidden_state", [1, 1731, 7168], "bf16", 24815616),
    ]
    shard = {
        "format": "torch zip",
        "bytes": 99290160,
        "notes": [],
        "entries": [{"key": k, "shape": s, "dtype": d, "bytes": b} for k, s, d, b in tensors],
    }
    for name in names:
        fleet.files[f"{FOLDER}/{name}"] = shard


def _log(fleet: FakeFleet) -> None:
    lines = [f"[2026-12-01 14:0{n % 10}:{n % 60:02d}] extract: step {n}: 16 samples, 2,412 tok/s" for n in range(400)]
    fleet.logs["extract-1201-1309-41c2"] = "\n".join(lines) + "\n"
    host = fleet.hosts["gpu-01"]
    host.runs = {run.id: run for run in host.runs.values()}


def _host_key(fleet: FakeFleet) -> None:
    host = fleet.hosts["gpu-01"]
    key = HostKey("gpu-01.cluster", 22, "ssh-ed25519", "SHA256:3kPz0o4rYw1m8bqkTgq2U6m5cQmR1sX9nHh0vJt5aZc", "unknown")
    host.link = LinkStatus(LinkState.REFUSED, "the host key is not known", "host-key", "C shows the key", host_key=key)
    host.inventory = host.telemetry = None
