"""An extract stage: how the extraction is called, and what tells beforehand how many bytes it will write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.stages.serve import DEFAULT_SERVER

if TYPE_CHECKING:
    from backend.stages.definition import Stage

DRAIN_SHARE = 0.6
"""Of the grace that a stop gives, for what is in flight at a server; the rest is for writing and committing it."""

EMBEDDED_SHAPE = (64, 3)
"""Hidden size and capture points of the embedded engine (backend/extraction/engines/embedded.py)."""


def extract_argv(stage: Stage) -> list[str]:
    """Return the words after the extractor. What the stage leaves out is the extraction's to decide."""
    argv = ["--engine", stage.engine, "--corpus", stage.corpus, "--out", stage.out]
    for key in ("limit", "order", "only", "suffix"):
        value = getattr(stage, key)
        argv += [f"--{key}", str(value)] if value else []
    if stage.engine != "sglang":
        return argv
    argv += ["--server", server_of(stage)]
    for key in ("staging", "concurrency"):
        value = getattr(stage, key)
        argv += [f"--{key}", str(value)] if value else []
    argv += ["--retries", str(stage.retries)] if stage.retries is not None else []
    return [*argv, "--drain", f"{DRAIN_SHARE * stage.grace_s:g}"]


def server_of(stage: Stage) -> str:
    """Return the address of the server that an extraction asks; empty where it computes by itself."""
    return (stage.server or DEFAULT_SERVER) if stage.kind == "extract" and stage.engine == "sglang" else ""


def extract_predicts(stage: Stage) -> dict[str, Any]:
    """Return what the host predicts the bytes from. With `only`, how many samples it will be is not known here."""
    if stage.disk_gib or stage.only:
        return {}
    shape = list(EMBEDDED_SHAPE) if stage.engine == "embedded" else None
    return {"out": stage.out, "corpus": stage.corpus, "limit": stage.limit, "shape": shape, "server": server_of(stage)}
