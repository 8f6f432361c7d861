"""The prepare stage as a whole: what it writes, what it refuses, and that it leaves nothing half-done."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from backend.extraction.corpus import Corpus
from backend.extraction.main import main
from backend.extraction.prepare import sources
from backend.extraction.prepare.permutation import shuffled
from tests.extracting import journal
from tests.preparing import corpus, manifest, notes, prepare, prepared, talk, write_lines
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def talks(count: int, seed: int = 1) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        talk("q" * chance.randint(1, 40), f"{seed}.{n} " + "a" * chance.randint(1, 90), id=f"{seed}-{n}")
        for n in range(count)
    ]


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_lines(tmp_path / f"set{seed}.jsonl", talks(30 * seed, seed)) for seed in (1, 2)]


def test_every_source_is_counted_and_the_corpus_is_what_the_extraction_reads(two: list[Path], tmp_path: Path) -> None:
    found = prepared(tmp_path / "out", f"first={two[0]}", two[1])
    samples = corpus(tmp_path / "out")
    assert [(s["name"], s["records"], s["samples"]) for s in found["sources"]] == [("first", 30, 30), ("set2", 60, 60)]
    for source in found["sources"]:
        own = [sample for sample in samples if sample["source"] == source["name"]]
        assert source["tokens"] == sum(len(s["input_ids"]) for s in own)
        assert source["trained_tokens"] == sum(sum(s["loss_mask"]) for s in own)
        data = two[source["name"] == "set2"].read_bytes()
        assert (source["bytes"], source["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert found["corpus"]["sha256"] == hashlib.sha256((tmp_path / "out/corpus.jsonl").read_bytes()).hexdigest()
    assert sum(bucket["samples"] for bucket in found["lengths"]) == found["samples"] == len(samples)
    longest = max(len(s["input_ids"]) for s in samples)
    assert found["longest_tokens"] == longest <= found["lengths"][-1]["up_to"] < 2 * longest
    read = Corpus(str(tmp_path / "out/corpus.jsonl"), found["vocab_size"])
    assert [read.row(n).id for n in range(len(read))] == [sample["id"] for sample in samples]
    read.close()


def test_the_shuffle_is_the_seed_s_and_the_same_everywhere(two: list[Path], tmp_path: Path) -> None:
    assert shuffled(12, 0) == [8, 4, 2, 5, 3, 0, 7, 1, 10, 6, 11, 9]
    prepared(tmp_path / "given", "--order", "given", *two)
    given = [sample["id"] for sample in corpus(tmp_path / "given")]
    assert given == [f"{seed}-{n}" for seed in (1, 2) for n in range(30 * seed)]
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        prepared(tmp_path / name, "--seed", seed, *two)
    a, b, c = ((tmp_path / name / "corpus.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert [sample["id"] for sample in corpus(tmp_path / "a")] == [given[n] for n in shuffled(90, 7)]


def test_too_long_samples_are_cut_or_dropped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [talk("q", "a" * n) for n in (1, 100, 3)])
    cut = prepared(tmp_path / "cut", "--max-tokens", 50, path)
    assert (cut["samples"], cut["cut"], cut["longest_tokens"]) == (3, 1, 50)
    dropped = prepared(tmp_path / "drop", "--max-tokens", 50, "--too-long", "drop", path)
    assert (dropped["samples"], dropped["dropped"]) == (2, 1)
    assert [note["why"] for note in notes(tmp_path / "drop")] == ["122 tokens, over 50"]


def test_what_extraction_needs_is_what_extraction_writes(two: list[Path], tmp_path: Path) -> None:
    found = prepared(tmp_path / "out", "--hidden-size", 64, "--points", "2,4,5", *two)["extraction"]
    assert main(["--corpus", str(tmp_path / "out/corpus.jsonl"), "--out", str(tmp_path / "shards")]) == 0
    written = journal(tmp_path / "shards")
    assert found["bytes"] == sum(line["bytes"] for line in written)
    assert len(written) == 90 and found["fits"]


def test_a_disk_that_is_too_small_is_told_before_anything_starts(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prepared(tmp_path / "out", "--hidden-size", 10**9, "--shards-on", tmp_path / "not/yet/there", *two)[
        "extraction"
    ]
    assert not found["fits"] and found["disk"] == str(tmp_path)
    assert "IT DOES NOT FIT" in capsys.readouterr().out


def test_another_corpus_is_not_replaced_unasked(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prepared(out, *two)
    prepared(out, *two)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert prepare(out, two[0]) == 1
    assert "--replace" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert prepared(out, "--replace", two[0])["samples"] == 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{none}"], "No such file"),
        (["{one}", "{one}"], "is taken"),
        (["--tokenizer", "/none", "{one}"], "no such folder"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], said: str, two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(none=tmp_path / "none.jsonl", one=two[0]) for word in words]
    assert prepare(tmp_path / "out", *words) == 1
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_text_needs_a_tokenizer_and_ids_a_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "d.jsonl", [talk("q", "a"), {"input_ids": [1, 2], "loss_mask": [1, 1]}])
    assert main(["prepare", "--out", str(tmp_path / "out"), str(path)]) == 1
    said = capsys.readouterr().err
    assert f"{path}:1: " in said and "--tokenizer" in said and f"{path}:2: " in said and "--vocab-size" in said


def test_gzip_is_read_as_what_is_in_it(two: list[Path], tmp_path: Path) -> None:
    packed = tmp_path / "set1.jsonl.gz"
    packed.write_bytes(gzip.compress(two[0].read_bytes()))
    found = prepared(tmp_path / "out", packed)
    assert (found["samples"], found["sources"][0]["bytes"]) == (30, packed.stat().st_size)
    packed.write_bytes(packed.read_bytes()[:-50])
    assert prepare(tmp_path / "cut", packed) == 1


def test_parquet_without_pyarrow_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert prepare(tmp_path / "out", path) == 1
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
def test_parquet_is_read_like_lines(two: list[Path], tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "set1.parquet"
    parquet.write_table(pa.Table.from_pylist(talks(30, 1)), path)
    prepared(tmp_path / "lines", two[0])
    found = prepared(tmp_path / "rows", path)
    assert (tmp_path / "rows/corpus.jsonl").read_bytes() == (tmp_path / "lines/corpus.jsonl").read_bytes()
    assert found["sources"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes()[:-30])
    assert prepare(tmp_path / "cut", path) == 1


def test_a_stopped_preparation_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    line = json.dumps(talk("q", "a" * 2000)) + "\n"
    path.write_text(line * 100_000)
    out = tmp_path / "out"
    program = "import sys; from backend.extraction.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [
        sys.executable,
        "-c",
        program,
        "prepare",
        "--out",
        str(out),
        "--tokenizer",
        "bytes",
        "--keep-duplicates",
        str(path),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until(lambda: (out / ".corpus.spool.tmp").exists(), 20)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped" in said
    assert [name for name in os.listdir(out) if name != ".eightzeros.lock"] == []


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from backend.extraction.durable import DiskFull
    from backend.extraction.prepare import corpusfile

    def full(*_: object) -> None:
        raise DiskFull("No space left on device")

    monkeypatch.setattr(corpusfile, "pwrite_all", full)
    assert prepare(tmp_path / "out", write_lines(tmp_path / "d.jsonl", talks(5))) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert [name for name in os.listdir(tmp_path / "out") if name != ".eightzeros.lock"] == []


def test_json_is_the_manifest_alone_on_stdout(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "out", "--json", *two)
    assert json.loads(capsys.readouterr().out) == manifest(tmp_path / "out")


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_item_by_item(block: int, indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", block)
    items = [{"a": "é\u2028,]" * n, "n": [n, {"b": None}]} for n in range(30)]
    data = json.dumps(items, indent=indent, ensure_ascii=False).encode()
    assert list(sources.array_items(b"[", io.BytesIO(data[1:] + b"\n \n"))) == items
    assert list(sources.array_items(b"  [ ]", io.BytesIO(b""))) == []
    for bad in (data[:-1], data[:-5], data + b"x", data.replace(b"}", b"", 1), data[:-1] + b'{"c": 1}]', b"[,1]"):
        with pytest.raises(ValueError):
            list(sources.array_items(bad[:1], io.BytesIO(bad[1:])))


def test_a_damaged_array_is_refused_by_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(talks(9), indent=1)[:-40])
    assert prepare(tmp_path / "out", path) == 1
    assert f"{path}: after record 8" in capsys.readouterr().err
