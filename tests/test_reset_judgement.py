"""What a reset concludes from readings: limits, health, verdicts, protection and the digest."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from backend.agent.reset import baseline, health, verdict
from backend.agent.reset.clearance import GpuState
from backend.agent.reset.finding import WARN, Finding
from backend.agent.reset.losses import hours, losses
from backend.agent.reset.plan import digest
from backend.agent.reset.protect import protected
from backend.agent.reset.rules.case import Case, Readings
from backend.wire import (
    CLEAN,
    LIMITED,
    MIB,
    NOT_CLEAN,
    NOT_SUPPORTED,
    UNHEALTHY,
    UNKNOWN,
    GpuFacts,
    GpuVerdict,
    Inventory,
    Process,
    Progress,
    Reading,
    Run,
    failed,
)

DRIVER = "580.159.04"
GPUS = Inventory(DRIVER, "13.0", [GpuFacts(0, "GPU-a", "H200"), GpuFacts(1, "GPU-b", "H200")])


def state(**changes: Any) -> GpuState:
    limit = baseline.Limit(16 * MIB, None, "no baseline")
    return replace(GpuState(0, "GPU-a", limit, used=Reading(0)), **changes)


@pytest.mark.parametrize(("jitter_mib", "tolerance_mib"), [(0, 8), (3, 8), (6, 12), (9, 16), (500, 16)])
def test_a_bare_context_is_always_above_the_tolerance(jitter_mib: int, tolerance_mib: int) -> None:
    assert baseline.tolerance_bytes(jitter_mib * MIB) == tolerance_mib * MIB < 22 * MIB


def test_a_record_that_could_not_be_read_limits_and_one_not_offered_does_not() -> None:
    readings = dict.fromkeys(("remapped_failed", "remapped_pending", "ecc_uncorrected"), NOT_SUPPORTED)
    assert health.unread({**readings, "recovery_action": NOT_SUPPORTED}) == []
    said = health.unread({**readings, "recovery_action": failed("no permission (NVML 4)")})
    assert said == ["recovery action: no permission (NVML 4)"]
    assert verdict.judge(state(), [], said).verdict == LIMITED


def test_a_warning_is_said_and_leaves_the_verdict_as_it_is() -> None:
    warning = Finding("its link has 8 lanes of 16", "reseat it", "nvidia-smi -q", WARN)
    judged = verdict.judge(state(), [warning])
    assert (judged.verdict, judged.action) == (CLEAN, "")
    assert judged.reason.endswith("; warning: its link has 8 lanes of 16")
    assert judged.findings == [warning._asdict()]
    judged = verdict.judge(state(), [warning, Finding("a fault", "mend it", "look")])
    assert (judged.verdict, judged.action, judged.command) == (UNHEALTHY, "mend it", "look")
    assert "a fault" in judged.reason
    assert "warning: its link" in judged.reason


OFFERED: Readings = dict.fromkeys(
    ("recovery_action", "remapped_failed", "remapped_pending", "ecc_uncorrected"), Reading(0)
)


@pytest.mark.parametrize(("changes", "readings", "word"), [
    ({}, {}, CLEAN),
    ({"limited": ["7 processes of other users could not be looked into"]}, {}, LIMITED),
    ({"why": ["process 7 (x) has a compute context"]}, {}, NOT_CLEAN),
    ({"why": ["process 7 (x) has a compute context"]}, {"remapped_failed": Reading(1)}, UNHEALTHY),
    ({"unknown": "driver not answering for 5 s"}, {}, UNKNOWN),
    ({"unknown": "its memory could not be read: GPU is lost (NVML 15)"}, {}, UNHEALTHY),
])  # fmt: skip
def test_the_worst_of_a_gpu_is_its_verdict_and_every_reason_is_said(
    changes: dict[str, Any], readings: Readings, word: str
) -> None:
    judged = verdict.judge(state(**changes), health.findings(Case("GPU-a", {**OFFERED, **readings})))
    assert judged.verdict == word
    assert judged.command
    for reason in [*changes.get("why", []), *changes.get("limited", [])]:
        assert reason in judged.reason
    assert bool(judged.action) == (word != CLEAN)


def test_the_worst_gpu_is_the_hosts_verdict_and_no_gpu_is_unknown() -> None:
    def gpus(*words: str) -> list[GpuVerdict]:
        return [GpuVerdict(index, "", word, "") for index, word in enumerate(words)]

    assert verdict.of_host(gpus(CLEAN, LIMITED, CLEAN)) == LIMITED
    assert verdict.of_host(gpus(NOT_CLEAN, LIMITED, UNHEALTHY)) == UNHEALTHY
    assert verdict.of_host([]) == UNKNOWN
    assert [verdict.passes(word, True) for word in (CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, UNKNOWN)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert not verdict.passes(LIMITED, False)


@pytest.mark.parametrize("exe", [
    "/usr/bin/nvidia-persistenced", "/usr/bin/nv-hostengine", "/usr/bin/nv-fabricmanager", "/usr/lib/xorg/Xorg",
    "/usr/sbin/sshd", "/usr/bin/containerd-shim-runc-v2", "/usr/lib/systemd/systemd-logind",
    "/usr/bin/nvidia-smi (deleted)",
])  # fmt: skip
def test_what_keeps_the_host_alive_is_protected(exe: str) -> None:
    assert protected(exe)


@pytest.mark.parametrize("exe", ["/usr/bin/python3", "/opt/sglang", "/home/a/sshd-notes/train", "", "/bin/nvidia"])
def test_nothing_else_is(exe: str) -> None:
    assert protected(exe) == ""


def test_the_digest_is_of_who_would_be_killed_and_how() -> None:
    one, other = Process(1, 10, exe="/a", uid=0, method="m"), Process(2, 20, exe="/b", uid=0, method="m")
    assert digest([one, other]) == digest([other, one])
    for changed in ({"pid": 3}, {"start_ticks": 11}, {"exe": "/c"}, {"uid": 1}, {"method": "n"}):
        assert digest([replace(one, **changed), other]) != digest([one, other])
    assert digest([replace(one, age_s=5.0, command="x"), other]) == digest([one, other])
    assert json.dumps(digest([]))


@pytest.mark.parametrize(("seconds", "said"), [(40, "40 s"), (720, "12 min"), (18720, "5 h 12 min")])
def test_durations_are_said_as_an_operator_says_them(seconds: float, said: str) -> None:
    assert hours(seconds) == said


@pytest.mark.parametrize(("host", "state", "listener", "lost"), [
    ("127.0.0.1", "running", True, True),
    ("127.0.0.1", "exited", True, False),
    ("127.0.0.1", "running", False, False),
    ("gpu-09.cluster", "running", True, False),
])  # fmt: skip
def test_an_extraction_whose_server_is_killed_loses_what_it_has_not_committed(
    host: str, state: str, listener: bool, lost: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = ["python3", "extractor", "--server", f"http://{host}:{server.getsockname()[1]}", "--drain", "9"]
        run = Run("extract-1", "extract", state, argv=argv, started_at=time.time() - 7500,
                  progress=Progress(time.time(), "running", samples_in_flight=3))  # fmt: skip
        victim = Process(os.getpid() if listener else os.getppid(), 1, run_id="serve-1")
        said = losses({}, [victim], [run])
    wanted = "2 h 05 min of run extract-1 (extract), 3 uncommitted samples, which asks a server that is killed"
    assert said == ([wanted] if lost else [])


def test_processes_of_one_user_are_one_loss() -> None:
    ranks = [
        Process(40 + gpu, 1, user="root", command=f"rank {gpu}", age_s=120.0 + gpu, gpus=[gpu]) for gpu in range(8)
    ]
    one = Process(7, 1, user="mira", command="notebook", age_s=40.0, gpus=[1])
    assert losses({}, [*ranks, one], []) == [
        "40 s of process 7 (mira): notebook", "2 min of 8 processes (root), the oldest 47: rank 7"]  # fmt: skip
