"""Readings that have misled other monitors, after public reports: unified memory, sentinels, relative limits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.devices import NvidiaDevices
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.wire import LEAN, NOT_SUPPORTED, Reading
from tests.nvml import NOT_AVAILABLE, NvmlDouble
from tests.nvml.pump import OpenChild, Pump

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ERROR = {"not supported": {"err": 3}, "unknown": {"err": 999}}


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(3, tmp_path=tmp_path) as double:
        double.clock(0)
        yield double


def over_time(nvml: NvmlDouble, opened: OpenChild, index: int, name: str, moments: list[float]) -> list[Reading]:
    """Read one value at some moments of the double's clock."""
    found = []
    for moment in moments:
        nvml.clock(moment)
        kind = "lean" if name in LEAN else "slow"
        answer = opened.ask(kind, index)
        found.append((answer[0] if kind == "lean" else answer)[name])
    return found


class TestUnifiedMemory:
    """GB10: no memory totals from NVML, yet the process list knows bytes."""

    @pytest.fixture
    def nvml(self, nvml: NvmlDouble, holder: subprocess.Popen[bytes]) -> NvmlDouble:
        gpu = nvml.gpu(0)
        gpu.describe("NVIDIA GB10", bus="0000000F:01:00.0", minor=0)
        missing: dict[str, Any] = dict.fromkeys(
            ("memory", "memory_v1", "power_limit_mw", "memory_mhz", "ecc_uncorrected", "ecc_corrected", "remapped"),
            ERROR["not supported"],
        )
        gpu.set(**missing, power_mw=3200, temperature_c=36, sm_mhz=208)
        gpu.hold(holder.pid, 20064501760)
        nvml.set_count(1)
        return nvml

    def test_memory_is_unsupported_and_neither_zero_nor_a_failure(self, nvml: NvmlDouble) -> None:
        with OpenChild(nvml.make_driver) as opened:
            lean, slow = opened.lean(), opened.ask("slow")
        assert opened.inventory.gpus[0].memory_total_bytes == NOT_SUPPORTED
        assert opened.inventory.gpus[0].problem == ""
        for name in ("memory_used_bytes", "memory_total_bytes", "ecc_uncorrected"):
            assert lean[name] == NOT_SUPPORTED
        for name in ("memory_reserved_bytes", "power_limit_w", "remapped_pending", "remapped_failed"):
            assert slow[name] == NOT_SUPPORTED
        assert lean["power_w"].number() == pytest.approx(3.2)

    def test_the_holder_is_shown_with_its_bytes_and_the_gpu_has_no_problem(
        self, nvml: NvmlDouble, holder: subprocess.Popen[bytes]
    ) -> None:
        source = TelemetrySource(Machine(nvml.make_driver, NvidiaDevices, [sys.executable]), period_s=0.1)
        with Pump(source) as pump:
            (found,) = pump.until(lambda: pump.gpu(0) and pump.gpu(0).holders)
            assert pump.problem(0) == ""
        assert (found.pid, found.used_bytes) == (holder.pid, Reading(20064501760))


class TestSentinels:
    """An error of two seconds, 0 W for one, an ECC count of 2^64-1, a process of unknown bytes."""

    def test_an_error_lasts_as_long_as_it_lasts(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(power_mw={"at": [[0, 612000], [4, ERROR["unknown"]], [6, 613500]]})
        with OpenChild(nvml.make_driver) as opened:
            before, during, after = over_time(nvml, opened, 0, "power_w", [3.9, 5.9, 6.0])
        assert (before, after) == (Reading(612.0), Reading(613.5))
        assert during.failed
        assert during.value is None

    def test_no_watts_from_a_gpu_that_answers_is_no_reading(self, nvml: NvmlDouble) -> None:
        nvml.gpu(1).set(power_mw={"at": [[0, 76000], [5, 0], [6, 76200]]})
        with OpenChild(nvml.make_driver) as opened:
            before, during, after = over_time(nvml, opened, 1, "power_w", [4.9, 5.5, 6.5])
        assert (before, after) == (Reading(76.0), Reading(76.2))
        assert during.value is None
        assert during.problem.startswith("out of range")

    def test_a_count_of_all_ones_is_no_count(self, nvml: NvmlDouble) -> None:
        nvml.gpu(1).set(ecc_uncorrected={"at": [[0, 0], [3, "NA"], [5, 0]]})
        with OpenChild(nvml.make_driver) as opened:
            before, during, after = over_time(nvml, opened, 1, "ecc_uncorrected", [2.9, 3.0, 5.0])
        assert (before, after) == (Reading(0), Reading(0))
        assert during.value is None
        assert during.failed

    def test_a_process_of_unknown_bytes_is_listed_and_has_no_bytes(
        self, nvml: NvmlDouble, holder: subprocess.Popen[bytes]
    ) -> None:
        nvml.gpu(0).set(memory=[150754820096, 644874240, 15058796544])
        nvml.gpu(0).hold(holder.pid, 0, shown_bytes=NOT_AVAILABLE)
        with OpenChild(nvml.make_driver) as opened:
            lean, contexts = opened.ask("lean")
        assert lean["memory_used_bytes"] == Reading(15058796544)
        ((pid, used_bytes, _),) = contexts.processes
        assert pid == holder.pid
        assert used_bytes.value is None
        assert used_bytes.failed


class TestRelativeLimits:
    """H100: the margin counts down to the slowdown, its limits are offsets from it and no temperatures."""

    @pytest.fixture
    def nvml(self, nvml: NvmlDouble) -> NvmlDouble:
        for index in range(3):
            gpu = nvml.gpu(index)
            gpu.set(slowdown_c=ERROR["not supported"], shutdown_c=ERROR["not supported"])
            for field, offset in ((193, -8), (194, -2), (195, 0), (196, 0)):
                gpu.field(field, offset, "int")
        nvml.gpu(0).set(temperature_c=31, margin_c=56)
        nvml.gpu(1).set(temperature_c=88, margin_c={"at": [[0, 1], [3, 0], [5, -1], [8, 6]]})
        nvml.gpu(2).set(temperature_c=92, margin_c=-3, clock_reasons=72)
        return nvml

    def test_the_margin_is_the_drivers_own(self, nvml: NvmlDouble) -> None:
        with OpenChild(nvml.make_driver) as opened:
            assert opened.ask("slow", 0)["thermal_margin_c"] == Reading(56)
            assert opened.lean(0)["temperature_c"] == Reading(31)

    def test_none_left_and_less_than_none_are_values(self, nvml: NvmlDouble) -> None:
        with OpenChild(nvml.make_driver) as opened:
            seen = over_time(nvml, opened, 1, "thermal_margin_c", [0, 3, 5, 8])
            assert seen == [Reading(1), Reading(0), Reading(-1), Reading(6)]
            assert opened.ask("slow", 2)["thermal_margin_c"] == Reading(-3)
            assert opened.lean(2)["clock_reasons"] == Reading(72)

    def test_a_driver_without_the_margin_makes_none_of_the_offsets(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(margin_c=None)
        with OpenChild(nvml.make_driver) as opened:
            assert opened.ask("slow", 0)["thermal_margin_c"] == NOT_SUPPORTED
