"""The server's command line: what an extraction needs of it, spelled for the version that is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.extraction import layers
from backend.extraction.modelshape import Shape, ShapeError, locate, read_shape
from backend.extraction.serving import installed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.extraction.serving.installed import Installed

LOGITS, MODEL = "logits", "model"
"""The capture hook's adapters (backend.extraction.capture.config)."""

AUX_FLAGS = ("--enable-return-aux-hidden-states", "--return-aux-hidden-state-layer-ids")


class Unfit(Exception):
    """The server would not start or not capture; the text says what is missing. Nothing was loaded."""


@dataclass(frozen=True)
class Wanted:
    """What the stage asks for."""

    model: str
    points: Sequence[int]
    tp: int = 1
    port: int = 30000
    mem_fraction: float | None = None
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """How the server will capture: the hook's adapter and the flags that go with it. `shape` is None where unknown."""

    adapter: str
    capture_flags: list[str]
    shape: Shape | None
    notes: list[str] = field(default_factory=list)


def plan(wanted: Wanted, found: Installed) -> Plan:
    """Read the model and choose how to capture. Raises Unfit for what is certain to fail."""
    folder = locate(wanted.model)
    if not folder:
        local = wanted.model.startswith(("/", ".", "~"))
        if local:
            raise Unfit(f"the model's folder {wanted.model} has no config.json: correct the stage's `model`")
        note = f"{wanted.model} is not on this host: SGLang will look for it, and the points are not checked before"
        return Plan(MODEL, [], None, [note])
    try:
        shape = read_shape(folder)
    except ShapeError as error:
        raise Unfit(str(error)) from None
    try:
        points = layers.check_points(wanted.points, shape.layers)
    except layers.Cannot as error:
        raise Unfit(f"{error} ({shape.architecture})") from None
    methods = installed.capture_methods(found.folder, shape.architecture)
    if methods is not None and not methods:
        raise Unfit(f"SGLang {found.version}'s code of {shape.architecture} cannot capture layers: another version may")
    notes = [f"{shape.architecture} is not in SGLang {found.version}'s own models"] if methods is None else []
    if not found.lacks(list(AUX_FLAGS)):
        try:
            convention, ids = _spelling(shape, points, methods)
            words = [AUX_FLAGS[0], "--speculative-algorithm", convention, AUX_FLAGS[1], *map(str, ids)]
            return Plan(LOGITS, words, shape, notes)
        except layers.Cannot as error:
            notes.append(f"not by SGLang's own flags: {error}")
    if points[0] < 1 or points[-1] >= shape.layers:
        said = f"the points {points} must lie within 1 to {shape.layers - 1} for SGLang {found.version}"
        raise Unfit(said + "".join(f"; {note}" for note in notes))
    return Plan(MODEL, [], shape, notes)


def _spelling(shape: Shape, points: Sequence[int], methods: set[str] | None) -> tuple[str, list[int]]:
    """Return (convention, ids), and see that the installed code has that convention. Raises layers.Cannot."""
    convention, ids = layers.server_spelling(shape.architecture, points, shape.layers)
    wanted = installed.DFLASH if convention == "DFLASH" else installed.EAGLE3
    if methods is not None and wanted not in methods:
        raise layers.Cannot(f"its code of {shape.architecture} has no {convention} capture")
    return convention, ids


def build(wanted: Wanted, found: Installed, chosen: Plan, entry: list[str], hook: str) -> list[str]:
    """Return the whole command line. Raises Unfit naming the options that this SGLang does not have."""
    words = [
        "--model-path", os.path.expanduser(wanted.model), "--host", "127.0.0.1", "--port", str(wanted.port),
        "--tp-size", str(wanted.tp), "--disable-radix-cache", "--chunked-prefill-size", "-1",
    ]  # fmt: skip
    if wanted.mem_fraction is not None:
        words += ["--mem-fraction-static", f"{wanted.mem_fraction:g}"]
    words += _eager(found) + chosen.capture_flags + ["--forward-hooks", hook, *wanted.arguments]
    lacking = found.lacks(words)
    if lacking:
        raise Unfit(f"SGLang {found.version} has no {', '.join(lacking)}: correct `arguments`, or use 0.5.17 or newer")
    return [*entry, *words]


def _eager(found: Installed) -> list[str]:
    """Return what keeps prefills out of CUDA graphs, where hooks do not fire."""
    graphs = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    return graphs if not found.lacks(graphs) else ["--disable-cuda-graph"]
