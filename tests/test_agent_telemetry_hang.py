"""Telemetry from a driver that hangs: the host goes on, and the GPU that hangs is named. No other monitor does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml
import pytest

from backend.agent import child, watch
from backend.agent.devices import NvidiaDevices
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from tests.nvml import NvmlDouble
from tests.nvml.pump import Pump
from tests.pythons import python38

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL = (0, 1, 2, 3)
PERIOD_S = 0.1


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(len(ALL), tmp_path=tmp_path) as double:
        yield double


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LIMIT_S", 0.6)
    monkeypatch.setattr(child, "FIRST_LIMIT_S", 2.0)
    monkeypatch.setattr(child, "CLOSE_WAIT_S", 0.1)
    monkeypatch.setattr(watch, "OVERDUE_S", 0.3)
    monkeypatch.setattr(watch, "RETRY_S", 1.0)
    monkeypatch.setattr(watch, "RETRY_MOST_S", 2.0)


@pytest.fixture
def pump(nvml: NvmlDouble) -> Iterator[Pump]:
    source = TelemetrySource(
        Machine(nvml.make_driver, NvidiaDevices, [sys.executable]), period_s=PERIOD_S, slow_every_s=1
    )
    with Pump(source) as pump:
        yield pump


def hung(pump: Pump, index: int) -> bool:
    return pump.problem(index).startswith("not answering for")


def driver_hung(pump: Pump) -> bool:
    return all("the driver is not answering" in pump.problem(index) for index in ALL)


def test_one_gpu_hangs_and_the_others_go_on(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.gpu(1).hang()
    pump.until(lambda: hung(pump, 1))
    pump.until(lambda: hung(pump, 1) and pump.healthy(0, 2, 3))
    before = nvml.gpu(1).calls("nvmlDeviceGetMemoryInfo_v2")
    pump.ticks(5)
    assert hung(pump, 1)
    assert pump.healthy(0, 2, 3)
    assert nvml.gpu(1).calls("nvmlDeviceGetMemoryInfo_v2") - before <= 1
    nvml.gpu(1).resume()
    pump.until(lambda: pump.healthy(*ALL))
    assert len(pump.inventories) == 1


def test_while_an_answer_is_overdue_the_readings_grow_old_and_keep_their_values(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.gpu(0).hang()
    pump.until(lambda: (pump.gpu(0).readings["temperature_c"].age_s or 0) >= 0.3)
    reading = pump.gpu(0).readings["temperature_c"]
    assert reading.value == 36
    assert reading.ok


def test_telemetry_never_waits_for_a_hang(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    pump.longest_step_s = 0.0
    nvml.hang()
    seen = pump.ticks(25)
    gaps = [after.at - before.at for before, after in pairwise(seen)]
    assert max(gaps) < 2.0
    assert pump.longest_step_s < 1.0


def test_every_gpu_says_so_where_the_driver_as_a_whole_hangs(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.hang()
    pump.until(lambda: driver_hung(pump))
    assert len(pump.telemetry[-1].gpus) == len(ALL)
    nvml.resume()
    pump.until(lambda: pump.healthy(*ALL))


def test_every_gpu_says_so_where_reading_any_of_them_hangs(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    for index in ALL:
        nvml.gpu(index).hang(function="nvmlDeviceGetUtilizationRates")
    pump.until(lambda: driver_hung(pump))
    nvml.resume()
    pump.until(lambda: pump.healthy(*ALL))


def test_two_gpus_hang_and_the_others_go_on(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.gpu(0).hang(function="nvmlDeviceGetUtilizationRates")
    nvml.gpu(1).hang(function="nvmlDeviceGetUtilizationRates")
    pump.until(lambda: hung(pump, 0) and hung(pump, 1) and pump.healthy(2, 3))


def test_a_gpu_that_hangs_while_it_is_opened_is_left_out(nvml: NvmlDouble, pump: Pump) -> None:
    nvml.gpu(2).hang(function="nvmlDeviceGetHandleByIndex_v2")
    pump.until(lambda: pump.healthy(0, 1, 3))
    assert hung(pump, 2)
    assert len(pump.inventories[-1].gpus) == len(ALL)
    nvml.gpu(2).resume()
    pump.until(lambda: pump.healthy(*ALL))
    assert pump.inventories[-1].gpus[2].uuid == nvml.gpu(2).uuid


def test_a_driver_that_hangs_before_the_first_gpu_is_an_inventory_with_a_reason(nvml: NvmlDouble, pump: Pump) -> None:
    nvml.hang(function="nvmlInitWithFlags")
    pump.until(lambda: pump.inventories and "still opening" in pump.inventories[-1].problem)
    pump.until(lambda: "is not answering" in pump.inventories[-1].problem)
    nvml.resume()
    pump.until(lambda: pump.healthy(*ALL))
    assert pump.inventories[-1].problem == ""


def test_a_crash_inside_the_driver_is_put_down_to_its_gpu(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.gpu(3).hang(function="nvmlDeviceGetUtilizationRates")
    serving = pump.source._watch.children[0]
    pump.until(lambda: serving.waiting_for and serving.waiting_for[1] == 3)
    os.kill(serving.pid, signal.SIGSEGV)
    pump.until(lambda: "signal 11" in pump.problem(3))
    pump.until(lambda: pump.healthy(0, 1, 2))


def test_closing_while_the_driver_hangs_is_quick(nvml: NvmlDouble, pump: Pump) -> None:
    pump.until(lambda: pump.healthy(*ALL))
    nvml.hang()
    pump.ticks(2)
    pump.source.close()
    assert pump.source.filenos() == []


AGENT38 = """
import json, select, sys, time
from backend.agent.devices import NvidiaDevices
from backend.agent.nvml import NvmlDriver
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.wire import encode
source = TelemetrySource(Machine(NvmlDriver, NvidiaDevices, [sys.executable]), period_s=0.2, slow_every_s=0.4)
while True:
    wait_s = max(0.0, source.due() - time.monotonic())
    ready = select.select([0] + source.filenos(), [], [], wait_s)[0]
    if 0 in ready:
        break
    for message in source.step(set(ready)):
        sys.stdout.buffer.write(encode(message))
        sys.stdout.buffer.flush()
source.close()
"""


def test_the_same_runs_under_python_38(nvml: NvmlDouble, tmp_path: Path) -> None:
    import json

    (tmp_path / "pynvml.py").symlink_to(pynvml.__file__)
    root = Path(watch.__file__).parents[2]
    env = {**os.environ, **nvml.env, "PYTHONPATH": f"{root}:{tmp_path}"}
    agent = subprocess.Popen(
        [python38(), "-c", AGENT38], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with agent:
        assert agent.stdout is not None
        assert agent.stdin is not None
        inventory = telemetry = None
        for line in agent.stdout:
            message = json.loads(line)
            inventory = message.get("inventory", inventory)
            telemetry = message.get("telemetry")
            if telemetry and telemetry["gpus"] and "mig" in telemetry["gpus"][-1]["readings"]:
                break
        agent.stdin.close()
        assert agent.wait(20) == 0
        assert agent.stderr is not None
        assert agent.stderr.read() == b""
    assert inventory is not None
    assert telemetry is not None
    assert inventory["gpus"][3]["name"] == "NVIDIA H200"
    assert telemetry["gpus"][3]["readings"]["temperature_c"][0] == 36
