"""Peeks and statistics of a report's tensors, bounded in bytes read and in the size of the reply."""

from __future__ import annotations

import fnmatch
import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from backend.agent.shards.inflated import Inflated
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.agent.shards.values import withnumpy, withtorch
from backend.agent.shards.values.numbers import known, part_of, told
from backend.agent.shards.values.spans import Runs, pieces, runs_of
from backend.agent.shards.values.tally import Tally, count_plain
from backend.shardfmt.dtypes import ITEM_BYTES

SAMPLE_BYTES = {"numpy": 4 << 20, "torch": 4 << 20, "plain": 512 << 10}
"""Read of each tensor by default: some 20 ms each, either way."""

MAX_TENSORS = 40
MAX_REPLY_BYTES = 28 * 1024
PEEKED = 4
MAX_THREADS = 4
MakeCounter = Callable[[Tally, str], Union[withnumpy.Counter, withtorch.Counter]]
_PICKED_ALL = 65_536
_PICKED_PIECE = 1024


def statistics(source: Source, report: Report, only: str = "", all_values: bool = False) -> Dict[str, Any]:
    """Look at the values of the tensors whose keys match `only` (a pattern; empty: all).

    Returns {by: numpy | torch | plain, tensors, left_out}: for each tensor its key, `first` and `last` elements,
    why it was not read (`problem`, else empty), and what `tally.Tally.told` says. `left_out` counts those
    that did not fit a reply.
    """
    wanted = [row for row in report.entries if not only or row["key"] == only or fnmatch.fnmatchcase(row["key"], only)]
    by, counter = _counter(sum(row["bytes"] or 0 for row in wanted[:MAX_TENSORS]) if all_values else 0)
    sample = 0 if all_values else SAMPLE_BYTES[by]
    found: List[Dict[str, Any]] = []
    room = MAX_REPLY_BYTES
    for row in wanted[:MAX_TENSORS]:
        made = _of_row(report.content or source, report, row, sample, counter)
        room -= len(json.dumps(made, separators=(",", ":"))) + 1
        if room < 0:
            break
        found.append(made)
    return {"by": by, "tensors": found, "left_out": len(wanted) - len(found)}


def _counter(all_bytes: int) -> Tuple[str, Optional[MakeCounter]]:
    """Choose who counts: numpy where it is, else torch where it is and worth its start, else the standard library."""
    numpy = withnumpy.load()
    if numpy is not None:
        return "numpy", partial(withnumpy.Counter, numpy)
    torch = withtorch.load(all_bytes)
    return ("plain", None) if torch is None else ("torch", partial(withtorch.Counter, torch))


def _of_row(
    source: Source, report: Report, row: Dict[str, Any], sample: int, counter: Optional[MakeCounter]
) -> Dict[str, Any]:
    made: Dict[str, Any] = {"key": row["key"], "problem": _problem(report, row), "first": [], "last": []}
    if made["problem"]:
        return made
    item = ITEM_BYTES[row["dtype"]]
    try:
        made["first"], made["last"] = peek(source, row, item)
        runs = runs_of(row, item)
        if runs.scattered:
            made["problem"] = "its elements lie too far apart to be counted"
            return made
        tally = _tally(source, row, runs, sample, counter)
    except Unreadable as problem:
        made["problem"] = problem.text
        return made
    if tally is None:
        made["problem"] = "its bytes ended while they were read"
        return made
    numel = 1
    for size in row["shape"]:
        numel *= size
    made.update(tally.told(numel * part_of(row["dtype"])[1]))
    return made


def _problem(report: Report, row: Dict[str, Any]) -> str:
    """Say why a tensor's values cannot be told, or nothing."""
    if not known(row["dtype"]):
        return "values of this type are not known here"
    if row["bytes"] is None or row["stride"] is None:
        return "it has no values of its own"
    if row["offset"] is None:
        return "where its bytes lie is not known"
    if not row["whole"]:
        return "not all of its bytes are there"
    if any(finding.code == "big-endian" for finding in report.findings):
        return "its numbers are big-endian"
    return ""


def peek(source: Source, row: Dict[str, Any], item_bytes: int) -> Tuple[List[Any], List[Any]]:
    """Return the first and the last few elements, in the order of their indices."""
    numel = 1
    for size in row["shape"]:
        numel *= size
    ends = min(PEEKED, numel)
    numbers = [list(range(ends)), list(range(max(ends, numel - PEEKED), numel))]
    first, last = ([_element(source, row, item_bytes, number) for number in part] for part in numbers)
    return first, last


def _element(source: Source, row: Dict[str, Any], item_bytes: int, number: int) -> Any:
    at = row["offset"]
    for size, step in zip(reversed(row["shape"]), reversed(row["stride"])):
        number, index = divmod(number, size)
        at += index * step * item_bytes
    data = source.read(at, item_bytes)
    if len(data) < item_bytes:
        raise Unreadable("truncated", "its bytes ended while they were read")
    return told(row["dtype"], data)


def _tally(
    source: Source, row: Dict[str, Any], runs: Runs, sample: int, counter: Optional[MakeCounter]
) -> Optional[Tally]:
    """Count every piece, or return None where the bytes end early.

    With numpy or torch, reading and counting leave Python's lock, so threads share the pieces of a large tensor:
    each its own, in a fixed order, that the sums may be repeated.
    """
    spans = list(pieces(runs, ITEM_BYTES[row["dtype"]], sample))
    count = _Counting(source, row["dtype"], runs, counter, max(_PICKED_PIECE, _PICKED_ALL // max(1, len(spans))))
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(spans) // 8)
    if counter is None or threads < 2 or isinstance(source, Inflated):
        return count.pieces(spans)
    with ThreadPoolExecutor(threads) as pool:
        tallies = list(pool.map(count.pieces, [spans[first::threads] for first in range(threads)]))
    whole = Tally()
    for tally in tallies:
        if tally is None:
            return None
        whole.join(tally)
    return whole


class _Counting:
    """How the pieces of one tensor are counted."""

    def __init__(self, source: Source, dtype: str, runs: Runs, counter: Optional[MakeCounter], picked: int) -> None:
        self._source, self._runs, self._make, self._picked = source, runs, counter, picked
        self._dtype, _ = part_of(dtype)

    def pieces(self, spans: List[Tuple[int, int]]) -> Optional[Tally]:
        """Count some pieces, or return None where the bytes end early."""
        tally = Tally()
        counter = None if self._make is None else self._make(tally, self._dtype)
        pages = memoryview(mmap.mmap(-1, max([size for _, size in spans], default=1)))
        for at, size in spans:
            view = pages[:size]
            if self._runs.read_into(self._source, at, view) < size:
                return None
            tally.read_bytes += size
            if counter is not None:
                counter.count(view, self._runs.row_bytes, self._picked)
            else:
                count_plain(tally, self._dtype, bytes(view), self._runs.row_bytes, self._picked)
        return tally
