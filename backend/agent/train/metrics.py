"""What a trainer has said, as numbers by name, and the file of them in the run's folder.

Names, whatever the trainer calls them: `loss`, `accuracy` (the share of first drafted tokens that were right), and by
position `loss/0`, `accuracy/0`, `acceptance/0`; `learning_rate`, `grad_norm`, `tokens_per_s`, `samples_per_s`,
`step_s`.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple, Union

METRICS = "metrics.jsonl"
TRAIN, EVAL = "train", "eval"
Value = Union[float, str]
"""A finite number, or the word for one that is not: JSON has none of those."""

MOST_POINTS = 600
"""Of each kind in one answer: more than a screen has columns, and within a line of the wire."""

MOST_BYTES = 64 << 20
"""Of the file that is read: the end of it, some 300,000 steps."""


class Update(NamedTuple):
    """What was said of one step. A later one of the same kind and step adds to it."""

    kind: str
    step: int
    values: Dict[str, Value]


def value_of(text: str) -> Value:
    """Return the number that a text holds, a word where it is not finite. Raises ValueError where it is none."""
    number = float(text)
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else ("inf" if number > 0 else "-inf")


def number(value: "Value | None") -> "float | None":
    """Return a value that is a finite number, else None."""
    return value if isinstance(value, (int, float)) else None


class MetricsFile:
    """The run's own record of its metrics, appended to; what a full disk swallows is said once."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, METRICS)
        self.problem = ""

    def add(self, at: float, updates: Iterable[Update]) -> None:
        """Append updates, each with the wall time at which it was read."""
        lines = [json.dumps(dict(one._asdict(), at=round(at, 1))) for one in updates]
        if not lines:
            return
        try:
            with open(self._path, "a", encoding="ascii") as file:
                file.write("\n".join(lines) + "\n")
            self.problem = ""
        except OSError as error:
            self.problem = "its metrics cannot be kept: %s" % error.strerror


def read(folder: str, points: int = MOST_POINTS) -> Dict[str, Any]:
    """Return {train, eval, points}: lists of {at, step, values} in the order of their steps, thinned to `points`.

    A step that was told twice (a training that went back to a checkpoint) is the later one. Thinned, a point is the
    mean of its neighbours' numbers at the last of their steps; one that was not finite stays so. `points` counts what
    there is of each before that.
    """
    found: Dict[str, Dict[int, Dict[str, Any]]] = {TRAIN: {}, EVAL: {}}
    for line in _lines(os.path.join(folder, METRICS)):
        try:
            record = json.loads(line)
            kind, step, values, at = record["kind"], int(record["step"]), dict(record["values"]), float(record["at"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill or a full disk
        if kind in found:
            known = found[kind].setdefault(step, {"at": at, "step": step, "values": {}})
            known["values"].update(values)
            known["at"] = at
    ordered = {kind: [steps[step] for step in sorted(steps)] for kind, steps in found.items()}
    most = max(2, min(points, MOST_POINTS))
    return {**{kind: _thinned(rows, most) for kind, rows in ordered.items()},
            "points": {kind: len(rows) for kind, rows in ordered.items()}}  # fmt: skip


def _lines(path: str) -> List[bytes]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MOST_BYTES))
            return file.read(MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return []


def _thinned(rows: List[Dict[str, Any]], most: int) -> List[Dict[str, Any]]:
    if len(rows) <= most:
        return rows
    return [_mean(rows[len(rows) * at // most : len(rows) * (at + 1) // most]) for at in range(most)]


def _mean(rows: List[Dict[str, Any]]) -> Dict[str, Any]:
    sums: Dict[str, Tuple[float, int]] = {}
    words: Dict[str, str] = {}
    for row in rows:
        for name, value in row["values"].items():
            if isinstance(value, str):
                words[name] = value
            else:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)
    values: Dict[str, Value] = {name: float("%.6g" % (total / count)) for name, (total, count) in sums.items()}
    values.update(words)
    return {"at": rows[-1]["at"], "step": rows[-1]["step"], "values": values}
