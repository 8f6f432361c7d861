"""The parts of an export: the final norm, the vocabulary maps, and the files of torch."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.bfloat16 import bfloat16_words
from backend.extraction.formats.finalnorm import before_norm, final_norm
from backend.extraction.formats.torchfile import counts_file, tensors_file
from backend.extraction.formats.vocabulary import vocabulary_map
from backend.extraction.readshard import ShardError
from tests.exporting import check_before, export, shards, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
HIDDEN = 32


def weight(seed: int = 0) -> NDArray[np.float32]:
    return (0.5 + np.random.default_rng(seed).random(HIDDEN)).astype(np.float32)


def final_states(scale: NDArray[np.float32]) -> NDArray[np.uint16]:
    values = np.random.default_rng(1).normal(size=(20, HIDDEN)) * 30
    return bfloat16_words(values / np.sqrt((values**2).mean(axis=1, keepdims=True)) * scale)


def model(folder: Path, tensors: dict[str, tuple[str, NDArray[Any]]], model_type: str = "qwen3") -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": HIDDEN}))
    for number, key in enumerate(tensors):  # over several files, as large models are
        write_safetensors(folder / f"model-{number}.safetensors", {key: tensors[key]})
    return str(folder)


def norm_of(path: str, key: str = "", form: str = "auto", **config: Any) -> Any:
    folder: Any = SimpleNamespace(header={"engine": "sglang"}, config=config, hidden_size=HIDDEN)
    return final_norm(folder, path, key, form)


OTHERS = {
    "model.layers.0.input_layernorm.weight": ("F32", weight(5)),
    "model.layers.0.self_attn.q_norm.weight": ("F32", weight(6)),
    "visual.norm.weight": ("F32", weight(7)),
    "lm_head.weight": ("F32", weight(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["model.norm.weight", "language_model.model.norm.weight", "norm.weight"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_state_before_the_norm_gives_the_final_state_again(name: str, dtype: str, tmp_path: Path) -> None:
    w = weight()
    stored = {"F32": w, "F16": w.astype(np.float16), "BF16": bfloat16_words(w)}[dtype]
    norm = norm_of(model(tmp_path / "m", {**OTHERS, name: (dtype, stored)}))
    last = final_states(norm.scale)
    check_before(bfloat16_words(before_norm(last, norm, "s")), last, norm.scale)
    assert np.allclose(norm.scale, w, rtol=2**-8)


@pytest.mark.parametrize(
    ("model_type", "form"), [("gemma3_text", "auto"), ("qwen3_next", "auto"), ("other", "plus-one")]
)
def test_a_norm_of_one_plus_weight(model_type: str, form: str, tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model.norm.weight": ("F32", weight())}, model_type)
    norm = norm_of(path, form=form)
    last = final_states(weight() + np.float32(1))
    check_before(bfloat16_words(before_norm(last, norm, "s")), last, weight() + 1.0)
    with pytest.raises(ShardError, match="RMS"):
        before_norm(last, norm_of(path, form="plain"), "s")


def test_the_norm_of_another_model_is_found_out(tmp_path: Path) -> None:
    other = weight() * np.where(np.arange(HIDDEN) % 2, 0.5, 1.7).astype(np.float32)
    norm = norm_of(model(tmp_path / "m", {"model.norm.weight": ("F32", other)}))
    with pytest.raises(ShardError, match="--norm-key"):
        before_norm(final_states(weight()), norm, "data_3.ckpt")


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan])
def test_a_weight_that_cannot_be_divided_by_is_refused(bad: float, tmp_path: Path) -> None:
    w = weight()
    w[9] = bad
    with pytest.raises(ShardError, match="the first 9"):
        norm_of(model(tmp_path / "m", {"model.norm.weight": ("F32", w)}))


def test_a_norm_that_cannot_be_found_is_said(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="--model"):
        norm_of("")
    with pytest.raises(ShardError, match="no tensor is called so"):
        norm_of(model(tmp_path / "none", OTHERS))
    two = {"model.norm.weight": ("F32", weight()), "other.norm.weight": ("F32", weight(2))}
    path = model(tmp_path / "two", two)
    with pytest.raises(ShardError, match="model.norm.weight, other.norm.weight"):
        norm_of(path)
    assert np.array_equal(norm_of(path, "other.norm.weight").scale, weight(2))
    assert np.array_equal(norm_of("", "model.norm.weight", server={"model_path": path}).scale, weight())
    with pytest.raises(ShardError, match="hidden size is 32"):
        norm_of(model(tmp_path / "wide", {"model.norm.weight": ("F32", np.ones(64, np.float32))}))


def test_the_commonest_tokens_are_the_draft_s() -> None:
    counts = np.array([0, 5, 0, 9, 5, 1], np.int64)
    found = vocabulary_map(counts, 3)
    assert (found.d2t.tolist(), found.t2d.tolist()) == ([1, 2, 2], [False, True, False, True, True, False])
    assert found.covered == 19 / 20
    assert (vocabulary_map(counts, 5).d2t + np.arange(5)).tolist() == [0, 1, 3, 4, 5]
    for size in (0, 7):
        with pytest.raises(ValueError, match="the target has 6"):
            vocabulary_map(counts, size)


@needs_torch
@pytest.mark.torch
def test_torch_reads_the_files(tmp_path: Path) -> None:
    import torch

    d2t, t2d = np.arange(7, dtype=np.int64) * 1000, np.arange(9) % 2 == 0
    (tmp_path / "map.pt").write_bytes(tensors_file("map.pt", {"d2t": d2t, "t2d": t2d}))
    counts = {1: 2, 300: 70_000, 151_000: 2**40}
    (tmp_path / "freq.pt").write_bytes(counts_file("freq.pt", counts))
    for mmap in (False, True):
        found = torch.load(tmp_path / "map.pt", weights_only=True, mmap=mmap)
        assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
        assert (found["d2t"].tolist(), found["t2d"].tolist()) == (d2t.tolist(), t2d.tolist())
    assert torch.load(tmp_path / "freq.pt", weights_only=True) == counts


@needs_torch
@pytest.mark.torch
def test_specforge_s_map_lies_beside_the_shards(tmp_path: Path) -> None:
    import torch

    records = shards(tmp_path, 12)
    assert export("specforge", tmp_path / "shards") == 2, "how large the draft is must be said"
    assert export("specforge", tmp_path / "shards", "--draft-vocab-size", 50) == 0
    found = torch.load(tmp_path / "shards/vocab_mapping/vocab_mapping.pt", weights_only=True)
    chosen = (found["d2t"] + torch.arange(50)).tolist()
    assert (len(chosen), torch.nonzero(found["t2d"]).flatten().tolist()) == (50, chosen)
    trained = {t for r in records for t, m in zip(r["input_ids"], r["loss_mask"], strict=True) if m}
    assert len(set(chosen) & trained) == min(50, len(trained))
