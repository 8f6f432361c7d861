"""The final norm's weight, by which the last state is taken back to what it was before the norm.

RMS norm is x / rms(x) times the weight, so that post / weight has the direction of the state and an RMS of 1, and
norming it again gives post (facts: extraction, 2e). The RMS of 1 is also how a wrong weight is found out.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend.extraction.bfloat16 import to_float32
from backend.extraction.prepare.sources import PrepareError
from backend.extraction.prepare.tokenise import model_config
from backend.extraction.readshard import ShardError, ShardFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "qwen3_next", "qwen3_5", "qwen3_5_moe",
            "qwen3_5_text", "qwen3_5_moe_text")  # fmt: skip
"""Model types whose norm multiplies by 1 + weight (transformers' modeling files). The RMS check finds any other."""

FORMS = ("auto", "plain", "plus-one")
RMS_TOLERANCE = 0.05
_DTYPES: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_NOT_TEXT = ("layers.", "visual", "vision", "audio", "encoder", "mtp", "draft")


class FinalNorm(NamedTuple):
    """What post is divided by, float32 [H], and where it is from."""

    scale: NDArray[np.float32]
    source: str


def final_norm(folder: ShardFolder, model: str, key: str, form: str) -> FinalNorm:
    """Return the norm of the model that the shards are from. Raises ShardError saying what is missing or wrong."""
    if folder.header.get("engine") == "embedded":
        from backend.extraction.engines.embedded import EmbeddedEngine

        return _checked(EmbeddedEngine().final_norm.astype(np.float32), "the embedded engine", folder.hidden_size)
    model = model or str((folder.config.get("server") or {}).get("model_path") or "")
    if not os.path.isdir(model):
        raise ShardError(f"the final norm's weight is in the model's folder: name it with --model (not {model!r})")
    name, weight = _find(model, key)
    try:
        plus_one = form == "plus-one" or (form == "auto" and model_config(model).get("model_type") in PLUS_ONE)
    except PrepareError as error:
        raise ShardError(str(error)) from None
    said = f"{name} of {model}" + (" + 1" if plus_one else "")
    return _checked(weight + np.float32(1) if plus_one else weight, said, folder.hidden_size)


def before_norm(last: NDArray[np.uint16], norm: FinalNorm, sample: str) -> NDArray[np.float32]:
    """Return the last states, float32 [L, H], as before the norm but for each row's length.

    Raises ShardError where the rows' RMS is not 1: then the weight is not the one they were normed with.
    """
    before: NDArray[np.float32] = to_float32(last) / norm.scale
    rms = float(np.median(np.sqrt(np.mean(np.square(before), axis=1))))
    if not abs(rms - 1) <= RMS_TOLERANCE:
        raise ShardError(
            f"{sample}: divided by {norm.source}, the last states have an RMS of {rms:.3g} where 1 is due: this is "
            "not the weight they were normed with; check --model, --norm-key and --norm (plus-one as in Gemma)"
        )
    return before


def _checked(scale: NDArray[np.float32], source: str, hidden_size: int) -> FinalNorm:
    if scale.shape != (hidden_size,):
        raise ShardError(f"{source} has the shape {list(scale.shape)}; the shards' hidden size is {hidden_size}")
    bad = np.flatnonzero(~np.isfinite(scale) | (scale == 0))
    if bad.size:
        raise ShardError(
            f"{source} is 0 or not finite at {bad.size} places, the first {int(bad[0])}: what was before it is lost "
            "there, and these shards cannot be exported"
        )
    return FinalNorm(scale, source)


def _find(model: str, key: str) -> tuple[str, NDArray[np.float32]]:
    """Find the one final norm among the model's safetensors files."""
    found: dict[str, tuple[str, dict[str, Any], int]] = {}
    try:
        files = sorted(name for name in os.listdir(model) if name.endswith(".safetensors"))
        for path in (os.path.join(model, name) for name in files):
            header, data_at = _header(path)
            found.update({name: (path, header[name], data_at) for name in header if _wanted(name, key)})
    except (OSError, ValueError) as error:
        raise ShardError(f"{model}: its weights cannot be read: {error}") from None
    if len(found) != 1:
        said = f"it could be any of {', '.join(sorted(found)[:8])}" if found else "no tensor is called so"
        raise ShardError(f"{model}: the final norm's weight was not found ({said}); name it with --norm-key")
    name, (path, entry, data_at) = found.popitem()
    return name, _tensor(path, name, entry, data_at)


def _wanted(name: str, key: str) -> bool:
    if key:
        return name == key
    return (name == "norm.weight" or name.endswith((".norm.weight", ".final_layernorm.weight"))) and not any(
        word in name for word in _NOT_TEXT
    )


def _header(path: str) -> tuple[dict[str, Any], int]:
    from backend.shardfmt import safetensors

    with open(path, "rb") as file:
        size = safetensors.header_bytes(file.read(safetensors.LENGTH_BYTES))
        if size > safetensors.MAX_HEADER_BYTES:
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path}: no safetensors file")
    return header, safetensors.LENGTH_BYTES + size


def _tensor(path: str, name: str, entry: dict[str, Any], data_at: int) -> NDArray[np.float32]:
    dtype = entry.get("dtype")
    shape, offsets = entry.get("shape", ()), entry.get("data_offsets", ())
    if dtype not in _DTYPES or not (_numbers(shape) and _numbers(offsets)) or len(shape) != 1 or len(offsets) != 2:
        raise ShardError(f"{path}: {name} is {dtype} {shape}, which is not read here")
    words: NDArray[Any] = np.fromfile(path, np.dtype(_DTYPES[dtype]), shape[0], offset=data_at + offsets[0])
    return to_float32(words)


def _numbers(values: Sequence[Any]) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
