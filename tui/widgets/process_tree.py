"""Processes as trees: who started whom, by indentation, with the marks that draw the branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backend.wire import Process

DEEPEST = 8
"""From this depth on branches are drawn no further in: a chain of a hundred shells still fits."""


@dataclass(frozen=True)
class Branch:
    """One process of a tree. `mark` draws its branch, `below` what runs past it to those that follow."""

    process: Process
    depth: int
    mark: str
    below: str


def forest(processes: Sequence[Process]) -> list[Branch]:
    """Put each process below the one that started it, where that is among them; else it begins a tree of its own.

    The order of the processes is kept among roots and among the children of one parent.
    """
    pids = {one.pid for one in processes}
    children: dict[int, list[Process]] = {}
    for one in processes:
        children.setdefault(one.ppid if one.ppid in pids and one.ppid != one.pid else 0, []).append(one)
    # A pid may be listed twice, or parents may form a ring where one was taken again: each is drawn once all the same.
    seen: set[int] = set()
    found = list(_branches(children, children.get(0, []), 0, "", seen))
    rest = [one for one in processes if id(one) not in seen]
    return found + [Branch(one, 0, "", "") for one in rest]


def _branches(
    children: dict[int, list[Process]], level: list[Process], depth: int, before: str, seen: set[int]
) -> Iterator[Branch]:
    for number, one in enumerate(level):
        if id(one) in seen:
            continue
        seen.add(id(one))
        last = number == len(level) - 1
        mark = before + ("└ " if last else "├ ") if depth else ""
        past = before + ("  " if last else "│ ") if depth else ""
        started = children.get(one.pid, [])
        yield Branch(one, depth, mark, past + ("│ " if started else ""))
        deeper = past if depth < DEEPEST else before
        yield from _branches(children, started, depth + 1, deeper, seen)
