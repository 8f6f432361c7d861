"""A reset of GPUs from the console's side: a virtual host over SSH, and the command with its exit codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from backend.fleet import Fleet
from backend.virtual import belongings
from backend.virtual.host import NAME, VirtualHost
from backend.wire import CLEAN, Refused
from tests.nvml.double import NvmlDouble
from tui.cli import main
from tui.commands.reset import receipt_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_gpus_of_a_virtual_host_are_reset_while_its_agents_let_go(tmp_path: Path) -> None:
    with VirtualHost(tmp_path, 8, 1000) as host, Fleet(host.config(), archives=host.archive) as fleet:
        state = fleet.ready(NAME, 60).result()
        held = {need.name: need for need in fleet.plan_gpu_reset(NAME, ["3"], "a try").result(60).needs}
        assert "nvitop" in held["GPU 3: nobody has it open"].detail
        belongings.end([(one["pid"], one["start_ticks"]) for one in host.cast], 0.0)
        with pytest.raises(Refused, match="none that a reset would mend"):
            fleet.start_gpu_reset(NAME, ["3"]).result(60)
        run = fleet.start_gpu_reset(NAME, ["3"], "a try").result(60)
        receipt = fleet.reset_result(NAME, run.id, 90).result()
        assert (receipt.kind, receipt.gpu_reset["outcome"], receipt.verdict) == ("gpu-reset", "done", CLEAN), receipt
        assert any("GPU 3 reset by the driver: done" in line for line in receipt_lines(receipt))
        assert any(event.kind == "gpu-reset" for event in state.reset.events)
        fleet.wait(lambda: not state.sample(3).problem and state.reading(3, "memory_used_bytes").ok, 30).result()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    path = tmp_path / "config.toml"
    path.write_text(f'[hosts.here]\npython = "{sys.executable}"\n')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda *words: CliRunner().invoke(main, ["--config", str(path), "reset", *words])


def test_the_command_prints_what_is_missing_and_ends_with_4(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NvmlDouble(gpus=2, tmp_path=tmp_path) as nvml:
        for name, value in nvml.env.items():
            monkeypatch.setenv(name, value)
        said = run("--gpu-reset", "--gpu", "1", "--confirm", "1")
        assert said.exit_code == 4, said.output
        assert "NO  GPU 1: fault" in said.output and "--because TEXT" in said.output
        assert "no GPU was reset" in said.output
        shown = run("--gpu-reset", "--gpu", "1", "--plan", "--json")
        assert shown.exit_code == 4
        assert {need["ok"] for need in json.loads(shown.stdout)["needs"]} > {False}


@pytest.mark.parametrize("words", [["--gpu-reset"], ["--gpu", "1"], ["--because", "x"], ["--confirm", "1"]])
def test_half_an_order_is_a_wrong_use(run: Callable[..., Result], words: list[str]) -> None:
    said = run(*words)
    assert said.exit_code == 2 and "--gpu-reset needs --gpu" in said.output
