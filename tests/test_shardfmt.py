"""The layouts as facts: what we plan and pickle is what torch writes, and names mean what they should."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from backend.shardfmt import layout, torchzip
from backend.shardfmt.dtypes import count
from backend.shardfmt.torchpickle import TensorSpec, pickle_of
from tests.cases import torchfiles as files

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [
    TensorSpec("a", "int64", (5,)),
    TensorSpec("b", "bfloat16", (1, 300, 192)),
    TensorSpec("c", "float32", (2, 3, 4, 5)),
    TensorSpec("scalar", "bool", ()),
    TensorSpec("empty", "float16", (0, 8)),
    TensorSpec("long", "int64", (70_000,)),
]


@pytest.mark.torch
@pytest.mark.parametrize("number", [0, 1, 2, len(SHAPES), 300])
def test_the_pickle_is_torch_s_to_the_byte(tmp_path: Path, number: int) -> None:
    torch = pytest.importorskip("torch")
    specs = [spec._replace(key=f"{spec.key}{i}") for i in range(60) for spec in SHAPES][:number]
    path = tmp_path / "t.pt"
    torch.save({s.key: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in specs}, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("t/data.pkl") == pickle_of(specs)


@pytest.mark.torch
def test_every_offset_and_the_size_are_torch_s(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "data_1.ckpt"
    torch.save({s.key: torch.ones(s.shape, dtype=getattr(torch, s.dtype)) for s in SHAPES}, path)
    sizes = [(str(i), s.numel * torch.empty(0, dtype=getattr(torch, s.dtype)).itemsize) for i, s in enumerate(SHAPES)]
    placed = torchzip.plan("data_1", len(pickle_of(SHAPES)), sizes)
    with zipfile.ZipFile(path) as archive:
        assert [(r.name, r.header_at, r.size_bytes) for r in placed] == [
            (i.filename, i.header_offset, i.file_size) for i in archive.infolist()
        ]
    assert torchzip.file_bytes(placed) == path.stat().st_size
    assert all(record.data_at % 64 == 0 for record in placed)


@pytest.mark.torch
def test_zip64_files_over_4_gib_are_read_by_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "big.pt"
    files.save_sparse(path, [files.T("bfloat16", (1 << 31, 1)), files.T("int64", (7,)), files.T("uint8", (1 << 32,))])
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [tuple(tensor.shape) for tensor in loaded] == [(1 << 31, 1), (7,), (1 << 32,)]
    assert int(loaded[1].sum()) == 0
    with zipfile.ZipFile(path) as archive:
        assert {info.file_size for info in archive.infolist()} >= {1 << 32, 56}


def test_a_type_without_a_storage_class_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        pickle_of([TensorSpec("x", "float8_e4m3fn", (4,))])


@pytest.mark.parametrize(
    ("name", "index", "kind"),
    [
        ("data_0.ckpt", 0, "shard"),
        ("data_1999.pt", 1999, "shard"),
        ("data_7.ckpt.gz", 7, "shard"),
        ("hs_12.safetensors", 12, "shard"),
        ("data_01.ckpt", None, "shard"),
        ("data_0 (1).ckpt", None, "shard"),
        ("vocab_mapping.pt", None, "shard"),
        ("data_2.ckpt~", None, "leftover"),
        ("data_6.ckpt.tmp", None, "leftover"),
        (".data_7.ckpt.part", None, "leftover"),
        ("._data_0.ckpt", None, "leftover"),
        (".nfs000000000a1b2c3d00000001", None, "leftover"),
        ("hs_2.safetensors.lock", None, "leftover"),
        ("journal.jsonl", None, "other"),
        ("data_²5.txt", None, "other"),
    ],
)
def test_names(name: str, index: int | None, kind: str) -> None:
    assert (layout.sample_index(name), layout.file_kind(name)) == (index, kind)


def test_groups_and_our_own_temporary_names() -> None:
    assert layout.shard_path(0) == "rows_0-2000/data_0.ckpt"
    assert layout.shard_path(1999) == "rows_0-2000/data_1999.ckpt"
    assert layout.shard_path(2000) == "rows_2000-4000/data_2000.ckpt"
    assert layout.is_our_temporary(layout.temporary_name(41))
    assert not layout.is_our_temporary(".data_7.ckpt.part")
    assert layout.sample_index(layout.temporary_name(41)) is None


def test_numbers_in_names_are_counted() -> None:
    names = ["data_10.ckpt", "data_9.ckpt", "data_²5.ckpt", "Data_1.ckpt", "7", "x"]
    assert sorted(names, key=layout.natural_key) == [
        "7", "Data_1.ckpt", "data_9.ckpt", "data_10.ckpt", "data_²5.ckpt", "x",
    ]  # fmt: skip


def test_a_shape_that_no_machine_can_count() -> None:
    assert count((1 << 40, 1 << 40)) is None
    assert count((1 << 40, 0, 1 << 40)) == 0
    assert count(()) == 1
