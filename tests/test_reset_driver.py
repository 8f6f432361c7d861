"""A driver that blocks, hangs, ends, is missing or loses a GPU: what the verdict then says."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from backend.agent.reset import watch
from backend.agent.reset.cycle import verify
from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, UNHEALTHY, UNKNOWN
from tests.resetting import Bench, quick_bench
from tests.test_reset_cycle import reset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with quick_bench(tmp_path / "host", monkeypatch) as host:
        yield host


def test_a_driver_that_blocks_behind_an_exiting_victim_is_no_hang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (0.3,))
    bench.start("slow-exit", exit_s=1.2)
    bench.set(blocks_at_exit=True)
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert any("one call to the driver took 1." in note for note in said.notes), said.notes


def test_a_driver_that_hangs_is_unknown_and_the_other_gpus_are_judged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (0.5,))
    bench.set(hang=[0])
    said = verify(bench.machine, accept_limited=True)
    assert said.verdict == UNKNOWN
    assert [one.verdict for one in said.after] == [UNKNOWN, CLEAN]
    assert "not answering" in said.after[0].reason


def test_two_gpus_that_hang_are_a_driver_that_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", (0.3,))
    bench.set(hang=[0, 1])
    said = verify(bench.machine, accept_limited=True)
    assert [one.verdict for one in said.after] == [UNKNOWN, UNKNOWN]


def test_a_killed_driver_child_is_started_again_and_blames_no_gpu(bench: Bench) -> None:
    seeing = watch.Watch(bench.machine.driver)
    try:
        assert len(seeing.open().gpus) == 2
        os.kill(seeing._child.pid, signal.SIGKILL)
        assert sorted(seeing.occupancy()) == [0, 1]
        assert seeing.unknown == {}
    finally:
        seeing.close()


def test_without_a_driver_nothing_is_called_clean(bench: Bench) -> None:
    bench.set(broken="the NVIDIA kernel module is not loaded")
    said = verify(bench.machine, accept_limited=True)
    assert (said.verdict, said.after) == (UNKNOWN, [])
    assert any("kernel module" in note for note in said.notes)
    assert any("kernel module" in text for text in op_plan(bench.machine, {}).unseen)


def test_a_lost_gpu_is_unhealthy(bench: Bench) -> None:
    bench.set(lost=[1])
    said = verify(bench.machine, accept_limited=True)
    assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
    assert "lost" in said.after[1].reason
    assert said.after[1].action
