"""`layers`: what a model's capture points are called in every system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tui.commands.session import USAGE, Stop, json_option, put_json

if TYPE_CHECKING:
    from backend.extraction.layers import Spelling


def _points(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(word) for word in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"{value!r}: write numbers and commas, 3,31,59") from None


@click.command()
@click.argument("model")
@click.option("--points", required=True, callback=_points, help="Capture points, such as 3,31,59.")
@click.option("--layers", "count", type=click.IntRange(1), help="The model's layers, where only its name is given.")
@json_option
def layers(model: str, points: list[int], count: int | None, as_json: bool) -> None:
    """Show how each system spells a model's capture points: SGLang, SpecForge, TorchSpec, vLLM, speculators.

    MODEL is a model's folder (with config.json), an architecture (LlamaForCausalLM, with --layers) or a short name such
    as kimi-k2.5. Capture point k is the residual stream entering layer k, which is the output of layer k-1.
    """
    from backend.extraction import layers as rules

    architecture, total = _shape(model, count)
    try:
        found = rules.spellings(architecture, total, points)
    except rules.Cannot as error:
        raise Stop(str(error), USAGE) from None
    if as_json:
        put_json(_record(architecture, total, sorted(points), found))
        return
    click.echo(f"{architecture}, {total} layers")
    for point in sorted(points):
        click.echo(f"  point {point}: {meaning(point, total)}")
    for one in found:
        click.echo(line(one))


def meaning(point: int, total: int) -> str:
    """Say in words what is captured at a point."""
    if point == 0:
        return "the embeddings, entering layer 0"
    if point == total:
        return f"the output of layer {point - 1}, the last one, before the final norm"
    return f"the residual stream entering layer {point}, the output of layer {point - 1}"


def line(spelling: Spelling) -> str:
    """Write one system as a line."""
    head = f"  {spelling.system:<18}"
    if spelling.ids is None:
        return f"{head}cannot: {spelling.note}"
    return f"{head}{spelling.write}" + (f"  ({spelling.note})" if spelling.note else "")


def _shape(model: str, count: int | None) -> tuple[str, int]:
    """Return (architecture, layers) of what the operator named."""
    from backend.extraction.layers import FAMILIES, MODELS
    from backend.extraction.modelshape import ShapeError, locate, read_shape

    known = MODELS.get(model.lower())
    folder = locate(model)
    if folder:
        try:
            shape = read_shape(folder)
        except ShapeError as error:
            raise Stop(str(error), USAGE) from None
        return shape.architecture, count or shape.layers
    if known:
        return known[0], count or known[1]
    if Path(model).exists() or "/" in model:
        raise Stop(f"{model}: no model folder here: it has no config.json", USAGE)
    by_name = {name.lower(): name for name in FAMILIES}
    if model.lower() in by_name or count:
        if not count:
            raise Stop(f"{model} comes in several sizes: say how many layers with --layers", USAGE)
        return by_name.get(model.lower(), model), count
    raise Stop(f"{model} is not known: name a model's folder, an architecture with --layers, or one of "
               f"{', '.join(MODELS)}", USAGE)  # fmt: skip


def _record(architecture: str, total: int, points: list[int], found: list[Spelling]) -> dict[str, Any]:
    from backend.extraction.engines import CONVENTION

    return {
        "architecture": architecture,
        "layers": total,
        "points": [{"point": point, "meaning": meaning(point, total)} for point in points],
        "convention": CONVENTION,
        "systems": [
            {"system": one.system, "ids": one.ids, "write": one.write, "can": one.ids is not None, "note": one.note}
            for one in found
        ],
    }
