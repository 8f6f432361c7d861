"""The holders: real processes with the habits that make a reset hard."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs
from backend.agent.holders import scan
from backend.virtual.driver import VirtualDevices, VirtualDriver
from backend.virtual.holder import numbers
from tests.pythons import python38
from tests.virtualcast import Cast, gone, kill
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    with Cast(tmp_path / "host", gpus=4) as started:
        yield started


def test_spans_of_numbers() -> None:
    assert numbers("0-3,6") == [0, 1, 2, 3, 6]
    assert numbers("") == []


def test_ranks_are_children_of_one_parent_but_for_the_orphan(cast: Cast) -> None:
    started = cast.hold("--gpus", "0-3", "--per-gpu", "--orphan", "2", "--heir", "1", "--gib", "60-110",
                        "--title", "sglang::scheduler_TP{rank}", processes=6)  # fmt: skip
    parent, ranks = started[0], [record for record in started if record["role"] == "serving"]
    heir = next(record for record in started if record["role"] == "heir")
    assert parent["role"] == "parent"
    assert {record["rank"]: record["ppid"] == parent["pid"] for record in ranks} == {0: 1, 1: 1, 2: 0, 3: 1}
    assert heir["ppid"] == ranks[1]["pid"]
    orphan = procfs.stat(ranks[2]["pid"])
    assert orphan is not None
    assert orphan.sid not in (ranks[0]["pid"], os.getsid(parent["pid"]))
    driver = VirtualDriver(str(cast.root))
    held = {gpu: driver.occupancy(gpu)[0].number() for gpu in range(4)}
    assert all(60 << 30 <= int(held[gpu] or 0) <= 110 << 30 for gpu in held)
    assert len(set(held.values())) == 4


def test_a_renamed_rank_shows_only_its_title(cast: Cast) -> None:
    (rank,) = cast.hold("--gpus", "0", "--title", "sglang::scheduler_TP{rank}")
    stat = procfs.stat(rank["pid"])
    assert stat is not None
    assert stat.comm == "sglang::schedul"
    assert procfs.command(rank["pid"]) == "sglang::scheduler_TP0"
    assert "python" in procfs.exe(rank["pid"])


def test_a_deaf_rank_survives_sigterm_and_not_sigkill(cast: Cast) -> None:
    started = cast.hold("--gpus", "0-1", "--per-gpu", "--ignore-term", "0", processes=3)
    deaf, polite = started[1], started[2]
    kill(polite, signal.SIGTERM)
    kill(deaf, signal.SIGTERM)
    until(lambda: gone(polite))
    assert not gone(deaf)
    kill(deaf)
    until(lambda: gone(deaf))
    until(lambda: gone(started[0]))  # the parent has outlived its ranks


def test_a_parent_passes_sigterm_on(cast: Cast) -> None:
    started = cast.hold("--gpus", "0-1", "--per-gpu", processes=3)
    kill(started[0], signal.SIGTERM)
    until(lambda: all(map(gone, started)))


def test_a_monitor_opens_the_devices_and_claims_nothing(cast: Cast) -> None:
    (monitor,) = cast.hold("--gpus", "0-3", "--monitor", "--role", "monitor")
    devices, folder = VirtualDevices(str(cast.root)), f"/proc/{monitor['pid']}/fd"
    found = {devices.gpus_of(os.stat(f"{folder}/{fd}")) for fd in os.listdir(folder)} - {None}
    assert found == {(), (0,), (1,), (2,), (3,)}
    assert VirtualDriver(str(cast.root)).occupancy(0)[1].processes == []


def test_holders_have_a_device_open_as_often_as_was_read_on_an_h200(cast: Cast) -> None:
    (rank,), (monitor,) = cast.hold("--gpus", "1"), cast.hold("--gpus", "1", "--monitor")
    found = scan(VirtualDevices(str(cast.root))).holdings
    assert (found[rank["pid"]].fds[1], found[rank["pid"]].maps[1]) == (20, 3)
    assert (found[monitor["pid"]].fds[1], found[monitor["pid"]].maps.get(1, 0)) == (3, 0)


def test_a_bystander_holds_nothing(cast: Cast) -> None:
    (bystander,) = cast.hold("--title", "vim sglang_notes.md", "--role", "bystander")
    devices, folder = VirtualDevices(str(cast.root)), f"/proc/{bystander['pid']}/fd"
    assert {devices.gpus_of(os.stat(f"{folder}/{fd}")) for fd in os.listdir(folder)} == {None}


def test_everyone_ends_with_the_lifeline_even_the_deaf(cast: Cast) -> None:
    started = cast.hold("--gpus", "0-3", "--per-gpu", "--orphan", "2", "--heir", "1", "--ignore-term", "0",
                        processes=6)  # fmt: skip
    cast.let_go()
    until(lambda: all(map(gone, started)))


def test_the_host_side_runs_under_python_3_8(tmp_path: Path) -> None:
    with Cast(tmp_path / "old", python=python38()) as cast:
        (rank,) = cast.hold("--gpus", "0-1", "--title", "sglang::scheduler_TP{rank}")
        driver = VirtualDriver(str(cast.root))
        assert [pid for pid, _, _ in driver.occupancy(1)[1].processes] == [rank["pid"]]
