"""A model's folder on this host: its configuration, its identity, and its output head, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend.extraction.bfloat16 import to_float32
from backend.extraction.engines import EngineRefused
from backend.extraction.modelshape import language_model, locate

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
TIED = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_MAX_HEADER_BYTES = 100 << 20
_PROBES, _PROBE_BYTES = 16, 4096
_BLOCK = 8192


class _Place(NamedTuple):
    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


def find(name: str) -> str:
    """Return the folder of a model: a path, or what the Hugging Face cache of this user has. Raises EngineRefused."""
    folder = locate(name)
    if not folder:
        raise EngineRefused(f"{name}: no config.json of this model on this host; name its folder with --model")
    return folder


def text_config(folder: str) -> dict[str, Any]:
    """Return the configuration of the language model, which a multimodal one keeps inside. Raises EngineRefused."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        text = language_model(found)
        return {"tie_word_embeddings": found.get("tie_word_embeddings", False), **text,
                "hidden_size": int(text["hidden_size"]), "vocab_size": int(text["vocab_size"])}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineRefused(f"{path}: no model configuration with hidden_size and vocab_size: {error!r}") from None


def digest(folder: str) -> str:
    """Return a name of the weights: of the configuration, and of sizes and samples of every weight file.

    Two checkpoints of one shape differ nearly everywhere, so that 16 places of 4 KiB a file tell them apart.
    """
    whole = hashlib.sha256()
    with open(os.path.join(folder, "config.json"), "rb") as file:
        whole.update(file.read())
    for name in _weight_files(folder):
        path = os.path.join(folder, name)
        size = os.path.getsize(path)
        whole.update(f"{name} {size}\n".encode())
        with open(path, "rb") as file:
            for number in range(_PROBES):
                file.seek(size * number // _PROBES)
                whole.update(file.read(_PROBE_BYTES))
    return "sha256-16:" + whole.hexdigest()[:16]


class Head:
    """The matrix that turns a last hidden state into logits."""

    def __init__(self, weights: NDArray[Any], name: str) -> None:
        self._weights, self.name = weights, name

    def logits(self, last: NDArray[Any]) -> NDArray[np.float32]:
        """Multiply rows of final states (float32 [R, H]); the matrix is read in blocks, never whole."""
        rows, size = last.shape[0], self._weights.shape[0]
        out = np.empty((rows, size), np.float32)
        for begin in range(0, size, _BLOCK):
            out[:, begin : begin + _BLOCK] = last @ to_float32(self._weights[begin : begin + _BLOCK]).T
        return out


def head(folder: str, text: dict[str, Any]) -> Head | str:
    """Return the output head, or why it cannot be had."""
    try:
        places: dict[str, _Place] = {}
        for name in _weight_files(folder):
            places.update(_tensors(os.path.join(folder, name), (*HEADS, *TIED)))
    except (OSError, ValueError, KeyError) as error:
        return f"the weights in {folder} cannot be read: {error}"
    wanted = [*HEADS, *(TIED if text.get("tie_word_embeddings") else ())]
    name = next((name for name in wanted if name in places), "")
    if not name:
        return f"no output head in the safetensors files of {folder}"
    place = places[name]
    if place.dtype not in _DTYPES or place.shape != (text["vocab_size"], text["hidden_size"]):
        return f"{name} is {place.dtype} {list(place.shape)}, which is not read here"
    return Head(np.memmap(place.path, _DTYPES[place.dtype], "r", place.begin, place.shape), name)


def _weight_files(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def _tensors(path: str, names: tuple[str, ...]) -> dict[str, _Place]:
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(file.read(size))
    found = {}
    for name in (name for name in names if name in header):
        about = header[name]
        found[name] = _Place(path, about["dtype"], tuple(about["shape"]), 8 + size + about["data_offsets"][0])
    return found
