"""What a reset concludes from readings: limits, health, verdicts, protection and the digest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backend.agent.reset import baseline, health, verdict
from backend.agent.reset.clearance import GpuState
from backend.agent.reset.finding import WARN, Finding
from backend.agent.reset.plan import digest, hours
from backend.agent.reset.protect import protected
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
    Reading,
    Refused,
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


def test_a_baseline_is_the_median_and_void_under_another_driver() -> None:
    rows = [Reading(value * MIB) for value in (3, 450, 3, 4, 3)]
    stored = baseline.store(GPUS, {0: rows, 1: rows})
    assert stored["gpus"]["GPU-a"]["used_bytes"] == 3 * MIB
    assert stored["gpus"]["GPU-a"]["jitter_bytes"] == 447 * MIB
    assert baseline.load() == stored
    assert baseline.limit(stored, "GPU-a", DRIVER).most_bytes == 19 * MIB
    void = baseline.limit(stored, "GPU-a", "595.1")
    assert (void.baseline_bytes, void.most_bytes) == (None, 16 * MIB)
    assert DRIVER in void.said
    assert baseline.in_words(stored, GPUS).startswith("recorded 20")
    assert baseline.in_words(stored, replace(GPUS, driver="595.1")).startswith("none: ")
    assert baseline.in_words(baseline.load(), replace(GPUS, gpus=[])) == "none: the driver lists no GPU"


def test_a_failed_reading_is_no_baseline() -> None:
    rows = [Reading(0)] * 4 + [failed("GPU is lost (NVML 15)")]
    with pytest.raises(Refused, match="GPU 0: its memory could not be read: GPU is lost"):
        baseline.store(GPUS, {0: rows, 1: rows})
    assert baseline.load()["gpus"] == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99, "gpus": {}}'])
def test_a_spoilt_baseline_is_named_and_never_taken_for_none(text: str) -> None:
    with open(baseline.path(), "w", encoding="ascii") as file:
        file.write(text)
    with pytest.raises(Refused, match=r"baseline\.json"):
        baseline.load()


@pytest.mark.parametrize("action", [1, 2, 3, 4, 5, 6, 7, 99])
def test_every_recovery_action_is_unhealthy_also_one_that_is_not_known(action: int) -> None:
    (found,) = health.findings("GPU-a", {}, {"recovery_action": Reading(action)})
    assert found.action
    assert found.command == "nvidia-smi -q -i GPU-a"


def test_memory_errors_count_only_where_they_grew() -> None:
    before, same, grown = ({"ecc_uncorrected": Reading(value)} for value in (2, 2, 5))
    assert health.findings("GPU-a", before, same) == []
    assert health.findings("GPU-a", before, grown)[0].reason == "3 uncorrectable memory errors during the reset"
    assert health.findings("GPU-a", {}, grown) == []


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


OFFERED: health.Readings = dict.fromkeys(
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
    changes: dict[str, Any], readings: health.Readings, word: str
) -> None:
    judged = verdict.judge(state(**changes), health.findings("GPU-a", OFFERED, {**OFFERED, **readings}))
    assert judged.verdict == word
    assert judged.command
    for reason in [*changes.get("why", []), *changes.get("limited", [])]:
        assert reason in judged.reason
    assert bool(judged.action) == (word != CLEAN)


def test_the_worst_gpu_is_the_hosts_verdict_and_no_gpu_is_unknown() -> None:
    def gpus(*words: str) -> list[GpuVerdict]:
        return [GpuVerdict(index, "", word, "") for index, word in enumerate(words)]

    assert verdict.worst(gpus(CLEAN, LIMITED, CLEAN)) == LIMITED
    assert verdict.worst(gpus(NOT_CLEAN, LIMITED, UNHEALTHY)) == UNHEALTHY
    assert verdict.worst([]) == UNKNOWN
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
