"""The Fleet on this machine: the real agent, started as a host's would be, over the NVML double."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from backend.config import Config, ConfigError, Host, Stage
from backend.fleet import Event, Fleet, HostState, LinkState, badge
from backend.fleet.feed import Feed
from backend.wire import CLEAN, Refused, Telemetry, plain
from tests.nvml.double import NvmlDouble
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
    with NvmlDouble(gpus=2, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield double


def config(**stages: Stage) -> Config:
    return Config(hosts={"here": Host(python=sys.executable)}, stages=stages)


@pytest.fixture
def fleet(nvml: NvmlDouble, tmp_path: Path) -> Iterator[Fleet]:
    shell = ["/bin/sh", "-c"]
    stages = {
        "quick": Stage(command=[*shell, "echo from the stage; exit 7"]),
        "long": Stage(command=[*shell, "sleep 300"], grace_s=2.0),
        "closed": Stage(command=[*shell, "true"], disk_gib=1e9, out=str(tmp_path)),
        "gpus": Stage(command=[*shell, "true"], needs=["clean-gpus"]),
    }
    with Fleet(config(**stages)) as fleet:
        fleet.ready("here", 30).result()
        yield fleet


def test_a_host_tells_its_gpus_and_how_they_are(fleet: Fleet) -> None:
    host = fleet.hosts["here"]
    assert host.hello is not None and host.hello.hostname == os.uname().nodename
    assert host.gpu_indices == [0, 1]
    assert host.reading(0, "memory_used_bytes").value == 0
    assert badge(host, 0, fleet.config.thresholds).word == "OK"


def test_a_gpu_lost_in_the_middle_stays_listed_and_is_an_event(nvml: NvmlDouble, fleet: Fleet) -> None:
    host = fleet.hosts["here"]
    nvml.gpu(1).lose()
    until(lambda: badge(host, 1, fleet.config.thresholds).word == "LOST")
    assert host.gpu_indices == [0, 1]
    assert badge(host, 0, fleet.config.thresholds).word == "OK"
    assert any("GPU 1" in event.text and event.level == "bad" for event in host.events)


def test_a_stage_runs_detached_and_its_end_and_log_come_back(fleet: Fleet) -> None:
    run = fleet.launch("here", "quick").result()
    ended = fleet.run_ended("here", run.id, 20).result()
    assert (ended.state, ended.exit_code) == ("exited", 7)
    assert fleet.log("here", run.id).result()["text"].strip() == "from the stage"
    assert any("quick exited with 7" in event.text for event in fleet.hosts["here"].events)


def test_a_closed_gate_refuses_and_a_reason_opens_it_and_is_kept(fleet: Fleet) -> None:
    with pytest.raises(Refused) as refused:
        fleet.launch("here", "closed").result()
    assert refused.value.code == "gate"
    gates = fleet.gates("here", "closed").result()
    assert [gate.ok for gate in gates].count(False) == 1
    run = fleet.launch("here", "closed", force="the disk is thin provisioned").result()
    assert run.forced == "the disk is thin provisioned"


def test_a_stage_that_needs_clean_gpus_is_refused_on_dirty_ones(nvml: NvmlDouble, fleet: Fleet) -> None:
    assert fleet.run_ended("here", fleet.launch("here", "gpus").result().id, 20).result().exit_code == 0
    nvml.gpu(1).hold(os.getpid(), 60 * GIB)
    with pytest.raises(Refused, match="GPU 1"):
        fleet.launch("here", "gpus").result()


def test_what_happened_while_the_agent_was_gone_is_caught_up(fleet: Fleet) -> None:
    host = fleet.hosts["here"]
    run = fleet.launch("here", "long").result()
    until(lambda: host.runs[run.id].state == "running")
    assert host.hello is not None
    first = host.hello.agent_pid
    os.kill(first, signal.SIGKILL)  # the agent that this test's own Fleet started
    until(
        lambda: host.hello is not None and host.hello.agent_pid != first and host.link.state is LinkState.LIVE,
        20,
    )
    until(lambda: host.runs[run.id].state == "running")
    fleet.stop_run("here", run.id).result()
    ended = fleet.run_ended("here", run.id, 20).result()
    assert ended.exit_code == -signal.SIGTERM
    assert any("lost" in event.text for event in host.events)


def test_verify_judges_without_a_kill_and_the_host_remembers_the_verdict(nvml: NvmlDouble, fleet: Fleet) -> None:
    receipt = fleet.verify("here").result()
    assert receipt.kind == "verify" and not receipt.signals
    assert {gpu.index for gpu in receipt.after} == {0, 1} == set(fleet.hosts["here"].verdicts)
    fleet.record_baseline("here").result()
    assert fleet.verify("here").result().verdict == CLEAN
    nvml.gpu(0).hold(os.getpid(), 1 * GIB)
    assert fleet.verify("here").result().verdict != CLEAN


def test_the_receipt_of_a_started_reset_comes_though_nobody_waits_for_it(fleet: Fleet) -> None:
    host = fleet.hosts["here"]
    run = fleet.start_reset("here", fleet.plan_reset("here").result()).result()
    assert host.reset.running
    until(lambda: host.reset.receipt, 30)
    assert host.reset.receipt is not None and host.reset.receipt.id == run.id
    assert not host.reset.running
    assert {gpu.verdict for gpu in host.verdicts.values()} == {CLEAN}
    until(lambda: any(event.kind == "verdict" for event in host.reset.events))


def test_a_host_or_stage_that_is_not_configured_is_named(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="`nowhere`.*here"):
        fleet.verify("nowhere")
    with pytest.raises(ConfigError, match="`train`.*quick"):
        fleet.launch("here", "train")


def test_a_message_that_does_not_fit_changes_nothing_and_is_noted() -> None:
    host, told = HostState("h", Host()), []
    feed = Feed(host, told.append, lambda run_id: None)
    feed.message({"t": "telemetry", "telemetry": plain(Telemetry(1, 2.0))})
    good = host.telemetry
    feed.message({"t": "telemetry", "telemetry": {"seq": "not a number"}})
    feed.message({"t": "run", "run": {"id": 7}})
    feed.message({"t": "never heard of"})
    assert host.telemetry is good
    events = [event for event in told if isinstance(event, Event)]
    assert len(events) == 2 and all("not understood" in event.text for event in events)
