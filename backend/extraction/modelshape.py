"""What a model's config.json says of its shape: the architecture, the layers, the widths. Standard library only."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

INNER = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where a model of several modalities keeps the configuration of its language model (Kimi-K2.5: text_config)."""


class ShapeError(Exception):
    """The model's configuration cannot be read; the text names the file and says why."""


@dataclass(frozen=True)
class Shape:
    """A model's shape. `architecture` is the outer one, by which SGLang chooses its code."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    own_code: bool = False
    """Whether the model brings Python code of its own, which a server runs only with --trust-remote-code."""


def locate(model: str) -> str:
    """Return the folder of a model: a path, or the newest snapshot in the Hugging Face cache; empty if absent."""
    path = os.path.expanduser(model)
    if os.path.isfile(path) and os.path.basename(path) == "config.json":
        return os.path.dirname(path) or "."
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = os.path.join(cache, "models--" + model.replace("/", "--"), "snapshots")
    try:
        found = [os.path.join(snapshots, name) for name in os.listdir(snapshots)]
    except OSError:
        return ""
    found = [folder for folder in found if os.path.isfile(os.path.join(folder, "config.json"))]
    return max(found, key=os.path.getmtime, default="")


def read_shape(folder: str) -> Shape:
    """Read a model folder's config.json. Raises ShapeError."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8-sig") as file:
            outer = json.load(file)
    except OSError as error:
        raise ShapeError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ShapeError(f"{path}: not JSON: {error}") from None
    if not isinstance(outer, dict):
        raise ShapeError(f"{path}: not a JSON object")
    names = outer.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ShapeError(f"{path}: `architectures` names none")
    text = language_model(outer)
    return Shape(
        names[0],
        _number(path, text, "num_hidden_layers", "n_layer", "num_layers"),
        _number(path, text, "hidden_size", "n_embd", "d_model"),
        _number(path, {"vocab_size": 0, **outer, **text}, "vocab_size"),
        bool(outer.get("auto_map")),
    )


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part that describes the language model, however deep it lies."""
    for name in INNER:
        inner = config.get(name)
        if isinstance(inner, dict):
            return language_model(inner)
    return config


def _number(path: str, text: dict[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise ShapeError(f"{path}: `{names[0]}` is no number")
