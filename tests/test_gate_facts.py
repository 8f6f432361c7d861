"""Gates on what a stage will meet: the model's files, the bytes to come, the port, versions, memory, audits, others."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import gates, logind
from backend.agent.gates import model, predicted, program
from backend.agent.runs import RunStore
from backend.agent.shards.audit.main import main as audit
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.stages.extract import EMBEDDED_SHAPE
from backend.wire import Gate
from tests import auditing, extracting
from tests.runstore import a_store, machine, shell, spec

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_logind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logind, "RUNNING", ("no/such/folder",))


def one(store: RunStore | None = None, **requirements: Any) -> Gate:
    (gate,) = gates.check(machine(), requirements, None, store)
    return gate


def weights(path: Path, size: int = 64) -> Path:
    """Write a safetensors file that is whole."""
    head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, "__metadata__": {}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    return path


def a_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    names = [f"model-{number}-of-3.safetensors" for number in (1, 2, 3)]
    for name in names:
        weights(folder / name)
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_model_is_whole_or_what_is_missing_of_it_is_named(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "m")
    gate = one(model=str(folder))
    assert gate.ok is True and "3 weight files" in gate.detail and "whole" in gate.detail
    second = folder / "model-2-of-3.safetensors"
    os.truncate(second, second.stat().st_size - 1)
    (folder / "model-3-of-3.safetensors").unlink()
    gate = one(model=str(folder))
    size = second.stat().st_size
    assert gate.ok is False and gate.fix
    assert "1 of 3 weight files are not there: model-3-of-3.safetensors" in gate.detail
    assert f"model-2-of-3.safetensors has {size} of {size + 1} bytes" in gate.detail
    assert one(model=str(folder), dummy_weights=True).ok is True
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "its index cannot be read" in one(model=str(folder)).detail
    assert one(model=str(tmp_path / "absent")).ok is False


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b'{"w": 3}x', b"\x02" + bytes(7) + b"[]"]
)
def test_a_weight_file_that_is_none_is_not_whole(tmp_path: Path, data: bytes) -> None:
    folder = a_model(tmp_path / "m")
    (folder / "model-1-of-3.safetensors").write_bytes(data)
    assert one(model=str(folder)).ok is False


def test_a_name_is_looked_for_in_the_cache_that_the_stage_has(tmp_path: Path) -> None:
    a_model(tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / "abc")
    assert one(model="org/name").ok is False
    assert one(model="org/name", env={"HF_HOME": str(tmp_path / "hf")}).ok is True
    assert model.locate("org/other", {"HF_HOME": str(tmp_path / "hf")}) == ""


def test_the_bytes_of_an_extraction_are_foretold_and_hold(tmp_path: Path) -> None:
    engine = EmbeddedEngine()
    assert (engine.hidden_size, len(engine.capture_points)) == EMBEDDED_SHAPE
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    extracting.write_corpus(corpus, 12, 400)
    wants = {"out": str(out), "corpus": str(corpus), "limit": None, "shape": list(EMBEDDED_SHAPE), "server": ""}
    needed, words = predicted._extraction(wants, str(corpus), str(out))
    code, _, _ = extracting.finish(extracting.start(corpus, out))
    written = sum(path.stat().st_size for path in out.rglob("data_*.ckpt"))
    assert code == 0 and written <= needed <= 1.05 * written + 12 * predicted.FILE_BYTES
    assert "(counted)" in words
    assert predicted.committed_bytes(str(out)) == written
    assert predicted._extraction(wants, str(corpus), str(out))[0] < 12 * predicted.FILE_BYTES
    gate = one(predict={"out": str(tmp_path / "copy"), "shards": str(out)})
    assert gate.ok is True and "as the shards, and 5 %" in gate.detail


def test_a_manifest_counts_and_a_large_corpus_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus.jsonl"
    records = extracting.write_corpus(corpus, 2000, 60)
    tokens = sum(len(record["input_ids"]) for record in records)
    monkeypatch.setattr(predicted, "PROBE_BYTES", 4096)
    found = predicted._samples(str(corpus))
    assert "estimated" in found.source
    assert found.tokens == pytest.approx(tokens, rel=0.1) and found.samples == pytest.approx(2000, rel=0.1)
    said = {"corpus": {"file": "corpus.jsonl", "bytes": corpus.stat().st_size}, "samples": 9, "tokens": 10**14}
    (tmp_path / "manifest.json").write_text(json.dumps(said))
    wants: dict[str, Any] = {"out": str(tmp_path / "o"), "corpus": str(corpus), "shape": [64, 3]}
    gate = one(predict=wants)
    assert gate.ok is False and "100000000000000 tokens (its manifest) of 528 bytes" in gate.detail
    assert "11111111111111 tokens" in one(predict=dict(wants, limit=1)).detail
    unknown = one(predict=dict(wants, shape=None))
    assert unknown.ok is None and "nobody says the hidden size" in unknown.detail
    assert gates.check(machine(), {"predict": dict(wants, corpus="/nonexistent")}) == []  # the path is its own gate


def test_a_port_is_free_or_its_owner_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        taken.listen()
        gate = one(port=number)
        assert gate.ok is False and f"taken by process {os.getpid()}" in gate.detail
    assert one(port=number).ok is True


@pytest.mark.parametrize(
    ("spec", "ok", "said"),
    [
        ("msgspec>=0.18", True, "msgspec 0."),
        ("msgspec>=999", False, ">=999 is needed"),
        ("msgspec>=0.1,<0.2", False, "<0.2 is needed"),
        ("json>=1", None, "the version of json cannot be told"),
        ("msg spec", None, "is no package"),
    ],
)
def test_versions_of_packages(spec: str, ok: bool | None, said: str) -> None:
    gate = one(python=sys.executable, modules=[spec])
    assert gate.ok is ok and said in gate.detail, gate


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        ("0.5.17", "0.5.9", 1),
        ("2.0", "2", 0),
        ("1.0rc1", "1.0", -1),
        ("2.9.0+cu128", "2.9", 0),
        ("0.5.17.post1", "1", -1),
    ],
)
def test_versions_compare_by_their_numbers(one: str, other: str, order: int) -> None:
    assert (program.compare(one, other), program.compare(other, one)) == (order, -order)


def test_memory() -> None:
    assert one(ram_bytes=1).ok is True
    gate = one(ram_bytes=1 << 60)
    assert gate.ok is False and "1073741824.0 GiB needed" in gate.detail and gate.fix


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


def test_shards_that_were_not_audited_since_they_changed_are_not_trained_on(store: RunStore, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    path = auditing.write(folder, 0)
    assert "never audited" in one(store, audited=str(folder)).detail
    assert audit([str(folder)]) == 0
    gate = one(store, audited=str(folder))
    assert gate.ok is True and "without a fault: 1 files, heads and last rows read" in gate.detail
    (folder / "journal.jsonl").write_text("")
    gate = one(store, audited=str(folder))
    assert gate.ok is False and "committed since" in gate.detail
    (folder / "journal.jsonl").unlink()
    os.truncate(path, path.stat().st_size // 2)
    auditing.age(path)
    assert audit([str(folder), "--fresh"]) == 1
    gate = one(store, audited=str(folder))
    assert gate.ok is False and "truncated: 1" in gate.detail
    assert one(audited=str(folder)).ok is None  # nobody to ask


def test_another_run_of_the_stage_or_of_its_folder_is_in_the_way(store: RunStore, tmp_path: Path) -> None:
    assert one(store, others={"stage": "test", "out": str(tmp_path)}).detail == "none is active"
    store.start(spec("first-1", "sleep", "100", out_dir=str(tmp_path / "states")))
    same = one(store, others={"stage": "test", "out": ""})
    assert same.ok is False and "first-1 has been running for" in same.detail and "stop first-1" in same.fix
    inside = one(store, others={"stage": "", "out": str(tmp_path / "states" / "rows")})
    assert inside.ok is False and f"writes to {tmp_path}/states" in inside.detail
    beside = one(store, others={"stage": "", "out": str(tmp_path / "other")})
    assert (beside.ok, beside.detail) == (True, "beside it: first-1")
    store.start(shell("watch-1", "sleep 100", out_dir=str(tmp_path / "theirs"), adopted=True))
    assert one(store, others={"stage": "", "out": str(tmp_path / "theirs")}).ok is True  # it only watches
