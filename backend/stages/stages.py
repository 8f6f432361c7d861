"""From a stage of the configuration to what the host is asked: a run and its requirements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.stages.audit import audit_argv
from backend.stages.prepare import prepare_argv, prepare_modules, prepare_paths
from backend.stages.serve import DEFAULT_SERVER, serve_argv, serve_grace_s, serve_shm_gib
from backend.wire import GIB, RunSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.config import Stage

EXTRACTOR = "{extractor}"
"""Stands in an argv for the folder where the host keeps the unpacked extractor."""

DRAIN_SHARE = 0.6
"""Of the grace that a stop gives, for what is in flight at a server; the rest is for writing and committing it."""


def build_spec(name: str, stage: Stage, run_id: str, forced: str = "", roots: Sequence[str] = ()) -> RunSpec:
    """Build the run of a stage. An argv of ours holds EXTRACTOR, which the link replaces once shipped, or AGENT,
    which the host does.

    `roots` are the host's: an audit stays inside them.
    """
    return RunSpec(
        id=run_id,
        stage=name,
        argv=audit_argv(stage, roots) if stage.kind == "audit" else _argv(stage),
        cwd=stage.cwd,
        env=dict(stage.env),
        label=_label(name, stage),
        out_dir=stage.out,
        grace_s=serve_grace_s(stage) if stage.kind == "serve" else stage.grace_s,
        forced=forced,
    )


def _argv(stage: Stage) -> list[str]:
    if stage.kind == "extract":
        return _extract_argv(stage)
    if stage.kind == "prepare":
        return [stage.python, EXTRACTOR, *prepare_argv(stage)]
    return [stage.python, EXTRACTOR, *serve_argv(stage)] if stage.kind == "serve" else list(stage.command)


def _label(name: str, stage: Stage) -> str:
    return {
        "extract": f"{name} ({stage.engine})",
        "serve": f"{name} {stage.model}",
        "audit": f"{name} {stage.folder}",
    }.get(stage.kind, name)


def _extract_argv(stage: Stage) -> list[str]:
    argv = [stage.python, EXTRACTOR, "--engine", stage.engine, "--corpus", stage.corpus, "--out", stage.out]
    argv += ["--limit", str(stage.limit)] if stage.limit else []
    if stage.engine != "sglang":
        return argv
    for key in ("server", "staging", "concurrency"):
        value = getattr(stage, key)
        argv += [f"--{key}", str(value)] if value else []
    return [*argv, "--drain", f"{DRAIN_SHARE * stage.grace_s:g}"]


def requirements(stage: Stage) -> dict[str, Any]:
    """Say what must hold on the host before a launch (docs/architecture.md, `requirements`)."""
    extract = stage.kind == "extract"
    disk = [[stage.out or stage.cwd or "~", int(stage.disk_gib * GIB)]] if stage.disk_gib else []
    return {
        "clean_gpus": "clean-gpus" in stage.needs,
        "paths": _paths(stage),
        "disk": disk,
        "shm_bytes": int((serve_shm_gib(stage) if stage.kind == "serve" else stage.shm_gib) * GIB),
        "python": {"command": "".join(stage.command[:1]), "audit": ""}.get(stage.kind, stage.python),
        "modules": {"extract": ["numpy"], "serve": ["sglang", "numpy"], "prepare": prepare_modules(stage)}.get(
            stage.kind, []
        ),
        "server": (stage.server or DEFAULT_SERVER) if extract and stage.engine == "sglang" else "",
    }


def _paths(stage: Stage) -> list[str]:
    """Return what must be there."""
    if stage.kind in ("extract", "audit"):
        return [path for path in (stage.folder, stage.corpus) if path]
    if stage.kind == "serve":
        return [stage.model] if stage.model and stage.model.startswith(("/", "~")) else []
    return prepare_paths(stage)
