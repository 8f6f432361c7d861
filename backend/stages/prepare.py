"""What a prepare stage runs, and what it needs of the host's Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.stages.definition import Stage

BYTES = "bytes"
"""The tokenizer that needs no model (backend/extraction/prepare/tokenise.py)."""


def prepare_argv(stage: Stage) -> list[str]:
    """Return the words after the extractor. A relative path is in the stage's `cwd`."""
    argv = ["prepare", "--out", stage.out]
    for option, value in (("--tokenizer", stage.tokenizer), ("--max-tokens", stage.max_tokens), ("--seed", stage.seed)):
        argv += [option, str(value)] if value is not None else []
    return [*argv, *stage.arguments, *stage.datasets]


def prepare_paths(stage: Stage) -> list[str]:
    """Return the files and folders that must be there."""
    files = [word.partition("=")[2] if named(word) else word for word in stage.datasets]
    return files + ([stage.tokenizer] if stage.tokenizer and stage.tokenizer != BYTES else [])


def prepare_modules(stage: Stage) -> list[str]:
    """Return what the stage's Python must have."""
    modules = ["numpy"]
    modules += ["transformers"] if stage.tokenizer and stage.tokenizer != BYTES else []
    return modules + (["pyarrow"] if any(word.endswith(".parquet") for word in stage.datasets) else [])


def named(word: str) -> bool:
    """Say whether a dataset is written NAME=PATH, as the stage itself reads it."""
    return "=" in word and "/" not in word.partition("=")[0]
