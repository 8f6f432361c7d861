"""Counting with torch, on a host whose Python has that and no numpy: one pass finds least, greatest and any NaN.

torch takes seconds to start, so it is asked only where there is much to count.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Optional

from backend.agent.shards.values.numbers import FLOATS
from backend.agent.shards.values.tally import KEPT_OF_PIECE, Tally, count_plain

WORTH_BYTES = 128 << 20
"""torch starts in some 3 s (facts: shards, section 1.5), in which the standard library counts half of that."""

_KNOWN = frozenset(FLOATS) | {"int64", "int32", "int16", "int8", "uint8"}


def load(wanted_bytes: int) -> Optional[Any]:
    """Return torch, or None where there is too little to count, or no torch that starts."""
    if wanted_bytes < WORTH_BYTES or importlib.util.find_spec("torch") is None:
        return None
    try:
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)  # the pieces are shared out already
    except Exception:  # a broken installation raises what it likes, and is no reason to tell nothing
        return None
    return torch


class Counter:
    """Counts pieces of one tensor into its tally."""

    def __init__(self, torch: Any, tally: Tally, dtype: str) -> None:
        self._torch, self._tally, self._dtype = torch, tally, dtype

    def count(self, data: memoryview, row_bytes: int, picked: int) -> None:
        """Count one piece. `picked` is how many values make up mean and norm."""
        if self._dtype not in _KNOWN:
            count_plain(self._tally, self._dtype, bytes(data), row_bytes, picked)
            return
        torch, tally = self._torch, self._tally
        values = torch.frombuffer(data, dtype=getattr(torch, self._dtype))
        self._zero_rows(values, row_bytes)
        low, high = (end.item() for end in torch.aminmax(values))
        if self._dtype in FLOATS and not low - low == high - high == 0:  # NaN, which spreads, or an infinity
            tally.nan += int(values.isnan().sum())
            tally.inf += int(values.isinf().sum())
            values = values[values.isfinite()]
            if not values.numel():
                return
            low, high = (end.item() for end in torch.aminmax(values))
        tally.span(low, high)
        some = values[:: -(-values.numel() // picked)].to(torch.float64)
        tally.moments_add(some.numel(), float(some.sum()), float(some.dot(some)))
        if tally.wants():
            tally.kept.extend(some[:: -(-some.numel() // KEPT_OF_PIECE)].tolist())

    def _zero_rows(self, values: Any, row_bytes: int) -> None:
        """Count rows of zeros: the first value of each row picks the few that are worth a full look."""
        if row_bytes:
            width = row_bytes // values.element_size()
            rows = values[: values.numel() // width * width].view(-1, width)
            self._tally.rows += len(rows)
            for number in (rows[:, 0] == 0).nonzero().flatten().tolist():
                self._tally.zero_rows += not bool(rows[number].any())
