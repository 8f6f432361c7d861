"""`doctor`: each thing that may be missing on a host or here is a row with what to do, and hides no other."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from backend.agent import doctor, procfs
from backend.agent.gates import places
from backend.agent.seam import Machine
from backend.wire import Gate
from tests.nvml import NvmlDouble
from tests.resetting import FileDevices
from tui.cli import main
from tui.commands import doctor as command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with NvmlDouble(2, tmp_path=tmp_path) as double:
        yield double


def rows(nvml: NvmlDouble, **changes: Any) -> dict[str, Gate]:
    machine = Machine(nvml.make_driver, lambda: FileDevices(str(nvml.path.parent)), [], **changes)
    found = doctor.check(machine)
    return {row.name: row for row in found}


def test_a_host_whose_driver_answers_says_so(nvml: NvmlDouble) -> None:
    found = rows(nvml)
    assert found["GPU driver"].ok is True
    assert "2 x" in found["GPU driver"].detail
    assert found["safe signals"].ok is True
    assert found["readings"].ok is True
    assert all(row.fix for row in found.values() if row.ok is not True)


def test_a_reading_that_fails_is_told_apart_from_one_that_is_not_given(nvml: NvmlDouble) -> None:
    nvml.gpu(0).fail(3, "nvmlDeviceGetFanSpeed")
    assert "fan_percent" in rows(nvml)["readings"].detail
    nvml.gpu(1).fail(999, "nvmlDeviceGetTemperature")
    found = rows(nvml)["readings"]
    assert found.ok is False
    assert "temperature_c of GPU 1" in found.detail


def test_a_gpu_that_is_lost_has_a_row_of_its_own(nvml: NvmlDouble) -> None:
    nvml.gpu(1).fail(15)
    found = rows(nvml)
    assert found["GPU 1"].ok is False
    assert "GPU 0" not in found


def test_what_cannot_be_looked_at_hides_nothing_else(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("odd host")

    monkeypatch.setattr(doctor, "scan", broken)
    found = rows(nvml)
    assert found["who holds the GPUs"].ok is None
    assert "odd host" in found["who holds the GPUs"].detail
    assert found["GPU driver"].ok is True
    assert found["runs and receipts"].ok is True


def test_a_kernel_without_handles_of_processes_cannot_reset(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("backend.agent.pidfd.pidfd_open", missing)
    found = rows(nvml)["safe signals"]
    assert found.ok is False
    assert "Linux 5.3" in found.fix


@pytest.mark.parametrize(("caps", "ok"), [("000001ffffffffff", True), ("0000000000000000", None)])
def test_a_user_without_the_right_ends_only_its_own(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch, caps: str, ok: bool | None
) -> None:
    monkeypatch.setattr(procfs, "status", lambda pid: {"CapEff": caps})
    assert rows(nvml)["ending others' processes"].ok is ok


def test_a_container_says_what_it_does_not_see(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "in_initial_pid_namespace", lambda: False)
    monkeypatch.setattr(places, "free_bytes", lambda path: 64 << 20)
    found = rows(nvml, cuda_library="libnone.so.7", kernel_log="/nowhere/kmsg")
    assert "outside this container" in found["who holds the GPUs"].detail
    assert found["CUDA test"].ok is None
    assert "no /nowhere/kmsg" in found["XIDs since boot"].detail
    assert found["shared memory"].ok is False
    assert "--shm-size" in found["shared memory"].fix


def test_the_command_tells_of_this_machine_and_of_a_host(nvml: NvmlDouble, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[hosts.here]\npython = "{sys.executable}"\n')
    done = CliRunner(env=nvml.env).invoke(main, ["--config", str(path), "doctor", "here", "--json"])
    said = json.loads(done.stdout)
    assert set(said) == {command.HERE, "here"}
    assert {row["state"] for table in said.values() for row in table} <= set(command.MARKS.values())
    names = [row["name"] for row in said["here"]]
    assert names[:2] == ["connection", "clock"]
    assert "GPU driver" in names
    failing = any(row["state"] == "FAILS" for table in said.values() for row in table)
    assert done.exit_code == (1 if failing else 0)


def test_a_host_that_cannot_be_reached_ends_with_three(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[hosts.away]\npython = "/nowhere/python3"\n')
    done = CliRunner().invoke(main, ["--config", str(path), "doctor", "away"])
    assert done.exit_code == 3, done.output
    assert "FAILS   connection" in done.stdout
    assert "/nowhere/python3" in done.stdout
