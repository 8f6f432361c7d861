"""The NVML driver, by the real pynvml on a library whose answers the test chooses."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from backend.agent.nvml import NvmlDriver
from backend.wire import LEAN, NOT_SUPPORTED, SLOW, Reading
from tests.nvml import NOT_AVAILABLE, NvmlDouble
from tests.nvml.pump import OpenChild
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 1 << 30
EXPENSIVE = (
    "nvmlDeviceGetFieldValues", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetMigMode", "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetCurrPcieLinkWidth",
)  # fmt: skip


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(2, tmp_path=tmp_path) as double:
        yield double


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_an_idle_h200_reads_as_it_is(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        lean, contexts = opened.ask("lean")
        slow = opened.ask("slow")
    facts = opened.inventory.gpus[1]
    assert (opened.inventory.driver, opened.inventory.cuda, opened.inventory.problem) == ("580.159.04", "13.0", "")
    assert (facts.index, facts.name, facts.minor, facts.bus_id) == (1, "NVIDIA H200", 1, "00000000:1B:00.0")
    assert facts.uuid == nvml.gpu(1).uuid
    assert facts.memory_total_bytes == Reading(150754820096)
    assert tuple(lean) == LEAN
    assert lean["memory_used_bytes"] == Reading(0)
    assert lean["power_w"].number() == pytest.approx(110.08)
    assert lean["sm_clock_mhz"] == Reading(525)
    assert contexts.processes == []
    assert tuple(slow) == SLOW
    assert slow["memory_reserved_bytes"] == Reading(644939776)
    assert slow["fan_percent"] == NOT_SUPPORTED
    assert slow["thermal_margin_c"] == Reading(30)
    assert (slow["pcie_gen"], slow["pcie_width"]) == (Reading(5), Reading(16))


def test_the_lean_set_asks_nothing_expensive(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        before = {name: nvml.calls(name) for name in EXPENSIVE}
        total = nvml.gpu(0).calls("nvmlDeviceGetUtilizationRates")
        opened.ask("lean")
        assert {name: nvml.calls(name) for name in EXPENSIVE} == before
        assert nvml.gpu(0).calls("nvmlDeviceGetUtilizationRates") == total + 1


def test_a_library_without_the_second_memory_call_says_what_its_bytes_include(tmp_path: Path) -> None:
    double = NvmlDouble(1, tmp_path=tmp_path, missing=("nvmlDeviceGetMemoryInfo_v2",))
    with double as nvml, OpenChild(nvml.make_driver) as opened:
        assert opened.lean()["memory_used_bytes"] == Reading(644939776)
        reserved = opened.ask("slow")["memory_reserved_bytes"]
    assert reserved.failed
    assert "include what it reserves" in reserved.problem


def test_older_names_of_functions_serve_where_the_new_ones_are_missing(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    missing = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetComputeRunningProcesses_v3")
    with NvmlDouble(1, tmp_path=tmp_path, missing=missing) as nvml:
        nvml.gpu(0).set(clock_reasons=4)
        nvml.gpu(0).hold(holder.pid, GIB)
        with OpenChild(nvml.make_driver) as opened:
            readings, contexts = opened.ask("lean")
    assert readings["clock_reasons"] == Reading(4)
    assert contexts.processes == [(holder.pid, Reading(GIB), "compute")]


@pytest.mark.parametrize(
    ("code", "words"),
    [(4, "no permission"), (6, "not found"), (10, "timed out"), (17, "operating system"), (999, "unknown error")],
)
def test_one_error_fails_one_reading_and_is_never_a_number(nvml: NvmlDouble, code: int, words: str) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(0).fail(code, "nvmlDeviceGetPowerUsage")
        lean = opened.lean()
        assert lean["power_w"].failed
        assert lean["power_w"].value is None
        assert words in lean["power_w"].problem
        assert all(lean[name].ok for name in LEAN if name != "power_w")
        nvml.gpu(0).resume()
        assert opened.lean()["power_w"].ok


@pytest.mark.parametrize("code", [3, 13])
def test_what_a_gpu_does_not_offer_is_unsupported_and_no_failure(nvml: NvmlDouble, code: int) -> None:
    nvml.gpu(0).fail(code, "nvmlDeviceGetTotalEccErrors")
    with OpenChild(nvml.make_driver) as opened:
        assert opened.lean()["ecc_uncorrected"] == NOT_SUPPORTED


@pytest.mark.parametrize(("code", "word"), [(15, "lost"), (16, "reset")])
def test_a_gpu_that_is_gone_fails_every_reading_with_the_word_that_badges_look_for(
    nvml: NvmlDouble, code: int, word: str
) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(0).fail(code)
        lean, contexts = opened.ask("lean")
        assert all(lean[name].failed and word in lean[name].problem for name in LEAN)
        assert word in contexts.problem
        used, _ = opened.ask("occupancy")
        assert word in used.problem
        assert all(reading.failed for reading in opened.ask("slow").values())
        assert opened.lean(1)["memory_used_bytes"].ok


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("memory_used_bytes", {"memory": [150754820096, 0, "NA"]}),
        ("memory_used_bytes", {"memory": [8 * GIB, 0, 9 * GIB]}),
        ("memory_total_bytes", {"memory": ["NA", 0, 0]}),
        ("utilisation_percent", {"utilisation": [37100, 0]}),
        ("temperature_c", {"temperature_c": 0xFFFFFFFF}),
        ("power_w", {"power_mw": 0}),
        ("power_w", {"power_mw": 0xFFFFFFFF}),
        ("sm_clock_mhz", {"sm_mhz": 0xFFFFFFFF}),
        ("clock_reasons", {"clock_reasons": "NA"}),
        ("ecc_uncorrected", {"ecc_uncorrected": "NA"}),
    ],
)
def test_sentinels_and_absurd_values_are_failed_readings(
    nvml: NvmlDouble, name: str, answer: dict[str, object]
) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(0).set(**answer)
        reading = opened.lean()[name]
    assert reading.value is None
    assert reading.failed
    assert reading.problem.startswith("out of range")


def test_a_total_of_nothing_is_a_machine_without_memory_of_its_own(nvml: NvmlDouble) -> None:
    nvml.gpu(0).set(memory=[0, 0, 0])
    with OpenChild(nvml.make_driver) as opened:
        assert opened.lean()["memory_used_bytes"] == NOT_SUPPORTED


def test_a_gpu_without_a_handle_keeps_its_place_and_comes_back(nvml: NvmlDouble) -> None:
    nvml.gpu(0).fail(15, "nvmlDeviceGetHandleByIndex_v2")
    with OpenChild(nvml.make_driver) as opened:
        first, second = opened.inventory.gpus
        assert (first.index, second.index, second.problem) == (0, 1, "")
        assert "lost" in first.problem
        assert "lost" in opened.lean(0)["temperature_c"].problem
        nvml.gpu(0).resume()
        assert opened.lean(0)["temperature_c"].ok


def test_a_gpu_to_skip_is_listed_and_not_touched(nvml: NvmlDouble) -> None:
    nvml.gpu(0).hang(function="nvmlDeviceGetHandleByIndex_v2")
    with OpenChild(nvml.make_driver, skip=(0,)) as opened:
        assert [gpu.index for gpu in opened.inventory.gpus] == [0, 1]
        assert opened.inventory.gpus[0].problem
    assert nvml.gpu(0).calls("nvmlDeviceGetHandleByIndex_v2") == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [(4, "groups"), (9, "modprobe nvidia"), (18, "reboot"), (12, "install"), (999, "unknown error")],
)
def test_a_driver_that_cannot_be_opened_says_what_to_do(nvml: NvmlDouble, code: int, words: str) -> None:
    nvml.fail(code)
    with OpenChild(nvml.make_driver) as opened:
        assert words in opened.problem
        assert opened.inventory is None


def test_no_library_says_what_to_do() -> None:
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has NVIDIA's library")
    with OpenChild(NvmlDriver) as opened:
        assert "libnvidia-ml.so.1 was not found" in opened.problem
        assert "--gpus" in opened.problem


def test_a_driver_without_gpus_is_an_inventory_with_a_reason(nvml: NvmlDouble) -> None:
    nvml.set_count(0)
    with OpenChild(nvml.make_driver) as opened:
        assert opened.problem == ""
        assert opened.inventory.gpus == []
        assert "no GPU" in opened.inventory.problem


def test_occupancy_is_the_union_of_the_lists_and_names_dead_pids(
    nvml: NvmlDouble, holder: subprocess.Popen[bytes]
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    gpu = nvml.gpu(0)
    gpu.hold(holder.pid, 3 * GIB)
    gpu.hold(os.getpid(), GIB, "graphics")
    gpu.hold(gone.pid, 2 * GIB, "mps", owner=0, shown_bytes=NOT_AVAILABLE)
    with OpenChild(nvml.make_driver) as opened:
        used, contexts = opened.ask("occupancy")
    assert used == Reading(6 * GIB)
    assert [(pid, kind) for pid, _, kind in contexts.processes] == [
        (holder.pid, "compute"), (os.getpid(), "graphics"), (gone.pid, "mps"),
    ]  # fmt: skip
    assert contexts.processes[0][1] == Reading(3 * GIB)
    assert contexts.processes[2][1].failed


def test_a_list_that_fails_says_so_and_the_others_are_read(nvml: NvmlDouble, holder: subprocess.Popen[bytes]) -> None:
    nvml.gpu(0).hold(holder.pid, GIB)
    nvml.gpu(0).fail(4, "nvmlDeviceGetGraphicsRunningProcesses_v3")
    with OpenChild(nvml.make_driver) as opened:
        _, contexts = opened.ask("occupancy")
    assert [pid for pid, _, _ in contexts.processes] == [holder.pid]
    assert "graphics list: no permission" in contexts.problem


def test_memory_falls_in_steps_after_its_process_is_gone(nvml: NvmlDouble, holder: subprocess.Popen[bytes]) -> None:
    gpu = nvml.gpu(0)
    gpu.hold(holder.pid, 4 * GIB)
    gpu.release(delay_s=0.1, over_s=0.4, steps=4)
    seen: list[int] = []

    def cleared() -> bool:
        used, contexts = opened.ask("occupancy")
        seen.append(used.value)
        return used.value == 0 and contexts.processes == []

    with OpenChild(nvml.make_driver) as opened:
        assert not cleared()
        holder.kill()
        until(cleared)
    assert seen == sorted(seen, reverse=True)
    assert {4 * GIB, 3 * GIB, 2 * GIB, GIB, 0} <= set(seen)


def test_nvml_touching_one_field_too_many_does_no_harm(nvml: NvmlDouble) -> None:
    nvml.control.field_overrun = 1
    nvml.gpu(0).field(230, 2)
    with OpenChild(nvml.make_driver) as opened:
        for _ in range(50):
            assert opened.ask("slow")["recovery_action"] == Reading(2)


def test_an_older_gpu_with_absolute_limits_gives_the_margin_too(nvml: NvmlDouble) -> None:
    nvml.gpu(0).set(margin_c=None, slowdown_c=90, temperature_c=61)
    with OpenChild(nvml.make_driver) as opened:
        assert opened.ask("slow")["thermal_margin_c"] == Reading(29)
