"""The export for speculators: every row is right, and the folder is there whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.durable import DiskFull
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.extraction.formats import speculators
from backend.extraction.prepare.permutation import shuffled
from tests.exporting import check_rows, export, shards, start
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
SAMPLES = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("made")
    return folder / "shards", shards(folder, SAMPLES)


@pytest.fixture
def source(made: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """Give the test a copy of the shards that it may damage."""
    return shutil.copytree(made[0], tmp_path / "shards")


def read_arrow(out: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    with pa.OSFile(str(out / "data-00000-of-00001.arrow")) as file, pa.ipc.open_stream(file) as stream:
        return list(stream.read_all().to_pylist())


@needs_pyarrow
@pytest.mark.parametrize("words", [(), ("--order", "shuffled", "--seed", "5")])
def test_every_row_is_right(words: tuple[str, ...], made: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    source, records = made
    out = tmp_path / "out"
    assert export("speculators", source, out, "--draft-vocab-size", 100, *words) == 0
    found = check_rows(out, records, EmbeddedEngine())
    assert found["rows"] == (shuffled(SAMPLES, 5) if words else list(range(SAMPLES)))
    rows = read_arrow(out)
    assert rows == [
        {
            "input_ids": records[n]["input_ids"],
            "loss_mask": records[n]["loss_mask"],
            "seq_len": len(records[n]["input_ids"]),
        }
        for n in found["rows"]
    ]
    counts = np.zeros(4096, np.int64)
    for record in records:
        for token, trained in zip(record["input_ids"], record["loss_mask"], strict=True):
            counts[token] += trained
    chosen = sorted(sorted(range(4096), key=lambda token: (-counts[token], token))[:100])
    assert (np.load(out / "d2t-100.npy") + np.arange(100)).tolist() == chosen
    assert np.flatnonzero(np.load(out / "t2d-100.npy")).tolist() == chosen
    assert found["draft_vocab_covers"] == round(counts[chosen].sum() / counts.sum(), 6)
    assert not list(tmp_path.glob(".*")) and not list(out.glob(".*")), "nothing hidden is left"


@needs_pyarrow
def test_an_export_that_is_there_is_left_alone_and_another_refused(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export("speculators", made[0], out) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert export("speculators", made[0], out) == 0
    assert export("speculators", made[0], out, "--order", "shuffled") == 1
    assert "is not this export" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@needs_pyarrow
def test_kills_at_random_moments_cost_nothing(tmp_path: Path) -> None:
    records = shards(tmp_path, 150)
    out, part, chance = tmp_path / "out", tmp_path / ".out.part" / "hidden_states", random.Random(4)
    for _ in range(3):
        there = len(list(part.glob("hs_*"))) if part.exists() else 0
        goal = there + chance.randint(1, 50)
        with start("speculators", tmp_path / "shards", out) as process:
            until(lambda goal=goal: out.exists() or (part.exists() and len(list(part.glob("hs_*"))) >= goal), 30)
            process.send_signal(signal.SIGKILL)
        assert out.exists() or not list(tmp_path.glob("out*"))
    kept = {path.name: path.stat().st_ino for path in part.glob("hs_*")} if part.exists() else {}
    assert export("speculators", tmp_path / "shards", out) == 0
    assert {name: (out / "hidden_states" / name).stat().st_ino for name in kept} == kept, "what was done stays"
    check_rows(out, records, EmbeddedEngine())


@needs_pyarrow
def test_a_stop_ends_between_rows_and_the_same_command_goes_on(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rows = tmp_path / "out", []
    real = speculators.SpeculatorsExport._row

    def row(self: Any, number: int, *rest: Any) -> None:
        real(self, number, *rest)
        rows.append(number)
        if number == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(speculators.SpeculatorsExport, "_row", row)
    assert export("speculators", made[0], out) == 128 + signal.SIGTERM
    assert not out.exists()
    assert export("speculators", made[0], out, "--draft-vocab-size", 9) == 1, "another export may not go on there"
    assert export("speculators", made[0], out) == 0
    assert rows == list(range(SAMPLES))


@needs_pyarrow
@pytest.mark.parametrize("where", ["pwrite_all", "reserve"])
def test_a_full_disk_is_said_and_the_same_command_goes_on(
    where: str,
    made: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: Iterator[int] = iter(range(10**6))
    real = getattr(speculators, where)

    def full(*args: object) -> None:
        if next(calls) == 10:
            raise DiskFull("No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(speculators, where, full)
        assert export("speculators", made[0], tmp_path / "out") == 1
    assert "the disk is full" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not [name for name in os.listdir(tmp_path / ".out.part/hidden_states") if name.startswith(".")]
    assert export("speculators", made[0], tmp_path / "out") == 0
    check_rows(tmp_path / "out", made[1], EmbeddedEngine())


@needs_pyarrow
def test_a_disk_without_the_room_is_refused_before_the_first_row(
    made: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(speculators.os, "statvfs", lambda _: os.statvfs_result((*room[:4], 10, *room[5:])))
    assert export("speculators", made[0], tmp_path / "out") == 1
    assert "bytes more" in capsys.readouterr().err
    assert not list((tmp_path / ".out.part/hidden_states").iterdir())


@needs_pyarrow
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_shard_is_not_exported(
    damage: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source / "rows_0-2000" / "data_7.ckpt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(data if damage == "flip" else data[:-1])
    assert export("speculators", source, tmp_path / "out") == 1
    assert "data_7.ckpt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_pyarrow
def test_an_unfinished_extraction_is_exported_only_when_asked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = source / "data_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "state": "incomplete"}))
    journal = source / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:11], lines[11][:20]]))  # 10 samples and a torn line
    assert export("speculators", source, tmp_path / "out") == 1
    assert "--partial" in capsys.readouterr().err
    assert export("speculators", source, tmp_path / "out", "--partial") == 0
    assert json.loads((tmp_path / "out/export.json").read_bytes())["samples"] == 10


def test_without_pyarrow_it_says_what_to_install(
    made: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export("speculators", made[0], tmp_path / "out") == 1
    assert "pip install pyarrow" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "it is said before anything is written"


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export("specforge", tmp_path, "--draft-vocab-size", 10) == 1
    assert "is this a folder of our shards" in capsys.readouterr().err


@needs_pyarrow
@pytest.mark.parametrize("short_kib", [900, 150, 10])
def test_a_disk_that_fills_up_wherever_it_does(
    short_kib: int, made: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fill a real disk: among the rows, and among the files that are written after them."""
    assert export("speculators", made[0], tmp_path / "whole") == 0
    pages = sum(-(-path.stat().st_size // 4096) for path in (tmp_path / "whole").rglob("*") if path.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={max(64, pages * 4 - short_kib)}k"
    mount = ["mount", "-t", "tmpfs", "-o", size, "eightzeros-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    monkeypatch.setattr(speculators.SpeculatorsExport, "_enough_room", lambda _: None)
    try:
        assert export("speculators", made[0], disk / "out") == 1
        assert [path.name for path in disk.iterdir()] == [".out.part"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert export("speculators", made[0], disk / "out") == 0
        check_rows(disk / "out", made[1], EmbeddedEngine())
        assert [path.name for path in disk.iterdir()] == ["out"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
