"""Coarser rows from the rows of every second: of each column its mean, its lowest and its highest value."""

from __future__ import annotations

from typing import Dict, List, Optional

from backend.wire import UNSUPPORTED
from backend.wire.flight import FAILED, Row, Value

LOW, HIGH = ":min", ":max"
"""Endings of the columns that stand beside a mean; left out where all values of a row's span are equal."""

MASKS = ("clock_reasons",)
"""Columns that are bits: their mean would be none. The bits that were set at any time stand for them."""


class Coarse:
    """Gathers rows until a span of `step_s`, aligned to the clock, is over."""

    def __init__(self, step_s: int) -> None:
        self._step_s = step_s
        self._rows: List[Dict[str, Value]] = []
        self._begin: Optional[float] = None

    def feed(self, at: float, values: Dict[str, Value]) -> Optional[Row]:
        """Take a row. Returns the row of the span before where this one begins another."""
        begin = at // self._step_s * self._step_s
        done: Optional[Row] = None
        if self._begin is not None and begin != self._begin:
            done = (self._begin, summary(self._rows))
            self._rows = []
        self._begin = begin
        self._rows.append(values)
        return done


def summary(rows: List[Dict[str, Value]]) -> Dict[str, Value]:
    """Make one row of several. A column with no number says why: it failed, or is not offered."""
    result: Dict[str, Value] = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        found = [row[name] for row in rows if name in row]
        numbers = [value for value in found if isinstance(value, (int, float))]
        if not numbers:
            result[name] = FAILED if FAILED in found else UNSUPPORTED if UNSUPPORTED in found else None
        elif name.endswith(MASKS):
            result[name] = _either(numbers)
        else:
            low, high = min(numbers), max(numbers)
            result[name] = low if low == high else rounded(name, sum(numbers) / len(numbers))
            if low != high:
                result[name + LOW], result[name + HIGH] = low, high
    return result


def _either(masks: List[float]) -> int:
    bits = 0
    for mask in masks:
        bits |= int(mask)
    return bits


PLACES = (
    ("_bytes", 0), ("bytes_per_s", 0), ("_mhz", 0), ("_w", 1), ("_c", 1), ("_percent", 1), ("tokens_per_s", 1),
    ("samples_per_s", 3), ("steps_per_s", 3), ("_at", 0), ("load1", 2), ("_s", 1), (".loss", 4), (".accuracy", 4),
    ("learning_rate", 9),
)  # fmt: skip
"""Decimals that a reading deserves, by what its name ends in: digits below its noise would only take room."""


def rounded(name: str, value: float) -> float:
    """Round to the decimals that a column deserves, two where nothing is known of it."""
    places = next((places for end, places in PLACES if name.endswith(end)), 2)
    return round(value, places) if places else round(value)
