"""From a stage of the configuration to what the host is asked: a run and its requirements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.stages.audit import audit_argv
from backend.stages.export import export_argv, export_modules, export_predicts
from backend.stages.extract import extract_argv, extract_predicts, server_of
from backend.stages.prepare import prepare_argv, prepare_modules, prepare_paths
from backend.stages.serve import serve_argv, serve_grace_s, serve_port, serve_ram_gib, serve_shm_gib
from backend.stages.train import NEEDS as TRAINER_NEEDS
from backend.stages.train import train_argv, train_env, train_grace_s
from backend.wire import GIB, RunSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.stages.definition import Stage

EXTRACTOR = "{extractor}"
"""Stands in an argv for the folder where the host keeps the unpacked extractor."""

OURS = {"extract": extract_argv, "prepare": prepare_argv, "serve": serve_argv, "export": export_argv}
"""The kinds that the extractor's program does, in the stage's own Python."""


PREDICTED = {"extract": extract_predicts, "export": export_predicts}
"""The kinds that write as much as can be told beforehand."""


def build_spec(name: str, stage: Stage, run_id: str, forced: str = "", roots: Sequence[str] = ()) -> RunSpec:
    """Build the run of a stage. An argv of ours holds EXTRACTOR, which the link replaces once shipped, or AGENT,
    which the host does.

    `roots` are the host's: an audit stays inside them.
    """
    return RunSpec(
        id=run_id,
        stage=name,
        argv=_argv(stage, roots),
        cwd=stage.cwd,
        env=train_env(stage),
        label=_label(name, stage),
        out_dir=stage.out,
        grace_s={"serve": serve_grace_s, "train": train_grace_s}.get(stage.kind, _grace_s)(stage),
        forced=forced,
    )


def _grace_s(stage: Stage) -> float:
    return stage.grace_s


def _argv(stage: Stage, roots: Sequence[str]) -> list[str]:
    if stage.kind == "audit":
        return audit_argv(stage, roots)
    if stage.kind == "train":
        return train_argv(stage)
    words = OURS.get(stage.kind)
    return [stage.python, EXTRACTOR, *words(stage)] if words is not None else list(stage.command)


def _label(name: str, stage: Stage) -> str:
    return {
        "extract": f"{name} ({stage.engine})",
        "serve": f"{name} {stage.model}",
        "audit": f"{name} {stage.folder}",
        "export": f"{name} to {stage.format}",
        "train": f"{name} on {stage.data}",
    }.get(stage.kind, name)


def requirements(stage: Stage, name: str = "") -> dict[str, Any]:
    """Say what must hold on the host before a launch (docs/architecture.md, `requirements`).

    `name` is the stage's in the configuration, of which one run at a time is let through; empty: any number.
    """
    python, modules = _program(stage)
    serves = stage.kind == "serve"
    return {
        "others": {"stage": name, "out": placed(stage, stage.out) if stage.out else ""},
        "clean_gpus": stage.clean_gpus,
        "paths": [placed(stage, path) for path in (*_paths(stage), *stage.inputs)],
        "model": stage.model or "",
        "dummy_weights": "--load-format dummy" in " ".join(stage.arguments).replace("=", " "),
        "disk": [[placed(stage, stage.out or stage.cwd or "~"), int(stage.disk_gib * GIB)]] if stage.disk_gib else [],
        "predict": _predicts(stage),
        "shm_bytes": int((serve_shm_gib(stage) if serves else stage.shm_gib) * GIB),
        "ram_bytes": int((serve_ram_gib(stage) if serves else stage.ram_gib) * GIB),
        "port": serve_port(stage) if serves else stage.port or 0,
        "python": python,
        "modules": modules,
        "env": dict(stage.env),
        "server": server_of(stage),
        "audited": _audited(stage),
    }


def _audited(stage: Stage) -> str:
    """Return the folder of shards that must have been audited."""
    folder = stage.data or (stage.folder if stage.kind == "export" else "")
    return placed(stage, folder) if folder else ""


def placed(stage: Stage, path: str) -> str:
    """Return a path as the host finds it: a relative one is in the stage's `cwd`."""
    return path if path.startswith(("/", "~")) else f"{stage.cwd or '~'}/{path}"


def _predicts(stage: Stage) -> dict[str, Any]:
    """Return what tells the host how many bytes will be written; nothing where it cannot be told."""
    predicts = PREDICTED.get(stage.kind)
    found = predicts(stage) if predicts is not None else {}
    return {**found, **{key: placed(stage, found[key]) for key in ("out", "corpus", "shards") if key in found}}


def _program(stage: Stage) -> tuple[str, list[str]]:
    """Return the interpreter or program that must be there, and the packages that it must have."""
    if stage.kind == "audit":
        return "", []
    if stage.trainer:
        return stage.python, [*TRAINER_NEEDS[stage.trainer], *stage.packages]
    if stage.kind in ("command", "train"):
        return (stage.python if stage.packages else stage.command[0]), stage.packages
    own = {"extract": ["numpy"], "serve": ["sglang", "numpy"], "prepare": prepare_modules(stage),
           "export": export_modules(stage)}[stage.kind]  # fmt: skip
    return stage.python, [*own, *stage.packages]


def _paths(stage: Stage) -> list[str]:
    """Return what must be there."""
    if stage.kind == "prepare":
        return prepare_paths(stage)
    return [path for path in (stage.folder, stage.corpus, stage.data, stage.config) if path]
