"""Which bytes of a file are a tensor's, and which of them a sample reads."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from backend.agent.shards.source import Source

PIECE_BYTES = 4 << 20
"""Read and counted at a time: large beside what a call costs, small enough to stay in cache between the passes."""

SAMPLE_PIECES = 32
MAX_SCATTERED = 100_000
"""Runs that are read one by one."""

_DENSE = 64
"""Short runs that lie closer than this many of their lengths are read with what lies between them."""


class Runs(NamedTuple):
    """A tensor's distinct bytes: `run_bytes` long runs from `offset`, repeated along `outer` (size, step in bytes).

    A permuted dense tensor is one run. What an expanded tensor repeats is there once. `row_bytes` is the length
    of a row (the last axis) where rows follow each other in the runs, else 0.
    """

    offset: int
    run_bytes: int
    outer: Tuple[Tuple[int, int], ...]
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes all runs have."""
        total = self.run_bytes
        for size, _ in self.outer:
            total *= size
        return total

    def read(self, source: Source, at: int, size: int) -> bytes:
        """Return bytes as though the runs lay one behind the other."""
        if not self.outer:
            return source.read(self.offset + at, size)
        parts: List[bytes] = []
        while size > 0:
            number, within = divmod(at, self.run_bytes)
            if not within and size >= self.run_bytes and self._close:
                found, part = self._block(source, number, size // self.run_bytes)
                parts.append(part)
                if not found:
                    break
                at, size = at + found * self.run_bytes, size - found * self.run_bytes
                continue
            take = min(size, self.run_bytes - within)
            part = source.read(self._start(number) + within, take)
            parts.append(part)
            if len(part) < take:
                break
            at, size = at + take, size - take
        return b"".join(parts)

    def read_into(self, source: Source, at: int, buffer: memoryview) -> int:
        """Fill a buffer as `read` would and return how much."""
        if not self.outer:
            return source.read_into(self.offset + at, buffer)
        data = self.read(source, at, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @property
    def _close(self) -> bool:
        return self.run_bytes <= PIECE_BYTES // _DENSE and self.outer[-1][1] <= _DENSE * self.run_bytes

    @property
    def scattered(self) -> bool:
        """Say whether the runs are too many to be read one by one."""
        return bool(self.outer) and not self._close and self.size_bytes > MAX_SCATTERED * self.run_bytes

    def _block(self, source: Source, number: int, wanted: int) -> Tuple[int, bytes]:
        """Return how many runs along the innermost axis one read brought, and their bytes."""
        size, step = self.outer[-1]
        runs = max(1, min(wanted, size - number % size, PIECE_BYTES // step))
        data = source.read(self._start(number), (runs - 1) * step + self.run_bytes)
        if len(data) < (runs - 1) * step + self.run_bytes:
            return 0, b""
        return runs, b"".join([data[at : at + self.run_bytes] for at in range(0, runs * step, step)])

    def _start(self, number: int) -> int:
        at = self.offset
        for size, step in reversed(self.outer):
            number, index = divmod(number, size)
            at += index * step
        return at


def runs_of(row: Dict[str, Any], item_bytes: int) -> Runs:
    """Return the runs of a report's row, which has a stride and an offset."""
    axes = [(size, step) for size, step in zip(row["shape"], row["stride"]) if size != 1 and step]
    axes.sort(key=lambda axis: -axis[1])
    run = 0 if 0 in row["shape"] else 1
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    covered = 1 + sum((size - 1) * step for size, step in axes) + max(0, run - 1)
    distinct = run
    for size, _ in axes:
        distinct *= size
    if distinct > covered:  # a view whose elements overlap: what it covers, once
        return Runs(row["offset"], covered * item_bytes, (), 0)
    width = row["shape"][-1] if row["shape"] else 1
    in_rows = len(row["shape"]) > 1 and row["stride"][-1] == 1 and width > 1 and run % width == 0
    in_rows = in_rows and width * item_bytes <= PIECE_BYTES
    outer = tuple((size, step * item_bytes) for size, step in axes)
    return Runs(row["offset"], run * item_bytes, outer, width * item_bytes if in_rows else 0)


def pieces(runs: Runs, item_bytes: int, sample_bytes: int) -> Iterator[Tuple[int, int]]:
    """Yield (at, size) of what is read: all in order, or a sample spread evenly with both ends; whole rows."""
    unit = runs.row_bytes or item_bytes
    total = runs.size_bytes
    piece = max(unit, PIECE_BYTES // unit * unit)
    if not sample_bytes or total <= sample_bytes:
        for at in range(0, total, piece):
            yield at, min(piece, total - at)
        return
    size = max(unit, min(piece, sample_bytes // SAMPLE_PIECES) // unit * unit)
    last = (total - size) // unit
    end = 0
    for number in range(SAMPLE_PIECES):
        at = last * number // (SAMPLE_PIECES - 1) * unit
        if at >= end:
            yield at, size
            end = at + size
