"""Files of a known kind, recognised byte by byte: taken only where a full reading says the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from backend.agent.shards.audit.look import look
from backend.agent.shards.describe import describe
from backend.agent.shards.formats import alike, torchzip
from backend.agent.shards.formats.alike import Alike, told
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import torchzip as fmt
from backend.shardfmt.torchpickle import TensorSpec, pickle_of
from tests.cases import torchfiles as files
from tests.cases.torchfiles import T

if TYPE_CHECKING:
    from pathlib import Path

H = 8


def specs(tokens: int) -> list[TensorSpec]:
    return [
        TensorSpec("input_ids", "int64", (tokens,)),
        TensorSpec("aux_hidden_state", "bfloat16", (1, tokens, 3 * H)),
        TensorSpec("mask.bool", "bool", (tokens,)),
    ]


def write(path: Path, tokens: int, pickle: bytes = b"", crc: bool = True) -> Path:
    held = [
        (str(n), b"\x3f" * (s.numel * {"int64": 8, "bool": 1}.get(s.dtype, 2))) for n, s in enumerate(specs(tokens))
    ]
    files.save_pickle(path, pickle or pickle_of(specs(tokens)), held, crc=crc)
    return path


@pytest.fixture
def known(tmp_path: Path) -> Alike:
    """Have met one file of the kind."""
    met = Alike()
    source = Source(str(write(tmp_path / "data_0.ckpt", 7)))
    assert not met.read(source, Report())
    describe(source, alike=met)
    source.close()
    return met


def takes(known: Alike, path: Path) -> bool:
    """Say whether a file is recognised. If so the full reading must say the same and find no fault."""
    source = Source(str(path))
    try:
        quick, full = Report(), Report()
        if not known.read(source, quick):
            assert told(quick) == told(Report())
            return False
        torchzip.read(source, full)
        assert told(quick) == told(full) and not full.findings
        return True
    finally:
        source.close()


@pytest.mark.parametrize("crc", [True, False])
def test_files_of_a_kind_are_taken_in_every_size_and_under_every_name(tmp_path: Path, known: Alike, crc: bool) -> None:
    for tokens in (1, 7, 10, 11, 255, 256, 2730, 2731, 65535, 65536, 70001):
        for name in ("data_1.ckpt", f"data_{tokens}0000.pt", "x" * 200 + ".pt"):
            assert takes(known, write(tmp_path / name, tokens, crc=crc)), (tokens, name)


@pytest.mark.torch
def test_what_torch_itself_saves_is_taken_too(tmp_path: Path, known: Alike) -> None:
    torch = pytest.importorskip("torch", reason="needs torch in the test environment")
    for tokens in (3, 300, 70000):
        path = tmp_path / "data_5.ckpt"
        torch.save({s.key: torch.ones(s.shape, dtype=getattr(torch, s.dtype)) for s in specs(tokens)}, path)
        assert takes(known, path)


def test_whichever_byte_is_another_nothing_is_taken_that_a_full_reading_sees_otherwise(
    tmp_path: Path, known: Alike
) -> None:
    """A bit of every byte. Where no reading looks (values, the end of a record) the file stays alike."""
    path = write(tmp_path / "data_31.ckpt", 6)
    data = path.read_bytes()
    taken = set()
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))
            if takes(known, path):
                taken.add(at)
            file.seek(at)
            file.write(bytes([byte]))
    placed = fmt.plan("data_31", len(pickle_of(specs(6))), [("0", 48), ("1", 288), ("2", 6)])
    assert fmt.file_bytes(placed) == len(data)
    values = {at for record in placed[4:7] for at in range(record.data_at, record.data_at + record.size_bytes)}
    heads = {at for n in (0, 2, 3, 4, 5, 6) for at in range(placed[n].header_at, placed[n].data_at)}
    small = {at for n in (0, 2, 3) for at in range(placed[n].data_at, placed[n].data_at + placed[n].size_bytes)}
    sums, at = set(), placed[-1].next_at
    for number, record in enumerate(placed):  # a shallow reading holds no values against their checksums
        sums |= set(range(at + 16, at + 20)) if number not in (0, 2, 3) else set()
        at += len(fmt.central_entry(record, 0))
    assert values <= taken and not taken & (heads | small | set(range(placed[-1].next_at, len(data))) - sums)


def test_a_description_of_other_meaning_with_right_checksums_is_not_taken(tmp_path: Path, known: Alike) -> None:
    """Every byte of the pickle, so that only what it says can tell: sizes, strides, elements, opcodes, names."""
    good = pickle_of(specs(300))
    chance = random.Random(5)
    taken = 0
    for at, byte in enumerate(good):
        for other in {byte ^ 1, byte ^ 0x80, chance.randrange(256)} - {byte}:
            path = write(tmp_path / "data_9.ckpt", 300, good[:at] + bytes([other]) + good[at + 1 :])
            taken += takes(known, path)
    assert taken == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"M\x2c\x01t", b"J\x2c\x01\0\0t"),  # the same number, written longer: no other meaning
        (b"M\x2c\x01t", b"\x8a\x02\x2c\x01t"),
        (b"K\x01M\x2c\x01", b"\x88M\x2c\x01"),  # True for 1
        (b"K\x01M\x2c\x01", b"J\xff\xff\xff\xffM\x2c\x01"),
        (b"cpu", b"gpu"),
        (b"}q\x00(", b"}q\x00(NNu("),
    ],
)
def test_odd_descriptions_are_read_in_full(tmp_path: Path, known: Alike, old: bytes, new: bytes) -> None:
    good = pickle_of(specs(300))
    assert old in good
    path = write(tmp_path / "data_9.ckpt", 300, good.replace(old, new, 1))
    assert takes(known, path) == (new[:1] == b"J" and new[-1:] == b"t")


def test_only_whole_and_plain_files_are_learned_from(tmp_path: Path) -> None:
    tail, nested = tmp_path / "data_1.ckpt", tmp_path / "data_2.ckpt"
    write(tail, 9, pickle_of(specs(9)) + b"behind the end")
    files.save(nested, {"a": [T("int64", (4,))], "b": T("bfloat16", (1, 4, H))})
    met = Alike()
    for path in (tail, nested, tail, nested):
        source = Source(str(path))
        describe(source, alike=met)
        source.close()
    assert not takes(met, write(tmp_path / "data_3.ckpt", 9)) and not takes(met, nested)


def test_a_look_at_a_known_kind_is_the_look_at_any_file(tmp_path: Path, known: Alike) -> None:
    for tokens in (1, 40, 5000):
        path = write(tmp_path / "data_4.ckpt", tokens)
        for deep in (False, True):
            assert look(str(path), deep, lambda: None, known) == look(str(path), deep, lambda: None)
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in [code for code, _, _ in look(str(path), False, lambda: None, known)["notes"]]


def test_kinds_that_are_remembered_are_few(tmp_path: Path) -> None:
    met = Alike()
    for number in range(2 * alike.MAX_KINDS):
        path = tmp_path / f"data_{number}.ckpt"
        files.save_pickle(path, pickle_of([TensorSpec(f"k{number}", "int64", (3,))]), [("0", bytes(24))])
        source = Source(str(path))
        describe(source, alike=met)
        source.close()
    found = [takes(met, tmp_path / f"data_{number}.ckpt") for number in range(2 * alike.MAX_KINDS)]
    assert found == [True] * alike.MAX_KINDS + [False] * alike.MAX_KINDS
