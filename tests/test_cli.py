"""The command: exit codes, JSON, and what it says where it cannot do what was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import Record
from tests.flights import seconds
from tests.nvml.double import NvmlDouble
from tui.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
    with NvmlDouble(gpus=2, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield double


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[hosts.here]\npython = "{sys.executable}"\n'
        '[stages.quick]\ncommand = ["/bin/sh", "-c", "echo said; exit 3"]\n'
        f'[stages.closed]\ncommand = ["true"]\ndisk_gib = 1e9\nout = "{tmp_path}"\n'
    )

    def run(*words: str, config: Path = path) -> Result:
        return CliRunner().invoke(main, ["--config", str(config), *words])

    return run


def test_status_json_has_every_reading_as_value_unsupported_or_failed(
    nvml: NvmlDouble, run: Callable[..., Result]
) -> None:
    nvml.gpu(1).fail(999, "nvmlDeviceGetTemperature")
    result = run("status", "--json")
    assert result.exit_code == 0, result.output
    host = json.loads(result.stdout)["hosts"][0]
    assert [gpu["index"] for gpu in host["gpus"]] == [0, 1]
    for gpu in host["gpus"]:
        for reading in gpu["readings"].values():
            assert len({"value", "unsupported", "failed"} & set(reading)) == 1
    assert "value" in host["gpus"][0]["readings"]["temperature_c"]
    assert "failed" in host["gpus"][1]["readings"]["temperature_c"]


def test_status_as_text_names_a_failed_reading(nvml: NvmlDouble, run: Callable[..., Result]) -> None:
    nvml.gpu(0).fail(999, "nvmlDeviceGetPowerUsage")
    result = run("status")
    assert result.exit_code == 0 and "failed" in result.stdout


def test_status_without_a_driver_says_so_and_fails(run: Callable[..., Result]) -> None:
    result = run("status", "--json")
    assert result.exit_code == 1
    assert "libnvidia-ml" in json.loads(result.stdout)["hosts"][0]["problem"]


def test_launch_runs_logs_and_stop(nvml: NvmlDouble, run: Callable[..., Result]) -> None:
    started = json.loads(run("launch", "quick", "--json").stdout)
    log = run("logs", started["id"], "--follow")
    assert log.exit_code == 0 and "said" in log.stdout
    [known] = json.loads(run("runs", "--json").stdout)
    assert (known["id"], known["exit_code"]) == (started["id"], 3)
    assert run("stop", "nothing-1").exit_code == 1


def test_a_closed_gate_exits_with_4_and_nothing_runs(nvml: NvmlDouble, run: Callable[..., Result]) -> None:
    result = run("launch", "closed")
    assert result.exit_code == 4 and "disk" in result.output
    assert json.loads(run("runs", "--json").stdout) == []


def test_a_reset_asks_before_it_kills(nvml: NvmlDouble, run: Callable[..., Result]) -> None:
    result = run("reset")
    assert result.exit_code == 4 and "--yes" in result.output


def test_leftovers(run: Callable[..., Result]) -> None:
    path = Path(f"/dev/shm/psm_{os.getpid():08x}")
    path.write_bytes(b"x" * 4096)
    try:
        os.utime(path, (1e9, 1e9))  # its age is that of its last change, which is now
        result = run("leftovers", "here", "--json")
        assert str(path) not in result.stdout
        assert {"segments", "in_use", "ports"} == json.loads(result.stdout).keys()
        assert "segments in use" in run("leftovers", "here", "--remove").stdout
        assert path.exists()
    finally:
        path.unlink()


def test_reset_and_receipts(nvml: NvmlDouble, run: Callable[..., Result]) -> None:
    assert run("baseline", "record").exit_code == 0
    result = run("reset", "--yes", "--json")
    receipt = json.loads(result.stdout)
    assert (result.exit_code, receipt["verdict"]) == (0, "CLEAN"), receipt
    listed = json.loads(run("receipts", "list", "--json").stdout)
    assert receipt["id"] in [item["id"] for item in listed]
    assert json.loads(run("receipts", "show", receipt["id"], "--json").stdout)["verdict"] == "CLEAN"
    nvml.gpu(1).hold(os.getpid(), 1 << 30)
    assert run("verify").exit_code == 1


def test_an_unknown_host_is_named_with_the_choices(run: Callable[..., Result]) -> None:
    result = run("status", "--host", "gpu-9")
    assert result.exit_code == 2 and "gpu-9" in result.output and "here" in result.output


def test_an_unreachable_host_exits_with_3(tmp_path: Path, run: Callable[..., Result]) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[hosts.gone]\npython = "/nonexistent/python3"\n')
    result = run("verify", config=other)
    assert result.exit_code == 3 and "python" in result.output


def test_config_path_and_check(tmp_path: Path, run: Callable[..., Result]) -> None:
    assert run("config", "path").stdout.strip().endswith("config.toml")
    assert "1 hosts, 2 stages" in run("config", "check").stdout
    bad = tmp_path / "bad.toml"
    bad.write_text("[hosts.a]\nprot = 22\n")
    result = run("config", "check", str(bad))
    assert result.exit_code == 2 and f"{bad}:2" in result.output and "prot" in result.output


def test_without_a_terminal_the_console_never_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tui.cli"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2 and "terminal" in done.stderr and "\x1b" not in done.stdout


def test_the_command_starts_without_the_console_or_a_model() -> None:
    code = (
        "import sys, tui.cli; print([m for m in ('textual', 'torch', 'sglang', 'backend.virtual') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_replay_writes_a_flight_whole_or_not_at_all(run: Callable[..., Result], tmp_path: Path) -> None:
    record = Record(flight_dir())
    for at, values in seconds(70, gpus=1):
        record.append(at, values)
    record.close()
    out = tmp_path / "flight.csv"
    assert run("replay", "here", "all", "--out", str(out)).exit_code == 0
    assert out.read_text().count("\n") == 71
    assert run("replay", "here", "all", "--out", str(out)).exit_code == 2, "a file that is there is kept"
    assert run("replay", "here", "--out", str(tmp_path / "flight.xls")).exit_code == 2
    unknown = run("replay", "here", "extract-nope")
    assert unknown.exit_code == 1 and "has no run `extract-nope`" in unknown.output
    assert [path.name for path in tmp_path.iterdir() if "flight" in path.name] == ["flight.csv"]
    lines = run("replay", "here", "--every", "60").stdout.splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["gpu"]["0"]["power_w:max"]
