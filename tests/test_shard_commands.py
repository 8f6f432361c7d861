"""`shards show`, its scans, and `shards repair`, through the agent as a host runs them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from tests.cases import torchfiles as files
from tests.cases.torchfiles import Storage, T
from tests.nvml.double import NvmlDouble
from tui.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    config = tmp_path / "config.toml"
    config.write_text(f'[hosts.here]\npython = "{sys.executable}"\nroots = ["{tmp_path}/shards"]\n')
    (tmp_path / "shards").mkdir()
    with NvmlDouble(gpus=1, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield lambda *words: CliRunner().invoke(main, ["--config", str(config), "shards", *words])


def test_show_peeks_scans_and_ends_by_what_it_finds(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = tmp_path / "shards" / "data_0.ckpt"
    states = Storage("bfloat16", 8, b"\x80\x3f" * 7 + b"\xc0\x7f")
    files.save(path, {"input_ids": T("int64", (3,)), "hidden_state": T("bfloat16", (1, 2, 4), states)})
    plain = run("show", str(path))
    assert plain.exit_code == 0, plain.output
    assert "min" not in plain.output
    told = run("show", str(path), "--tensor", "hidden*")
    assert "1 1 1 1 ... 1 1 1 nan" in told.output
    assert "min 1  max 1  mean 1" in told.output and "NaN 1  Inf 0  zero rows 0 of 2" in told.output
    assert json.loads(run("show", str(path), "--all", "--json").stdout)["statistics"]["left_out"] == 0
    data = bytearray(path.read_bytes())
    data[data.index(states.data)] ^= 1
    path.write_bytes(data)
    assert run("show", str(path)).exit_code == 0
    deep = run("show", str(path), "--deep")
    assert (deep.exit_code, "crc-mismatch: hidden_state" in deep.output) == (1, True)


def test_repair_says_what_it_made_and_stays_inside_the_roots(tmp_path: Path, run: Callable[..., Result]) -> None:
    path, out = tmp_path / "shards" / "data_0.ckpt", tmp_path / "shards" / "mended.ckpt"
    files.save(path, {"input_ids": T("int64", (3,))})
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    outside = run("repair", str(path), "--out", str(tmp_path / "mended.ckpt"))
    assert outside.exit_code != 0 and "outside the configured roots" in outside.output
    done = run("repair", str(path), "--out", str(out))
    assert (done.exit_code, done.output) == (0, f"{out}: tensors: 1, {len(data):,} bytes, 20 made anew\n")
    assert out.read_bytes() == data
    again = run("repair", str(path), "--out", str(out))
    assert again.exit_code != 0 and "nothing is overwritten" in again.output
