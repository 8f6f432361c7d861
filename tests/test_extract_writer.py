"""The writer and the journal: torch's bytes, nothing half-written, and no folder that belongs to something else."""

from __future__ import annotations

import errno
import json
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction import durable
from backend.extraction.checksums import crc32_combine
from backend.extraction.durable import DiskFull
from backend.extraction.engines import States
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.extraction.journal import (
    Entry,
    FolderLock,
    Header,
    Journal,
    JournalError,
    forget_missing,
    remove_leftovers,
)
from backend.extraction.writer import BadStates, Sample, ShardWriter, shard_bytes
from backend.shardfmt import layout
from tests.extracting import read_shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

H, POINTS = 64, 3
HEADER = Header("/c.jsonl", "ab" * 32, 100, 3, "embedded", "model 1", H, [2, 4, 5])
ENGINE = EmbeddedEngine()


def sample(index: int, tokens: int = 5) -> Sample:
    ids = [(index * 7 + n) % 4096 for n in range(tokens)]
    return Sample(index, f"s{index}", ids, [n % 2 for n in range(tokens)], ENGINE.states(ids))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(str(tmp_path / layout.JOURNAL_NAME), HEADER)
    yield opened
    opened.close()


@pytest.fixture
def writer(tmp_path: Path, journal: Journal) -> ShardWriter:
    return ShardWriter(str(tmp_path), journal, H, POINTS)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("rows_*/*"))


@pytest.mark.torch
@pytest.mark.parametrize(("index", "tokens"), [(0, 1), (7, 5), (12345, 300)])
def test_a_shard_is_torch_s_to_the_byte_but_for_the_id(
    tmp_path: Path, writer: ShardWriter, index: int, tokens: int
) -> None:
    torch = pytest.importorskip("torch")
    written = writer.write(sample(index, tokens))
    writer.commit()
    ours = tmp_path / written.file
    theirs = tmp_path / ours.name
    torch.save(dict(torch.load(ours, weights_only=True, mmap=False)), theirs)
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        ids = [z.read(f"{ours.stem}/.data/serialization_id") for z in (a, b)]
        checks = [z.getinfo(f"{ours.stem}/.data/serialization_id").CRC.to_bytes(4, "little") for z in (a, b)]
    assert ours.read_bytes().replace(ids[0], ids[1]).replace(checks[0], checks[1]) == theirs.read_bytes()
    assert zipfile.ZipFile(ours).testzip() is None


def test_sizes_are_known_before_anything_is_written(tmp_path: Path, writer: ShardWriter) -> None:
    for index, tokens in ((0, 1), (3, 40), (2000, 777)):
        entry = writer.write(sample(index, tokens))
        assert entry.bytes == shard_bytes(index, tokens, H, POINTS)
    writer.commit()
    assert [(tmp_path / name).stat().st_size for name in files(tmp_path)] == [
        shard_bytes(0, 1, H, POINTS), shard_bytes(3, 40, H, POINTS), shard_bytes(2000, 777, H, POINTS),
    ]  # fmt: skip


def test_a_sample_is_hidden_until_its_group_is_committed(tmp_path: Path, writer: ShardWriter, journal: Journal) -> None:
    writer.write(sample(0))
    writer.write(sample(1))
    assert files(tmp_path) == ["rows_0-2000/.data_0.ckpt.tmp", "rows_0-2000/.data_1.ckpt.tmp"]
    assert journal.entries == {}
    assert [entry.index for entry in writer.commit()] == [0, 1]
    assert files(tmp_path) == ["rows_0-2000/data_0.ckpt", "rows_0-2000/data_1.ckpt"]
    assert sorted(journal.entries) == [0, 1]
    states = read_shard(tmp_path / "rows_0-2000/data_1.ckpt")
    assert np.array_equal(states["hidden_state"][0], sample(1).states.last)


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_nan_and_infinity_are_never_written(tmp_path: Path, writer: ShardWriter, word: int) -> None:
    good = sample(0)
    bad = good.states.last.copy()
    bad[3, 17] = word
    with pytest.raises(BadStates, match=r"last holds 1 NaN or infinite values, the first at \[3, 17\]"):
        writer.write(replace(good, states=States(good.states.aux, bad)))
    with pytest.raises(BadStates, match="aux has the shape"):
        writer.write(replace(good, states=States(good.states.aux[:-1], good.states.last)))
    assert files(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, writer: ShardWriter, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(durable.os, call, full)
        with pytest.raises(DiskFull):
            writer.write(sample(0))
    assert (files(tmp_path), writer.pending) == ([], 0)
    writer.write(sample(0))
    assert len(writer.commit()) == 1


def test_short_writes_and_passing_errors_are_overcome(
    tmp_path: Path, writer: ShardWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, [0]

    def unsteady(fd: int, data: Any, at: int) -> int:
        calls[0] += 1
        if calls[0] % 5 == 1:
            raise OSError(errno.EIO, "for a moment")
        return real(fd, data[:1000], at)

    monkeypatch.setattr(durable.time, "sleep", lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "pwrite", unsteady)
        writer.write(sample(0, 100))
        writer.commit()
    shard = read_shard(tmp_path / "rows_0-2000/data_0.ckpt")
    assert np.array_equal(shard["aux_hidden_state"][0], sample(0, 100).states.aux)


def test_an_error_that_stays_is_raised(writer: ShardWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [0]

    def broken(*_: Any) -> None:
        tries[0] += 1
        raise OSError(errno.EIO, "for ever")

    monkeypatch.setattr(durable.time, "sleep", lambda _: None)
    monkeypatch.setattr(durable.os, "pwrite", broken)
    with pytest.raises(OSError, match="for ever"):
        writer.write(sample(0))
    assert tries[0] == durable.TRIES


def test_a_journal_that_cannot_grow_stays_as_it_was(
    tmp_path: Path, writer: ShardWriter, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / layout.JOURNAL_NAME
    before = path.read_bytes()
    writer.write(sample(0))

    def half(fd: int, data: Any, at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        os.write(fd, data[:9])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "pwrite", half)
        with pytest.raises(DiskFull):
            writer.commit()
    assert (path.read_bytes(), journal.entries, writer.pending) == (before, {}, 1)
    assert [entry.index for entry in writer.commit()] == [0]
    assert len(path.read_bytes().split(b"\n")) == 3


def reopened(folder: Path, header: Header = HEADER) -> Journal:
    return Journal(str(folder / layout.JOURNAL_NAME), header)


def test_a_torn_last_line_is_cut_off(tmp_path: Path, writer: ShardWriter, journal: Journal) -> None:
    for index in range(3):
        writer.write(sample(index))
    writer.commit()
    path = tmp_path / layout.JOURNAL_NAME
    whole = path.read_bytes()
    for cut in (1, 30):
        path.write_bytes(whole[:-cut])
        again = reopened(tmp_path)
        assert sorted(again.entries) == [0, 1]
        again.append([journal.entries[2]])
        again.close()
        assert path.read_bytes() == whole


def test_a_torn_header_begins_anew(tmp_path: Path) -> None:
    (tmp_path / layout.JOURNAL_NAME).write_bytes(b'{"corpus": "/c')
    again = reopened(tmp_path)
    again.close()
    assert json.loads((tmp_path / layout.JOURNAL_NAME).read_bytes())["corpus_sha256"] == HEADER.corpus_sha256


OUTSIDE = b'{"index":0,"id":"x","file":"../../etc/x","bytes":1,"tokens":1,"crc32":1,"at":1}'


@pytest.mark.parametrize("damage", [bytes(40), b"[]", b'{"index": 1}', OUTSIDE])
def test_other_damage_is_named_with_its_line(tmp_path: Path, writer: ShardWriter, damage: bytes) -> None:
    writer.write(sample(0))
    writer.commit()
    with (tmp_path / layout.JOURNAL_NAME).open("ab") as file:
        file.write(damage + b"\n")
    with pytest.raises(JournalError, match="line 3"):
        reopened(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus_sha256": "00"}, "another corpus"),
        ({"engine": "sglang"}, "another engine"),
        ({"model": "model 2"}, "another model"),
        ({"capture_points": [2, 4, 6]}, "another capture points"),
        ({"schema": 2}, "another journal version"),
    ],
)
def test_another_corpus_or_engine_is_refused_in_words(
    tmp_path: Path, writer: ShardWriter, change: dict[str, Any], words: str
) -> None:
    writer.write(sample(0))
    writer.commit()
    with pytest.raises(JournalError, match=words):
        reopened(tmp_path, replace(HEADER, **change))
    reopened(tmp_path, replace(HEADER, corpus="/moved/c.jsonl")).close()


def test_a_folder_without_a_sample_belongs_to_nothing_yet(tmp_path: Path, journal: Journal) -> None:
    """A run that was refused before its first sample must not bind the folder to what it was refused for."""
    reopened(tmp_path, replace(HEADER, model="model 2")).close()
    assert json.loads((tmp_path / layout.JOURNAL_NAME).read_bytes())["model"] == "model 2"
    with pytest.raises(JournalError, match="another journal version"):
        reopened(tmp_path, replace(HEADER, schema=2))


def test_a_folder_begun_before_suffixes_could_be_chosen(tmp_path: Path, writer: ShardWriter, journal: Journal) -> None:
    writer.write(sample(0))
    writer.commit()
    path = tmp_path / layout.JOURNAL_NAME
    path.write_bytes(path.read_bytes().replace(b'"suffix":".ckpt",', b"", 1))
    reopened(tmp_path).close()
    with pytest.raises(JournalError, match="another file suffix"):
        reopened(tmp_path, replace(HEADER, suffix=".pt"))


def test_a_journal_cut_at_any_byte_keeps_every_whole_line_before(
    tmp_path: Path, writer: ShardWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash of the machine may leave: every cut is opened, gone on with, and holds what it held."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand of them take seconds, and nothing crashes here
    for index in range(4):
        writer.write(sample(index))
        writer.commit()
    path = tmp_path / layout.JOURNAL_NAME
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = reopened(tmp_path)
        kept = max(0, sum(end <= cut for end in ends) - 1)
        assert sorted(again.entries) == list(range(kept)), cut
        assert path.read_bytes() == whole[: ends[kept]], cut
        lost = [entry for index, entry in sorted(journal_of(whole).items()) if index >= kept]
        again.append(lost)
        again.close()
        assert path.read_bytes() == whole, cut


def journal_of(data: bytes) -> dict[int, Entry]:
    lines = [json.loads(line) for line in data.split(b"\n")[1:-1]]
    return {line["index"]: Entry(**line) for line in lines}


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (5, 3), (70_000, 1), (3, 1_000_003), (1 << 20, 1 << 16)])
def test_checksums_are_put_together(sizes: tuple[int, int]) -> None:
    first, second = (os.urandom(size) for size in sizes)
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_several_threads_write_at_once(tmp_path: Path, writer: ShardWriter) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda index: writer.write(sample(index, 30)), range(40)))
    assert sorted(entry.index for entry in writer.commit()) == list(range(40))
    for entry in written:
        data = (tmp_path / entry.file).read_bytes()
        assert (len(data), zlib.crc32(data)) == (entry.bytes, entry.crc32)


def test_a_nan_is_found_wherever_it_lies(writer: ShardWriter) -> None:
    tokens = 1500  # aux alone is longer than a piece of the check
    good = replace(sample(0), input_ids=[1] * tokens, loss_mask=[1] * tokens)
    for place in (0, (1 << 18) - 1, 1 << 18, tokens * 3 * H - 1):
        aux = np.zeros((tokens, 3 * H), np.uint16)
        aux.reshape(-1)[place] = 0xFFC0
        with pytest.raises(BadStates, match=rf"first at \[{place // (3 * H)}, {place % (3 * H)}\]"):
            writer.write(replace(good, states=States(aux, np.zeros((tokens, H), np.uint16))))


def test_missing_and_cut_files_are_forgotten(tmp_path: Path, writer: ShardWriter, journal: Journal) -> None:
    for index in range(3):
        writer.write(sample(index))
    writer.commit()
    (tmp_path / "rows_0-2000/data_0.ckpt").unlink()
    os.truncate(tmp_path / "rows_0-2000/data_2.ckpt", 100)
    assert [entry.index for entry in forget_missing(journal, str(tmp_path))] == [0, 2]
    assert sorted(journal.entries) == [1]


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    rows, other = tmp_path / "rows_0-2000", tmp_path / "theirs"
    rows.mkdir()
    other.mkdir()
    kept = [
        rows / ".data_7.ckpt.part",
        rows / "data_6.ckpt.tmp",
        rows / "data_5.ckpt",
        other / ".data_1.ckpt.tmp",
    ]
    for path in [*kept, rows / ".data_1.ckpt.tmp", rows / ".data_12.ckpt.tmp"]:
        path.touch()
    assert remove_leftovers(str(tmp_path)) == 2
    assert all(path.exists() for path in kept)
    assert len(list(rows.iterdir())) == 3


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    lock = FolderLock(str(tmp_path))
    with pytest.raises(JournalError, match=rf"another extraction \(pid {os.getpid()}\)"):
        FolderLock(str(tmp_path))
    lock.release()
    FolderLock(str(tmp_path)).release()
