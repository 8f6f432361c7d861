"""What the capture hook says of itself: one file a rank in the staging folder (backend.extraction.capture)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from backend.wire import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks(folder: str) -> list[dict[str, Any]]:
    """Return the counters of every rank; none where no hook was made yet."""
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        if name.startswith("rank") and name.endswith(".json"):
            try:
                with open(os.path.join(folder, name), encoding="ascii") as file:
                    record = json.load(file)
            except (OSError, ValueError):
                continue  # replaced at this moment
            if isinstance(record, dict):
                found.append(record)
    return found


def trouble(found: Sequence[dict[str, Any]], points: Sequence[int]) -> str:
    """Say why the states would be wrong or missing; empty where every rank captures our points."""
    if not found:
        return "the capture hook was never made: SGLang only warns where no module has a fitting name"
    silent = [record.get("rank") for record in found if not record.get("effective_layers")]
    if silent:
        return f"rank {silent[0]}'s model captures no layers: SGLang's code of this architecture has no such list"
    wrong = [record for record in found if list(record["effective_layers"]) != list(points)]
    if wrong:
        there = wrong[0]["effective_layers"]
        return f"rank {wrong[0].get('rank')} captures the points {there}, not {list(points)}"
    return ""


def settled(found: Sequence[dict[str, Any]]) -> bool:
    """Say whether every rank has told its layers, which it does with the first pass."""
    return bool(found) and all(record.get("effective_layers") for record in found)


def figures(found: Sequence[dict[str, Any]], bound_bytes: int) -> dict[str, Any]:
    """Return the fields of wire.Progress that tell of the staging."""
    return {
        "staging_bytes": _sum(found, "staged_bytes"),
        "staging_high_bytes": _sum(found, "high_water_bytes"),
        "staging_bound_bytes": bound_bytes * sum(bool(record.get("writes")) for record in found),
        "capture_wait_s": max([float(record.get("wait_s") or 0.0) for record in found], default=0.0),
    }


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Say what was captured so far as part of a line."""
    points = found[0].get("effective_layers") if found else None
    said = [f"points {' '.join(map(str, points))} on {len(found)} ranks"] if points else []
    if _sum(found, "whole") or _sum(found, "failed"):
        said.append(f"{_sum(found, 'whole'):,} requests captured, {_sum(found, 'bytes') / GIB:.2f} GiB")
    said += [f"{_sum(found, 'failed'):,} failed"] if _sum(found, "failed") else []
    return ", ".join(said)


def _sum(found: Sequence[dict[str, Any]], name: str) -> int:
    return sum(int(record.get(name) or 0) for record in found)
