"""Telemetry from a driver that answers, and from one that fails as a whole: it goes on either way."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backend.agent import watch
from backend.agent.devices import NvidiaDevices
from backend.agent.nvml import NvmlDriver
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.wire import LEAN, SLOW, encode
from tests.nvml import NvmlDouble
from tests.nvml.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from backend.agent.seam import Driver

GIB = 1 << 30


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(4, tmp_path=tmp_path) as double:
        yield double


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def source(make_driver: Callable[[], Driver], virtual: bool = False) -> TelemetrySource:
    machine = Machine(make_driver, NvidiaDevices, [sys.executable], virtual)
    return TelemetrySource(machine, period_s=0.1, slow_every_s=0.5)


def test_every_gpu_is_read_in_every_tick_and_the_slow_set_has_its_age(nvml: NvmlDouble) -> None:
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: pump.healthy(0, 1, 2, 3) and "mig" in pump.telemetry[-1].gpus[0].readings)
        pump.ticks(3)
    inventory, telemetry = pump.inventories[0], pump.telemetry[-1]
    assert len(pump.inventories) == 1
    assert [gpu.uuid for gpu in inventory.gpus] == [nvml.gpu(i).uuid for i in range(4)]
    assert set(telemetry.gpus[3].readings) == {*LEAN, *SLOW}
    assert all(telemetry.gpus[0].readings[name].age_s == 0.0 for name in LEAN)
    assert telemetry.gpus[0].readings["mig"].age_s > 0.0
    assert [one.seq for one in pump.telemetry] == list(range(1, len(pump.telemetry) + 1))
    assert telemetry.tick_cpu_ms > 0
    assert encode({"t": "telemetry", "telemetry": telemetry})


def test_the_slow_set_is_asked_at_its_own_pace(nvml: NvmlDouble) -> None:
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: "mig" in (pump.gpu(0).readings if pump.gpu(0) else {}))
        lean, slow = nvml.gpu(0).calls("nvmlDeviceGetUtilizationRates"), nvml.gpu(0).calls("nvmlDeviceGetMigMode")
        pump.ticks(10)
        asked = nvml.gpu(0).calls("nvmlDeviceGetUtilizationRates") - lean
        asked_slow = nvml.gpu(0).calls("nvmlDeviceGetMigMode") - slow
    assert asked >= 8
    assert 1 <= asked_slow <= asked // 2


def test_a_holder_is_named_with_its_user_command_and_age(nvml: NvmlDouble, holder: subprocess.Popen[bytes]) -> None:
    nvml.gpu(1).hold(holder.pid, 5 * GIB)
    with Pump(source(nvml.make_driver)) as pump:
        (found,) = pump.until(lambda: pump.gpu(1) and pump.gpu(1).holders)
    assert (found.pid, found.command, found.kind, found.alive) == (holder.pid, "sleep 600", "compute", True)
    assert found.used_bytes.value == 5 * GIB
    assert found.user not in ("", "?")
    assert found.age_s is not None
    assert found.age_s < 60


def test_a_pid_that_is_gone_is_listed_as_not_alive(nvml: NvmlDouble, holder: subprocess.Popen[bytes]) -> None:
    heir = os.getpid()
    nvml.gpu(0).hold(holder.pid, GIB, owner=heir)
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: pump.gpu(0) and pump.gpu(0).holders and pump.gpu(0).holders[0].alive)
        holder.kill()
        holder.wait()
        pump.until(lambda: pump.gpu(0).holders and not pump.gpu(0).holders[0].alive)
        found = pump.gpu(0).holders[0]
    assert (found.pid, found.command, found.used_bytes.value) == (holder.pid, "", GIB)


def test_the_host_is_sampled_beside_its_gpus(nvml: NvmlDouble) -> None:
    with Pump(source(nvml.make_driver)) as pump:
        host = pump.until(
            lambda: pump.telemetry and pump.telemetry[-1].host.cpu_percent is not None and pump.telemetry[-1].host
        )
    assert 0 <= host.cpu_percent <= 100
    assert host.memory_total_bytes > host.memory_available_bytes > 0
    assert host.load1 is not None
    assert host.shm_free_bytes is not None


def test_one_transient_error_fails_one_reading_of_that_tick(nvml: NvmlDouble) -> None:
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: pump.healthy(0))
        nvml.gpu(0).fail(999, "nvmlDeviceGetPowerUsage")
        pump.until(lambda: pump.gpu(0).readings["power_w"].failed)
        assert pump.problem(0) == ""
        assert pump.gpu(0).readings["temperature_c"].ok
        nvml.gpu(0).resume()
        pump.until(lambda: pump.gpu(0).readings["power_w"].ok)


def test_a_list_of_holders_that_fails_is_not_an_empty_one(nvml: NvmlDouble) -> None:
    nvml.gpu(0).fail(4, "nvmlDeviceGetComputeRunningProcesses_v3")
    with Pump(source(nvml.make_driver)) as pump:
        reading = pump.until(lambda: pump.gpu(0) and pump.gpu(0).readings.get("holders"))
    assert "no permission" in reading.problem


def test_a_gpu_lost_in_the_middle_stays_listed_and_says_so(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_MOST_S", 0.3)
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: pump.healthy(0, 1, 2, 3))
        nvml.gpu(2).lose()
        pump.until(lambda: "lost" in pump.problem(2))
        pump.ticks(5)
        assert len(pump.telemetry[-1].gpus) == 4
        assert pump.gpu(2).readings["memory_used_bytes"].failed
        assert pump.healthy(0, 1, 3)
        nvml.gpu(2).resume()
        pump.until(lambda: pump.healthy(2))
    assert {len(found.gpus) for found in pump.inventories} == {4}
    assert all(found.gpus[2].uuid == nvml.gpu(2).uuid for found in pump.inventories)


def test_a_gpu_lost_before_the_start_is_named_once_it_is_back(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RETRY_MOST_S", 0.3)
    nvml.gpu(1).fail(15, "nvmlDeviceGetHandleByIndex_v2")
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: "lost" in pump.problem(1))
        assert "lost" in pump.inventories[-1].gpus[1].problem
        nvml.gpu(1).resume()
        pump.until(lambda: pump.inventories[-1].gpus[1].uuid == nvml.gpu(1).uuid)
        pump.until(lambda: pump.healthy(0, 1, 2, 3))


def test_no_library_is_an_inventory_with_a_reason_and_is_tried_again(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has NVIDIA's library")
    monkeypatch.setattr(watch, "REOPEN_S", 0.3)
    installed = tmp_path / "installed"

    def make() -> Driver:
        return nvml.make_driver() if installed.exists() else NvmlDriver()

    with Pump(source(make)) as pump:
        pump.until(lambda: pump.inventories and "libnvidia-ml.so.1" in pump.inventories[-1].problem)
        assert pump.ticks(3)[-1].gpus == []
        assert len(pump.inventories) == 1
        installed.touch()
        pump.until(lambda: pump.healthy(0, 1, 2, 3))
        assert pump.inventories[-1].problem == ""


def test_no_gpu_is_an_inventory_with_a_reason(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REOPEN_S", 0.3)
    nvml.set_count(0)
    with Pump(source(nvml.make_driver)) as pump:
        pump.until(lambda: pump.inventories and "no GPU" in pump.inventories[-1].problem)
        assert pump.ticks(3)[-1].gpus == []
        nvml.set_count(4)
        pump.until(lambda: pump.healthy(0, 1, 2, 3))


def test_a_mismatch_after_an_upgrade_says_what_to_do(nvml: NvmlDouble) -> None:
    nvml.fail(18)
    with Pump(source(nvml.make_driver)) as pump:
        problem = pump.until(lambda: pump.inventories and pump.inventories[-1].problem)
    assert "does not match" in problem
    assert "reboot" in problem


def test_a_virtual_machine_says_so(nvml: NvmlDouble) -> None:
    with Pump(source(nvml.make_driver, virtual=True)) as pump:
        pump.until(lambda: pump.inventories)
    assert pump.inventories[0].virtual
