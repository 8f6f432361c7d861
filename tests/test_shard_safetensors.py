"""safetensors at the edge of the format (case T5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.shards.audit.look import look
from backend.agent.shards.show import show
from tests.cases import torchfiles as files
from tests.shardlooks import bytes_at, codes

if TYPE_CHECKING:
    from pathlib import Path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


IDS, STATES = entry("I64", [5], 0, 40), entry("BF16", [5, 4, 8], 40, 360)
FP8 = {"h": entry("F8_E4M3", [5, 4, 8], 0, 160), "s": entry("F32", [5, 1, 1], 160, 180)}
SMALL = {"a": entry("F32", [], 0, 4), "b": entry("BF16", [0, 8], 4, 4), "c": entry("BOOL", [3], 4, 7)}
ODD = {"a": {"dtype": "I64", "shape": [True], "data_offsets": [0, 8]}}
NEW = {"x": entry("F8_E8M0", [4], 0, 4), "y": entry("F4", [8], 4, 8), "z": entry("Q9_NEW", [8], 8, 24)}
TWICE = b'{"a":{"dtype":"I64","shape":[5],"data_offsets":[0,40]},"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}'


@pytest.mark.parametrize(
    ("header", "data", "how", "tensors", "ok", "found"),
    [
        ({"token_ids": IDS, "hidden_states": STATES}, 360, {}, 2, True, []),
        ({"__metadata__": {}, "hidden_states": STATES, "token_ids": IDS}, 360, {}, 2, True, []),
        ({"__metadata__": {"format": "pt"}}, 0, {}, 0, True, []),
        (b'{},"__metadata__":{"key":"value"}}', 0, {}, 0, False, ["bad-header"]),
        ({"__metadata__": {"layers": 3}, "a": IDS}, 40, {}, 1, True, ["bad-metadata"]),
        ({"token_ids": IDS, "hidden_states": STATES}, 360, {"pad": 64}, 2, True, []),
        (SMALL, 7, {}, 3, True, []),
        (FP8, 180, {}, 2, True, []),
        (NEW, 24, {}, 3, True, ["unknown-type", "unknown-type"]),
        ({"token_ids": IDS, "hidden_states": STATES}, 359, {}, 2, False, ["truncated"]),
        ({"token_ids": IDS, "hidden_states": STATES}, 368, {}, 2, False, ["trailing-bytes"]),
        (TWICE, 40, {}, 0, False, ["duplicate-key"]),
        ({"a": IDS, "b": entry("I64", [5], 8, 48)}, 48, {}, 2, False, ["overlap"]),
        ({"a": IDS, "b": entry("I64", [5], 48, 88)}, 88, {}, 2, False, ["hole"]),
        ({"a": IDS}, 40, {"length": 1 << 41}, 0, False, ["truncated"]),
        ({"a": entry("BF16", [1 << 40, 1 << 40], 0, 40)}, 40, {}, 1, False, ["shape-overflow"]),
        ({"a": entry("BF16", [5], 0, 40)}, 40, {}, 1, False, ["storage-size"]),
        (ODD, 8, {}, 0, False, ["bad-entry", "trailing-bytes"]),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, {}, 0, False, ["bad-header"]),
        (b'{"a":' + b"9" * 5000 + b"}", 0, {}, 0, False, ["bad-header"]),
        (b"{} trailing", 0, {}, 0, False, ["bad-header"]),
    ],
)  # fmt: skip
def test_safetensors(
    tmp_path: Path, header: Any, data: int, how: dict[str, int], tensors: int, ok: bool, found: list[str]
) -> None:
    path = tmp_path / "hs_0.safetensors"
    files.save_safetensors(path, header, bytes(data), **how)
    result = show(str(path))
    assert (result["format"], result["tensors"], result["ok"], codes(result)) == (
        "safetensors",
        tensors,
        ok,
        found,
    )


def test_safetensors_rows(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    files.save_safetensors(path, {"__metadata__": {"a\x1b[1m": "b\n"}, **NEW}, bytes(range(24)))
    result = show(str(path))
    assert [(e["dtype"], e["bytes"]) for e in result["entries"]] == [
        ("float8_e8m0fnu", 4),
        ("F4", 4),
        ("Q9_NEW", 16),
    ]
    assert bytes_at(path, result["entries"][1]) == bytes(range(4, 8))
    assert result["metadata"] == {"a": "b"}


def test_a_git_lfs_pointer_tells_the_real_size(tmp_path: Path) -> None:
    path = tmp_path / "hs_15.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 135000000\n")
    assert "135,000,000 bytes" in show(str(path))["notes"][0]["text"]


@pytest.mark.parametrize("size", [39, 41, 48])
def test_a_span_that_does_not_fit_its_shape_is_not_read_as_numbers(tmp_path: Path, size: int) -> None:
    path = tmp_path / "hs_0.safetensors"
    files.save_safetensors(path, {"token_ids": {"dtype": "I64", "shape": [5], "data_offsets": [0, size]}}, bytes(size))
    assert not show(str(path))["entries"][0]["whole"]
    found = look(str(path), False, lambda: None)
    assert "storage-size" in [code for code, _, _ in found["notes"]] and found["ids"]["least"] is None
