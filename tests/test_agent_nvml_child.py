"""The disposable child: whom a hang is put down to, and that nothing waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from backend.agent import child as children
from backend.agent import ours, procfs
from backend.agent.child import OPEN, DriverChild, reap
from tests.nvml import NvmlDouble
from tests.nvml.pump import OpenChild
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(4, tmp_path=tmp_path) as double:
        yield double


def test_a_hang_is_put_down_to_the_gpu_whose_answer_is_missing(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(2).hang()
        got = opened.child.gather("lean", range(4), deadline_s=0.3)
        assert sorted(got.answers) == [0, 1]
        assert got.hung == 2
        assert "GPU 2 is not answering" in got.problem
        assert opened.child.waiting_for == ("lean", 2)
        nvml.gpu(2).resume()
        rest = opened.child.collect(5)
        assert (sorted(rest.answers), rest.hung) == ([2, 3], None)


def test_a_hang_while_opening_is_put_down_to_the_gpu_that_is_opened(nvml: NvmlDouble) -> None:
    nvml.gpu(1).hang(function="nvmlDeviceGetHandleByIndex_v2")
    child = DriverChild(nvml.make_driver)
    child.start()
    got = child.gather("open", deadline_s=1)
    child.abandon()
    assert got.hung == 1


def test_a_driver_that_never_initialises_is_put_down_to_no_gpu(nvml: NvmlDouble) -> None:
    nvml.hang(function="nvmlInitWithFlags")
    child = DriverChild(nvml.make_driver)
    child.start()
    got = child.gather("open", deadline_s=0.5)
    child.abandon()
    assert got.hung == OPEN
    assert "the driver is not answering" in got.problem


def test_abandoning_a_hanging_child_does_not_wait_and_leaves_no_zombie(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(0).hang()
        opened.child.ask("lean", [0])
        pid = opened.child.pid
        opened.child.abandon()
        assert not opened.child.alive
        until(lambda: reap() == 0)
        assert procfs.stat(pid) is None


def test_a_child_that_dies_says_how(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(1).hang()
        opened.child.ask("lean", [0, 1])
        until(lambda: opened.child.answers() and opened.child.waiting_for == ("lean", 1))
        os.kill(opened.child.pid, signal.SIGSEGV)
        got = opened.child.collect(5)
    assert got.hung == 1
    assert "signal 11" in got.problem


def test_the_child_holds_none_of_the_agents_files_open(nvml: NvmlDouble) -> None:
    reading, writing = os.pipe()
    try:
        with OpenChild(nvml.make_driver) as opened:
            folder = f"/proc/{opened.child.pid}/fd"
            links = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
            assert f"pipe:[{os.fstat(reading).st_ino}]" not in links
            assert {os.readlink(f"{folder}/{fd}") for fd in (0, 1, 2)} == {os.devnull}
    finally:
        os.close(reading)
        os.close(writing)


def test_the_child_is_known_as_ours_and_leaves_when_its_requests_end(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        pid = opened.child.pid
        assert pid in {known for known, _ in ours.ours()}
    assert procfs.stat(pid) is None
    assert pid not in {known for known, _ in ours.ours()}


def test_the_child_ignores_the_interrupt_that_is_meant_for_the_console(nvml: NvmlDouble) -> None:
    with OpenChild(nvml.make_driver) as opened:
        os.kill(opened.child.pid, signal.SIGINT)
        assert opened.lean()["temperature_c"].ok


PARENT = """
import sys, time
from backend.agent.child import DriverChild
from backend.agent.nvml import NvmlDriver
child = DriverChild(NvmlDriver)
child.start()
child.gather("open")
child.ask("lean", [0])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_hanging_child_dies_with_its_agent(nvml: NvmlDouble) -> None:
    nvml.gpu(0).hang(function="nvmlDeviceGetUtilizationRates")
    agent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env={**os.environ, **nvml.env}, stdout=subprocess.PIPE, text=True
    )
    with agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        found = procfs.stat(pid)
        assert found is not None
        until(lambda: nvml.calls("nvmlDeviceGetUtilizationRates") == 1)
        agent.kill()
    until(lambda: not procfs.alive(pid, found.start_ticks))


def test_closing_gives_up_on_a_child_that_hangs(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "CLOSE_WAIT_S", 0.2)
    with OpenChild(nvml.make_driver) as opened:
        nvml.gpu(0).hang()
        opened.child.ask("lean", [0])
        pid = opened.child.pid
        began = time.monotonic()
        opened.child.close()
        assert time.monotonic() - began < 5
    until(lambda: reap() == 0)
    assert procfs.stat(pid) is None
