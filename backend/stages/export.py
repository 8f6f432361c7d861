"""An export stage: shards into what another trainer reads (docs/datasets.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.stages.definition import Stage

SPECULATORS = "speculators"


def export_argv(stage: Stage) -> list[str]:
    """Return the words after the extractor. A map of the vocabulary for SpecForge is a file of its own."""
    argv = ["export", stage.format, stage.folder]
    argv += [stage.out] if stage.format == SPECULATORS else ["--out", stage.out]
    argv += ["--model", stage.model] if stage.model else []
    return [*argv, *stage.arguments]


def export_modules(stage: Stage) -> list[str]:
    """Return what the stage's Python must have."""
    return ["numpy", "pyarrow"] if stage.format == SPECULATORS else ["numpy"]


def export_predicts(stage: Stage) -> dict[str, Any]:
    """Return what the host predicts the bytes from: all shards over again, but only one small file for SpecForge."""
    copies = stage.format == SPECULATORS and not stage.disk_gib
    return {"out": stage.out, "shards": stage.folder} if copies else {}
