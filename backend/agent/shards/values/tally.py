"""What has been counted of a tensor so far, and the counting without numpy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Dict, List, Optional

from backend.agent.shards.values.numbers import FLOATS, decode, finite

BINS = 24
HISTOGRAM_VALUES = 8192
"""Counting these costs some 8 ms a tensor."""

KEPT_OF_PIECE = 4096


class Tally:
    """Counts over the pieces of one tensor.

    NaN, Inf, zero rows, least and greatest are exact over what was read. Mean and squares are over
    `moments` values spread evenly through it: all of them, where a tensor is small.
    """

    def __init__(self) -> None:
        self.read_bytes = self.rows = self.zero_rows = self.nan = self.inf = self.moments = 0
        self.low: Optional[float] = None
        self.high: Optional[float] = None
        self.total = self.squares = 0.0
        self.kept: List[float] = []

    def span(self, low: Any, high: Any) -> None:
        """Widen the range."""
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def moments_add(self, count: int, total: float, squares: float) -> None:
        """Add the sum of `count` finite values that were picked evenly, and the sum of their squares."""
        self.moments += count
        self.total += total
        self.squares += squares

    def wants(self) -> bool:
        """Say whether more values are kept for the histogram."""
        return len(self.kept) < HISTOGRAM_VALUES

    def join(self, other: "Tally") -> None:
        """Add what was counted of other pieces of the same tensor."""
        for name in ("read_bytes", "rows", "zero_rows", "nan", "inf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.low is not None:
            self.span(other.low, other.high)
        self.moments_add(other.moments, other.total, other.squares)
        if self.wants():
            self.kept.extend(other.kept)

    def told(self, numel: int) -> Dict[str, Any]:
        """Return the statistics. `norm` is the L2 norm of all `numel` elements, as the values counted make it."""
        mean = self.total / self.moments if self.moments else None
        square = self.squares / self.moments if self.moments else None
        return {
            "read_bytes": self.read_bytes,
            "nan": self.nan,
            "inf": self.inf,
            "rows": self.rows,
            "zero_rows": self.zero_rows,
            "min": None if self.low is None else finite(self.low),
            "max": None if self.high is None else finite(self.high),
            "mean": None if mean is None else finite(mean),
            "norm": None if square is None else finite(math.sqrt(square * numel)),
            "moments_of": self.moments,
            "histogram": self._histogram(),
        }

    def _histogram(self) -> Optional[Dict[str, Any]]:
        if not self.kept:
            return None
        low, high = float(min(self.kept)), float(max(self.kept))
        width = high - low
        scale = BINS / width if width else 0.0
        if not 0 < scale < math.inf:  # all are equal, or too near or too far from each other to be told apart
            return {"low": low, "high": high, "counts": [len(self.kept)]}
        counts = Counter([int((value - low) * scale) for value in self.kept])
        counts[BINS - 1] += counts.pop(BINS, 0)  # the greatest itself
        return {"low": low, "high": high, "counts": [counts[number] for number in range(BINS)]}


def count_plain(tally: Tally, dtype: str, data: bytes, row_bytes: int, picked: int) -> None:
    """Count one piece with the standard library. `picked` is how many values make up mean and norm."""
    _count_rows(tally, dtype, data, row_bytes)
    values = decode(dtype, data)
    if not _all_finite(dtype, data):
        tally.nan += sum(map(math.isnan, values))
        tally.inf += sum(map(math.isinf, values))
        values = [value for value in values if math.isfinite(value)]
    if not len(values):
        return
    tally.span(min(values), max(values))
    some = [float(value) for value in values[:: -(-len(values) // picked)]]
    tally.moments_add(len(some), sum(some), sum(value * value for value in some))
    if tally.wants():
        tally.kept.extend(some[:: -(-len(some) // KEPT_OF_PIECE)])


def _all_finite(dtype: str, data: bytes) -> bool:
    """Prove quickly that nothing is NaN or Inf: no word's top byte has all exponent bits that lie in it."""
    if dtype in FLOATS:
        top, mask = data[FLOATS[dtype].item_bytes - 1 :: FLOATS[dtype].item_bytes], 0x7C if dtype == "float16" else 0x7F
        return not any(bytes([word]) in top for word in range(256) if word & mask == mask)
    return not dtype.startswith("float")


def _count_rows(tally: Tally, dtype: str, data: bytes, row_bytes: int) -> None:
    if not row_bytes:
        return
    tally.rows += len(data) // row_bytes
    signed = dtype.startswith(("float", "bfloat"))
    for at in range(0, len(data) - row_bytes + 1, row_bytes):
        if data[at] == 0 and not data[at : at + row_bytes].strip(b"\0\x80"):
            row = data[at : at + row_bytes]
            tally.zero_rows += not any(decode(dtype, row)) if signed else not row.strip(b"\0")
