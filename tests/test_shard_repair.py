"""Cut torch files that are mended in a copy, and those of which too much is lost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from backend.agent.shards import repair as repairs
from backend.agent.shards.repair import repair
from backend.agent.shards.show import show
from backend.wire import Refused
from tests.cases import torchfiles as files
from tests.cases.torchfiles import T

if TYPE_CHECKING:
    from pathlib import Path


def sample(path: Path) -> bytes:
    files.save(
        path, {"input_ids": T("int64", (5,)), "hidden_state": T("bfloat16", (1, 5, 8)), "none": T("int64", (0,))}
    )
    return path.read_bytes()


def whole_until(path: Path) -> int:
    """Return where the last storage ends: what must be there."""
    row = show(str(path))["entries"][1]
    return int(row["offset"] + row["bytes"])


def test_every_cut_behind_the_last_tensor_is_mended_to_the_byte(tmp_path: Path) -> None:
    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    data = sample(path)
    for size in range(whole_until(path), len(data), 13):
        path.write_bytes(data[:size])
        done = repair(str(path), str(out))
        assert out.read_bytes() == data
        assert (done["bytes"], done["lost_bytes"]) == (len(data), len(data) - size)
        assert path.read_bytes() == data[:size]
        out.unlink()
    assert sorted(os.listdir(tmp_path)) == ["data_0.ckpt"]


def test_a_cut_into_a_tensor_is_refused_and_named(tmp_path: Path) -> None:
    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    data = sample(path)
    path.write_bytes(data[: whole_until(path) - 1])
    with pytest.raises(Refused) as refused:
        repair(str(path), str(out))
    assert refused.value.code == "cannot-repair"
    assert "the end of hidden_state is lost" in refused.value.message
    assert not out.exists()


def test_whole_files_and_files_with_other_damage_are_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    data = sample(path)
    with pytest.raises(Refused) as refused:
        repair(str(path), str(out))
    assert refused.value.code == "whole"
    for damaged in (b"", bytes(9000), b"text\n", data[:100], data.replace(b"data/1", b"data/9", 1)):
        path.write_bytes(damaged)
        with pytest.raises(Refused) as refused:
            repair(str(path), str(out))
        assert refused.value.code == "cannot-repair", damaged[:20]
    assert os.listdir(tmp_path) == ["data_0.ckpt"]


def test_nothing_is_overwritten_not_even_by_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    path.write_bytes(sample(path)[:-1])
    out.write_text("other")
    for target in (out, path):
        with pytest.raises(Refused) as refused:
            repair(str(path), str(target))
        assert refused.value.code == "exists"
    monkeypatch.setattr(repairs.os.path, "lexists", lambda path: False)
    with pytest.raises(Refused) as refused:
        repair(str(path), str(out))
    assert (refused.value.code, out.read_text()) == ("exists", "other")
    assert sorted(os.listdir(tmp_path)) == ["data_0.ckpt", "mended.ckpt"]


def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    path.write_bytes(sample(path)[:-1])

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repairs.os, "pwrite", full)
    with pytest.raises(Refused, match="No space left"):
        repair(str(path), str(out))
    assert os.listdir(tmp_path) == ["data_0.ckpt"]


@pytest.mark.torch
@pytest.mark.parametrize("alignment", [64, 4096])
def test_torch_loads_the_copy_bit_for_bit(tmp_path: Path, alignment: int) -> None:
    torch = pytest.importorskip("torch", reason="needs torch in the test environment")
    config = pytest.importorskip("torch.utils.serialization").config

    path, out = tmp_path / "data_0.ckpt", tmp_path / "mended.ckpt"
    base = torch.randn(40, 8)
    made = {"ids": torch.arange(9), "state": base.bfloat16(), "fp8": base.to(torch.float8_e5m2), "view": base[3:5, 1:4]}
    with config.patch({"save.storage_alignment": alignment}):
        torch.save(made, path)
    data = path.read_bytes()
    for lost in (1, 50, 97, 98, 400, 900):
        path.write_bytes(data[:-lost])
        repair(str(path), str(out))
        assert (out.stat().st_size, show(str(out), deep=True)["notes"]) == (len(data), show(str(out))["notes"])
        for mmap in (False, True):
            loaded = torch.load(out, weights_only=True, mmap=mmap)
            assert all(
                torch.equal(loaded[key].view(torch.uint8), made[key].view(torch.uint8)) for key in ("state", "fp8")
            )
            assert torch.equal(loaded["ids"], made["ids"]) and torch.equal(loaded["view"], made["view"])
        out.unlink()
