"""Looking into shards: views, containers, safetensors, damage, and how little is read."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from backend.agent.shards import source
from backend.agent.shards.show import show
from backend.wire import MAX_LINE_BYTES
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Call, Storage, T
from tests.shardlooks import H, L, bytes_at, codes, row, sample, shown

if TYPE_CHECKING:
    from pathlib import Path


def test_a_plain_shard(tmp_path: Path) -> None:
    held = Storage("bfloat16", L * H, bytes(range(80)))
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H), held)))
    assert (result["format"], result["ok"], result["tensors"], result["truncated"]) == (
        "torch zip",
        True,
        3,
        False,
    )
    assert result["logical_bytes"] == result["stored_bytes"] == 160
    entry = row(result, "hidden_state")
    assert (entry["shape"], entry["dtype"], entry["bytes"], entry["storage"]) == (
        [1, L, H],
        "bfloat16",
        80,
        "2",
    )
    assert (entry["stride"], entry["contiguous"], entry["whole"]) == ([L * H, H, 1], True, True)
    assert bytes_at(tmp_path / "data_0.ckpt", entry) == held.data
    assert result["notes"] == []


# T1: views


def test_a_slice_saved_with_all_of_its_batch(tmp_path: Path) -> None:
    batch = Storage("bfloat16", 1000 * H)
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H), batch, offset=40 * H)))
    assert (row(result, "hidden_state")["bytes"], result["stored_bytes"]) == (80, 16000 + 80)
    assert codes(result, "warning") == ["oversized-storage"]
    assert "200 times" in result["notes"][0]["text"]


def test_packed_tensors_share_one_storage_that_counts_once(tmp_path: Path) -> None:
    packed, step = Storage("bfloat16", L * 4 * H), (L * 4 * H, 4 * H, 1)
    aux = T("bfloat16", (1, L, 3 * H), packed, 0, step)
    result = shown(tmp_path, sample(aux_hidden_state=aux, hidden_state=T("bfloat16", (1, L, H), packed, 3 * H, step)))
    assert result["stored_bytes"] == 80 + L * 4 * H * 2
    assert (result["ok"], codes(result)) == (True, ["shared-storage"])
    aux_row, last_row = row(result, "aux_hidden_state"), row(result, "hidden_state")
    assert last_row["offset"] - aux_row["offset"] == 3 * H * 2


def test_an_expanded_tensor_allocates_nothing(tmp_path: Path) -> None:
    one = Storage("bfloat16", H)
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, 1 << 33, H), one, 0, (0, 0, 1))))
    entry = row(result, "hidden_state")
    assert (entry["bytes"], entry["shape"], entry["contiguous"]) == (
        (1 << 33) * H * 2,
        [1, 1 << 33, H],
        False,
    )
    assert result["stored_bytes"] == 80 + H * 2
    assert "repeated" in entry["note"]


def test_a_view_that_ends_outside(tmp_path: Path) -> None:
    held = Storage("bfloat16", L * H)
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H), held, offset=1)))
    assert (result["ok"], row(result, "hidden_state")["whole"]) == (False, False)
    assert result["notes"][0]["code"] == "view-outside-storage"
    assert "1 element beyond" in result["notes"][0]["text"]


def test_a_transposed_tensor_is_not_contiguous_and_no_fault(tmp_path: Path) -> None:
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H), None, 0, (L * H, 1, L))))
    assert (row(result, "hidden_state")["contiguous"], result["notes"]) == (False, [])


def test_one_storage_under_two_types(tmp_path: Path) -> None:
    both = Storage("complex64", 4)
    halves = [T("float32", (4,), both, 0, (2,)), T("float32", (4,), both, 1, (2,))]
    result = shown(tmp_path, [T("complex64", (4,), both), *halves])
    assert [(e["dtype"], e["shape"]) for e in result["entries"]] == [("complex64", [4])] + [("float32", [4])] * 2
    assert codes(result) == ["two-types"]


# T3: containers


def test_lists_tuples_and_nested_dictionaries(tmp_path: Path) -> None:
    layers = shown(tmp_path, sample(hidden_states=[T("bfloat16", (L, H)) for _ in range(4)]))
    assert [e["key"] for e in layers["entries"]][2:] == [f"hidden_states[{i}]" for i in range(4)]
    deep = {
        "aux": {"low": T("bfloat16", (L, H)), "high": T("bfloat16", (L, H))},
        "last": T("bfloat16", (L, H)),
    }
    nested = shown(tmp_path, (T("int64", (L,)), T("int64", (L,)), deep))
    assert [e["key"] for e in nested["entries"]] == [
        "[0]", "[1]", '[2]["aux"]["low"]', '[2]["aux"]["high"]', '[2]["last"]',
    ]  # fmt: skip


def test_fp8_and_its_scales(tmp_path: Path) -> None:
    result = shown(tmp_path, {"hidden_states": T("float8_e4m3fn", (L, 4, H)), "scales": T("float32", (L, 1, 1))})
    states = row(result, "hidden_states")
    assert (states["dtype"], states["bytes"], states["whole"]) == ("float8_e4m3fn", L * 4 * H, True)
    assert result["ok"]


def test_values_are_shown_without_what_a_terminal_would_obey(tmp_path: Path) -> None:
    odd = {"conversation_id": "chat/..\x1b[31m\n7", "n": 5, "none": None, "ok": True, "x": 0.5, "empty": []}
    result = shown(tmp_path, sample(**odd, scalar=T("int64", ()), zero=T("bfloat16", (0, H))))
    assert (result["tensors"], result["ok"]) == (4, True)
    assert {v["key"]: v["text"] for v in result["values"]} == {
        "conversation_id": "chat/.. 7", "n": "5", "none": "None", "ok": "True", "x": "0.5",
        "empty": "empty list",
    }  # fmt: skip
    assert (row(result, "zero")["bytes"], row(result, "scalar")["shape"]) == (0, [])


def test_keys_that_would_collide_are_told_apart(tmp_path: Path) -> None:
    ids, last = T("int64", (L,)), T("bfloat16", (1, H))
    odd = {
        0: ids,
        (1, "a"): ids,
        None: ids,
        "a.b": last,
        "a": {"b": last},
        "": last,
        "None": last,
        "a\x1b[2J": last,
    }
    result = shown(tmp_path, odd)
    keys = [entry["key"] for entry in result["entries"]]
    assert len(set(keys)) == len(keys) == 8
    assert keys[:6] == ["[0]", '[(1, "a")]', "[None]", "a.b", 'a["b"]', '[""]']
    assert all(key.isprintable() for key in keys)


def test_ordered_dictionary_bare_tensor_and_parameter(tmp_path: Path) -> None:
    ordered = shown(tmp_path, Call("collections", "OrderedDict", ([["w", T("bfloat16", (2, H))]],)))
    assert (ordered["entries"][0]["key"], ordered["ok"]) == ("w", True)
    bare = shown(tmp_path, T("bfloat16", (L, H)))
    assert (bare["entries"][0]["key"], bare["entries"][0]["shape"]) == ("(root)", [L, H])
    hooks = Call("collections", "OrderedDict")
    parameter = shown(tmp_path, {"p": Call("torch._utils", "_rebuild_parameter", (T("float32", (3,)), True, hooks))})
    assert parameter["entries"][0]["note"] == "parameter"


def test_no_checksum_is_no_checksum_error(tmp_path: Path) -> None:
    result = shown(tmp_path, sample(), archive="archive", crc=False)
    assert (result["tensors"], result["notes"]) == (2, [])


# cost


@pytest.fixture
def pread_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = os.pread

    def counted(fd: int, size: int, at: int) -> bytes:
        data = real(fd, size, at)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(source.os, "pread", counted)
    return sizes


def test_heads_only_whatever_the_size(tmp_path: Path, pread_bytes: list[int]) -> None:
    path = tmp_path / "data_0.pt"
    files.save_sparse(path, [T("bfloat16", (1, 1 << 21, 3 * 7168)), T("int64", (1 << 21,)), T("bfloat16", (7168,))])
    assert path.stat().st_size > 80 << 30
    result = show(str(path))
    assert [e["shape"][-1] for e in result["entries"]] == [3 * 7168, 1 << 21, 7168]
    assert sum(pread_bytes) < 64 * 1024
    assert codes(result) == ["sparse"] * 3
    assert result["notes"][0]["text"].endswith("were never written: they read as zeros")


def test_a_big_cut_file_is_read_no_further(tmp_path: Path, pread_bytes: list[int]) -> None:
    path = tmp_path / "data_0.pt"
    files.save_sparse(path, [T("bfloat16", (1 << 32,)), T("int64", (9,))])
    size = path.stat().st_size
    os.truncate(path, size - 300)
    assert f"{size - 300} of {size} bytes" in show(str(path))["notes"][0]["text"]
    assert sum(pread_bytes) < 64 * 1024


def test_many_tensors_fit_one_message(tmp_path: Path) -> None:
    result = shown(tmp_path, {f"model.layers.{i}.weight": T("bfloat16", (1,)) for i in range(5000)})
    assert (result["tensors"], result["truncated"], result["ok"]) == (5000, True, True)
    assert len(json.dumps(result)) < MAX_LINE_BYTES
    assert len(result["entries"]) > 500


@pytest.mark.torch
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_agrees(tmp_path: Path, mmap: bool) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "data_0.ckpt"
    base = torch.arange(60, dtype=torch.float32)
    made = {
        "input_ids": torch.arange(7),
        "half": torch.ones(1, 5, 8, dtype=torch.bfloat16),
        "fp8": torch.ones(4, 3).to(torch.float8_e4m3fn),
        "view": base.view(3, 20)[:, 4:9],
        "turned": base.view(6, 10).t(),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 8),
        "list": [torch.zeros(2), {"deep": torch.ones(3, dtype=torch.bool)}],
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "words": torch.ones(3, dtype=torch.uint16),
    }
    torch.save(made, path)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    flat = {k: v for k, v in loaded.items() if k != "list"}
    flat |= {"list[0]": loaded["list"][0], 'list[1]["deep"]': loaded["list"][1]["deep"]}
    result = show(str(path))
    assert {e["key"] for e in result["entries"]} == set(flat)
    for found in result["entries"]:
        tensor = flat[found["key"]]
        assert found["shape"] == list(tensor.shape), found
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch."), found
        assert found["stride"] == list(tensor.stride()), found
        assert found["contiguous"] == tensor.is_contiguous(), found
        if tensor.numel() and tensor.is_contiguous():
            raw = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bytes_at(path, found) == raw, found
    assert result["ok"], result["notes"]
