"""XIDs outside of a reset: the driver's events beside the readings, the log since boot, and what a console is told."""

from __future__ import annotations

import select
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import child as children
from backend.agent import nvmlevents, ours
from backend.agent.devices import NvidiaDevices
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.agent.xid import source as sources
from backend.agent.xid.source import XidSource
from backend.config import Host
from backend.fleet import HostState
from backend.fleet.feed import Feed
from backend.wire import Xid, encode, plain
from tests.kernellogs import KernelLogFile, xid
from tests.nvml import NvmlDouble
from tests.nvml.pump import OpenChild
from tests.waiting import until
from tui.commands.status import xid_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from backend.agent.child import Answer


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(2, tmp_path=tmp_path) as double:
        yield double


@pytest.fixture
def log(tmp_path: Path) -> KernelLogFile:
    return KernelLogFile(tmp_path)


class TestTheChild:
    """One thread that waits for events, in the child that reads."""

    def heard(self, opened: OpenChild) -> Callable[[], list[tuple[str, int, Any]]]:
        came: list[Answer] = []

        def take() -> list[tuple[str, int, Any]]:
            came.extend(opened.child.answers())
            return [(one.kind, one.gpu, one.value or one.problem) for one in came]

        return take

    def test_each_xid_is_told_with_its_gpu_while_readings_go_on(self, nvml: NvmlDouble) -> None:
        nvml.raise_xid(0, 13)  # before anybody listens: the kernel's log has it
        with OpenChild(nvml.make_driver) as opened:
            heard = self.heard(opened)
            opened.child.listen()
            until(lambda: ("listening", -1, "") in heard())
            nvml.raise_xid(1, 79)
            nvml.raise_xid(0, 48)
            until(lambda: len(heard()) == 3)
            assert heard()[1:] == [("xid", 1, 79), ("xid", 0, 48)]
            assert opened.lean(1)["temperature_c"].value == 36

    @pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
    def test_an_event_call_that_never_returns_holds_up_no_reading(self, nvml: NvmlDouble, function: str) -> None:
        if function == "nvmlDeviceRegisterEvents":
            nvml.gpu(1).hang(function=function)
        else:
            nvml.hang(function=function)
        with OpenChild(nvml.make_driver) as opened:
            opened.child.listen()
            assert all(opened.lean(index)["temperature_c"].ok for index in (0, 1, 0))

    def test_xids_are_no_sign_that_a_gpu_answers(self, nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(children, "LIMIT_S", 0.4)
        with OpenChild(nvml.make_driver) as opened:
            heard = self.heard(opened)
            opened.child.listen()
            until(lambda: heard())
            nvml.gpu(0).hang()
            opened.child.ask("lean", [0])

            def overdue() -> bool:
                nvml.raise_xid(1, 31)
                return bool(heard()) and opened.child.overdue()

            until(overdue, timeout_s=3.0)
            assert opened.child.waiting_for == ("lean", 0)
            nvml.gpu(0).resume()

    def test_a_gpu_that_is_lost_ends_no_others_events(self, nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvmlevents, "AGAIN_S", 0.05)
        monkeypatch.setattr(nvmlevents, "WAIT_MS", 50)
        with OpenChild(nvml.make_driver) as opened:
            heard = self.heard(opened)
            opened.child.listen()
            until(lambda: heard())
            sets = nvml.calls("nvmlEventSetCreate")
            nvml.gpu(0).fail(15, "nvmlDeviceRegisterEvents")
            nvml.fail(15, "nvmlEventSetWait_v2")
            until(lambda: nvml.calls("nvmlEventSetCreate") > sets)
            nvml.resume()
            sets = nvml.calls("nvmlEventSetCreate")
            until(lambda: nvml.calls("nvmlEventSetCreate") > sets or nvml.calls("nvmlEventSetWait_v2") > sets + 20)
            nvml.raise_xid(1, 62)
            until(lambda: ("xid", 1, 62) in heard())

    def test_a_driver_without_events_says_so(self, nvml: NvmlDouble) -> None:
        for index in (0, 1):
            nvml.gpu(index).fail(3, "nvmlDeviceRegisterEvents")
        with OpenChild(nvml.make_driver) as opened:
            heard = self.heard(opened)
            opened.child.listen()
            until(lambda: heard() == [("listening", -1, "unsupported (NVML 3)")])


class Told:
    """The telemetry and XIDs of one agent, stepped as its loop does, into a console's state."""

    def __init__(self, nvml: NvmlDouble, log: str, host: HostState | None = None) -> None:
        machine = Machine(nvml.make_driver, NvidiaDevices, [sys.executable], kernel_log=log)
        self.telemetry = TelemetrySource(machine, period_s=0.1, slow_every_s=60.0)
        self.xids = XidSource(machine, self.telemetry)
        self.host = host or HostState("h", Host())
        self.feed = Feed(self.host, lambda event: None, lambda run_id: None)
        self.messages: list[dict[str, Any]] = []

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.telemetry.close()
        self.xids.close()

    def turn(self) -> None:
        due = min(self.telemetry.due(), self.xids.due(), time.monotonic() + 0.1)
        ready, _, _ = select.select(self.telemetry.filenos(), [], [], max(0.0, due - time.monotonic()))
        self.telemetry.step(set(ready))
        for message in self.xids.step(set(ready)):
            assert encode(message)
            self.messages.append(message)
            self.feed.message(plain(message))

    def until(self, seen: Callable[[], Any]) -> Any:
        return until(lambda: (self.turn(), seen())[1], every_s=0.0)

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(event.level, event.text) for event in self.host.events]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PERIOD_S", 0.05)
    monkeypatch.setattr(sources, "LINE_WAIT_S", 0.3)


BY = "pid=4711, name=python3, Ch 00000011"


def test_what_the_log_had_is_told_in_one_event_and_each_new_one_in_its_own(
    nvml: NvmlDouble, log: KernelLogFile
) -> None:
    log.say(*[xid(31, BY)] * 3, xid(95, BY, "0000:1b:00"), xid(37))
    with Told(nvml, str(log.path)) as told:
        told.until(lambda: told.messages)
        assert [(one.number, one.gpu, one.level, one.count) for one in told.host.xids] == [
            (31, 0, "warn", 3), (95, 1, "bad", 1), (37, 0, "info", 1),
        ]  # fmt: skip
        ((level, text),) = told.events
        assert (level, text.split(";")[0]) == ("bad", "4 XIDs in the kernel's log since boot")
        log.say(xid(48, BY, "0000:1b:00"))
        told.until(lambda: len(told.events) == 2)
        level, text = told.events[1]
        assert level == "bad"
        assert text.startswith(
            "GPU 1: XID 48: double-bit memory error, which ECC cannot mend, by process 4711 (python3)"
        )
        assert f"--gpu-reset --gpu {nvml.gpu(1).uuid}" in text
        assert any("XID 48" in line for line in xid_lines(told.host))
        assert not any("XID 37" in line for line in xid_lines(told.host))
        assert told.host.xids_gap == ""


def test_a_console_that_comes_back_hears_only_what_it_missed(nvml: NvmlDouble, log: KernelLogFile) -> None:
    log.say(xid(31, BY))
    with Told(nvml, str(log.path)) as told:
        told.until(lambda: told.messages)
    log.say(xid(79, "GPU has fallen off the bus."))
    with Told(nvml, str(log.path), told.host) as again:
        again.until(lambda: again.messages)
        assert [one.number for one in again.host.xids] == [31, 79]
        assert [text.split(":")[1] for _, text in again.events[1:]] == [" XID 79"]


@pytest.mark.parametrize("line", [True, False])
def test_an_event_and_its_line_are_told_once(nvml: NvmlDouble, log: KernelLogFile, line: bool) -> None:
    with Told(nvml, str(log.path)) as told:
        told.until(lambda: told.messages and told.telemetry._watch.deaf == "")
        if line:
            log.say(xid(62, BY))
        nvml.raise_xid(0, 62)
        told.until(lambda: told.host.xids)
        end = time.monotonic() + 2 * sources.LINE_WAIT_S
        told.until(lambda: time.monotonic() > end)
        (one,) = told.host.xids
        assert (one.number, one.gpu, one.pid) == (62, 0, 4711 if line else None)


def test_without_the_log_the_driver_tells_and_the_gap_is_said(nvml: NvmlDouble, tmp_path: Path) -> None:
    with Told(nvml, str(tmp_path / "absent")) as told:
        told.until(lambda: told.messages and told.telemetry._watch.deaf == "")
        assert "unreadable, because there is no" in (told.host.xids_gap or "")
        assert [level for level, text in told.events if "unreadable" in text] == ["info"]
        assert "unreadable" in xid_lines(told.host)[-1]
        nvml.raise_xid(1, 31)
        told.until(lambda: told.host.xids)
        assert told.events[-1][1].startswith("GPU 1: XID 31: MMU fault")


def test_where_neither_tells_that_is_said_too(nvml: NvmlDouble, tmp_path: Path) -> None:
    for index in (0, 1):
        nvml.gpu(index).fail(3, "nvmlDeviceRegisterEvents")
    with Told(nvml, str(tmp_path / "absent")) as told:
        told.until(lambda: "the driver tells none either: unsupported" in (told.host.xids_gap or ""))


def test_a_machine_without_a_log_or_events_says_nothing(nvml: NvmlDouble) -> None:
    with Told(nvml, "") as told:
        told.until(lambda: told.telemetry._watch.deaf == "")
        end = time.monotonic() + 0.3
        told.until(lambda: time.monotonic() > end)
        assert told.messages == []
        nvml.raise_xid(0, 48)
        told.until(lambda: told.host.xids)
        assert told.events[0][0] == "bad"


def test_what_a_reset_may_cause_is_left_to_its_receipt(nvml: NvmlDouble, log: KernelLogFile) -> None:
    with Told(nvml, str(log.path)) as told:
        told.until(lambda: told.messages)
        mark = ours.register("reset")
        log.say(xid(45, BY), xid(95, BY))
        told.until(lambda: len(told.host.xids) == 2)
        ours.forget(mark)
        assert [one.level for one in told.host.xids] == ["info", "bad"]
        assert "its receipt says" in told.host.xids[0].text
        log.say(xid(45, BY))
        told.until(lambda: len(told.host.xids) == 3)
        assert told.host.xids[2].level == "warn"


def test_a_flood_is_told_in_few_and_holds_up_nothing(nvml: NvmlDouble, log: KernelLogFile) -> None:
    log.say(*[xid(31, BY)] * 20_000)
    longest_s = 0.0
    with Told(nvml, str(log.path)) as told:
        while not told.messages:
            began = time.process_time()
            told.turn()
            longest_s = max(longest_s, time.process_time() - began)
        assert longest_s < 1.0
        assert 1 <= len(told.host.xids) <= sources.TOLD_MOST


def test_a_gpu_that_is_gone_keeps_the_name_that_the_log_has(nvml: NvmlDouble, log: KernelLogFile) -> None:
    log.say("NVRM: GPU at PCI:0000:b1:00: GPU-0b1", "NVRM: GPU 0000:b1:00.0: GPU has fallen off the bus.",
            "nvidia-nvswitch1: SXid (PCI:0000:a7:00.0): 20034, Fatal, Link 28 LTSSM Fault Up")  # fmt: skip
    with Told(nvml, str(log.path)) as told:
        told.until(lambda: told.messages)
        assert [(one.gpu, one.where) for one in told.host.xids] == [
            (None, "the GPU at 0000:b1:00.0 (GPU-0b1)"), (None, "nvidia-nvswitch1 at 0000:a7:00.0"),
        ]  # fmt: skip


def test_a_name_from_the_log_reaches_no_terminal_as_it_is() -> None:
    host = HostState("h", Host())
    feed = Feed(host, lambda event: None, lambda run_id: None)
    bad = Xid("1", 0.0, 0, "GPU 0", 43, "warn", "XID 43", "do", 7, "\x1b[31mred\n")
    feed.message({"t": "xids", "xids": [plain(bad)], "gap": "", "first": False})
    assert host.events[0].text == "GPU 0: XID 43, by process 7 (red )"
    assert "\x1b" not in "".join(xid_lines(host))
