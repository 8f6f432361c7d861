"""Extractions as processes: whole, stopped, killed at any moment, and on a disk that fills up."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from backend.extraction import durable, extract, ledger, progress, sequential
from backend.extraction.engines import EngineError, States
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.shardfmt import layout
from backend.wire import Progress, from_dict
from tests.extracting import check_folder, finish, journal, start, write_corpus
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ENGINE = EmbeddedEngine()


def told(run_dir: Path) -> Progress:
    """Read progress.json, which is whole whenever it is there."""
    path = run_dir / "progress.json"
    return from_dict(Progress, json.loads(path.read_bytes())) if path.exists() else Progress(0.0, "")


def config(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / layout.CONFIG_NAME).read_bytes())
    return found


def run(corpus: Path, out: Path, *more: str) -> int:
    """Extract in this process."""
    return extract.main(["--corpus", str(corpus), "--out", str(out), *more])


def test_a_whole_extraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    records = write_corpus(corpus, 40)
    assert run(corpus, out, "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    tokens = sum(len(record["input_ids"]) for record in records)
    assert (result["state"], result["samples"], result["tokens"], result["shards"]) == ("done", 40, tokens, 40)
    assert result["bytes"] == sum(path.stat().st_size for path in out.glob("rows_*/*"))
    assert (result["resumed"], result["failed"], result["out"]) == (0, [], str(out))
    check_folder(out, records, ENGINE)
    about = config(out)
    assert (about["state"], about["samples"], about["tokens"], about["bytes"]) == (
        "complete",
        40,
        tokens,
        result["bytes"],
    )
    assert (about["capture_points"], about["hidden_size"], about["engine"]) == ([2, 4, 5], 64, "embedded")
    assert "entering layer k" in about["capture_convention"]
    assert sorted(path.name for path in out.iterdir()) == [
        ".corpus.index", ".eightzeros.lock", "data_config.json", "journal.jsonl", "rows_0-2000",
    ]  # fmt: skip


def test_a_second_run_finds_everything_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    records = write_corpus(corpus, 12)
    assert run(corpus, out, "--limit", "5") == 0
    assert (len(journal(out)), config(out)["state"]) == (5, "incomplete")
    before = {path: path.stat().st_mtime_ns for path in out.glob("rows_*/*")}
    assert run(corpus, out) == 0
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    capsys.readouterr()
    assert run(corpus, out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["resumed"], result["samples"]) == (12, 12)
    check_folder(out, records, ENGINE)


@pytest.mark.torch
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_the_shards(tmp_path: Path, mmap: bool) -> None:
    torch = pytest.importorskip("torch")
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    records = write_corpus(corpus, 3)
    assert run(corpus, out) == 0
    for index, record in enumerate(records):
        loaded = torch.load(out / layout.shard_path(index), weights_only=True, mmap=mmap)
        assert list(loaded) == list(layout.CANONICAL_KEYS)
        assert loaded["input_ids"].tolist() == record["input_ids"]
        words = torch.from_numpy(ENGINE.states(record["input_ids"]).aux.view("int16")).view(torch.bfloat16)
        assert torch.equal(loaded["aux_hidden_state"][0], words)
        assert loaded["hidden_state"].shape == (1, len(record["input_ids"]), 64)


def test_killed_at_any_moment_it_goes_on_and_has_each_sample_once(tmp_path: Path) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    records = write_corpus(corpus, 300)
    chance = random.Random(8)
    kept = 0
    for last in (False, False, False, False, False, True):
        process = start(corpus, out)
        seen = kept + chance.randint(1, 45)  # files, hidden or not: kills fall within groups and within commits
        until(lambda p=process, n=seen: p.poll() is not None or len(list(out.glob("rows_*/*"))) >= n)
        if last:
            until(lambda: journal(out))  # at least one kill comes after a commit
        process.kill()
        finish(process)
        now = len(journal(out))
        assert now >= kept
        assert len(list(out.glob("rows_*/.*.tmp"))) <= 17
        kept = now
    assert 0 < kept < len(records)
    code, _, errors = finish(start(corpus, out))
    assert (code, errors) == (0, "")
    check_folder(out, records, ENGINE, every=3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_it_commits_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    corpus, out, run_dir = tmp_path / "c.jsonl", tmp_path / "out", tmp_path / "run"
    run_dir.mkdir()
    records = write_corpus(corpus, 200)
    process = start(corpus, out, "--throttle", "40", "--json", run_dir=run_dir)
    until(lambda: len(list(out.glob("rows_*/*"))) > 5)
    process.send_signal(number)
    code, printed, _ = finish(process)
    result = json.loads(printed)
    assert (code, result["state"]) == (128 + number, "stopped")
    assert result["samples"] == len(journal(out)) == len(list(out.glob("rows_*/*"))) >= 5
    assert list(out.glob("rows_*/.*")) == []
    last = told(run_dir)
    assert (last.state, last.samples_done, last.samples_in_flight) == ("stopped", result["samples"], 0)
    assert config(out)["state"] == "incomplete"
    code, _, errors = finish(start(corpus, out))
    assert (code, errors) == (0, "")
    check_folder(out, records, ENGINE, every=10)


def test_progress_is_told_in_the_run_s_folder(tmp_path: Path) -> None:
    corpus, out, run_dir = tmp_path / "c.jsonl", tmp_path / "out", tmp_path / "run"
    run_dir.mkdir()
    records = write_corpus(corpus, 60)
    process = start(corpus, out, "--throttle", "30", run_dir=run_dir)
    middle = until(lambda: (p := told(run_dir)).samples_done > 0 and p.state == "running" and p)
    assert isinstance(middle, Progress)
    assert (middle.samples_total, middle.tokens_total) == (60, sum(len(r["input_ids"]) for r in records))
    assert middle.samples_per_s > 0
    assert middle.disk_free_bytes
    code, _, errors = finish(process)
    last = told(run_dir)
    assert (code, errors, last.state) == (0, "", "done")
    assert (last.samples_done, last.tokens_done) == (last.samples_total, last.tokens_total)
    assert last.bytes_written == last.bytes_total == sum(p.stat().st_size for p in out.glob("rows_*/*"))
    assert last.shard == "rows_0-2000/data_59.ckpt"
    assert sorted(path.name for path in run_dir.iterdir()) == ["progress.json"]


def test_two_cannot_write_one_folder(tmp_path: Path) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    write_corpus(corpus, 100)
    first = start(corpus, out, "--throttle", "20")
    until(lambda: list(out.glob("rows_*/*")))
    code, _, errors = finish(start(corpus, out))
    assert (code, f"another extraction (pid {first.pid})" in errors) == (1, True)
    first.kill()
    finish(first)


def test_nothing_starts_on_a_bad_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    corpus.write_text('{"input_ids": [1]}\n{"input_ids": [4096]}\n{"input_ids": [2]}\n')
    assert run(corpus, out, "--json") == 1
    printed = capsys.readouterr()
    assert f"{corpus}:2: token 4096 is outside the vocabulary (0 to 4095)" in json.loads(printed.out)["error"]
    assert not out.exists()
    assert run(corpus, out, "--json", "--skip-bad") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["skipped_lines"]) == (2, [2])
    corpus.write_text('{"input_ids": [1]}\n')
    assert run(corpus, out) == 1
    assert "another corpus" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--corpus", "c"], ["--corpus", "c", "--out", "o", "--limit", "0"],
                                  ["--corpus", "c", "--out", "o", "--throttle", "inf"]])  # fmt: skip
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert extract.main(argv) == 2
    assert "usage:" in capsys.readouterr().err


class Unlucky(EmbeddedEngine):
    """An engine that fails on some samples: 3 cannot be computed, 5 has an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def states(self, input_ids: Sequence[int]) -> States:
        self.calls += 1
        if self.calls == 4:
            raise EngineError("the server lost its rows")
        states = super().states(input_ids)
        if self.calls == 6:
            states.last[0, 0] = 0x7F80
        return states


def test_what_cannot_be_extracted_is_listed_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    records = write_corpus(corpus, 9)
    with monkeypatch.context() as patched:
        patched.setattr(extract, "open_engine", lambda _: Unlucky())
        assert run(corpus, out, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["state"], result["samples"]) == ("failed", 7)
    assert [(f["index"], f["id"]) for f in result["failed"]] == [(3, "s3"), (5, "s5")]
    assert "lost its rows" in result["failed"][0]["reason"]
    assert "1 NaN or infinite" in result["failed"][1]["reason"]
    assert config(out)["failed"] == result["failed"]
    assert run(corpus, out) == 0
    check_folder(out, records, ENGINE)


def test_a_full_disk_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the disk full from the tenth file on, for some looks: always run, whoever runs the tests."""
    corpus, out, run_dir = tmp_path / "c.jsonl", tmp_path / "out", tmp_path / "run"
    run_dir.mkdir()
    records = write_corpus(corpus, 25)
    calls, seen, real = [0], [], ledger.free_bytes

    def reserve(fd: int, at: int, size: int) -> None:
        calls[0] += 1
        if 10 <= calls[0] < 14:
            raise OSError(errno.ENOSPC, "No space left on device")

    def free(path: str) -> int:
        seen.append((told(run_dir).state, told(run_dir).message, len(journal(out)), len(list(out.glob("rows_*/.*")))))
        return real(path)

    monkeypatch.setenv(progress.RUN_DIR, str(run_dir))
    monkeypatch.setattr(sequential, "FULL_POLL_S", 0.01)
    monkeypatch.setattr(ledger, "free_bytes", free)
    monkeypatch.setattr(durable.os, "posix_fallocate", reserve)
    assert run(corpus, out) == 0
    state, message, committed, hidden = seen[-1]
    assert (state, committed, hidden) == ("paused", 9, 0)
    assert "disk full (No space left on device)" in message
    assert "goes on by itself" in message
    assert "there is room again" in capsys.readouterr().out
    assert (told(run_dir).state, told(run_dir).message) == ("done", "")
    check_folder(out, records, ENGINE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of 1 MiB, which needs root."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "eightzeros-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, small_disk: Path) -> None:
    corpus, out, run_dir = tmp_path / "c.jsonl", small_disk / "out", tmp_path / "run"
    run_dir.mkdir()
    records = write_corpus(corpus, 120)
    process = start(corpus, out, run_dir=run_dir)
    until(lambda: told(run_dir).state == "paused")
    assert "disk full" in told(run_dir).message
    assert len(journal(out)) == len(list(out.glob("rows_*/*.ckpt"))) > 10
    assert list(out.glob("rows_*/.*")) == []
    process.terminate()
    code, _, errors = finish(process)
    assert (code, errors, told(run_dir).state) == (128 + signal.SIGTERM, "", "stopped")
    again = start(corpus, out, run_dir=run_dir)
    until(lambda: told(run_dir).state == "paused")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, _, errors = finish(again)
    assert (code, errors, told(run_dir).state) == (0, "", "done")
    check_folder(out, records, ENGINE, every=20)
