"""Counting with numpy, where this Python has it: sign and magnitude make integers of floating-point words."""

from __future__ import annotations

import importlib
import os
from typing import Any, Optional, Tuple

from backend.agent.shards.values.numbers import EIGHT_BITS, FLOATS, INTEGERS, decode
from backend.agent.shards.values.tally import KEPT_OF_PIECE, Tally


def load() -> Optional[Any]:
    """Return numpy, or None where this Python has none (or one that does not start)."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here is work for its threads, which it starts at once
    try:
        return importlib.import_module("numpy")
    except Exception:  # a broken installation raises what it likes, and is no reason to tell nothing
        return None


def first_bad(numpy: Any, data: bytes, dtype: str) -> int:
    """Return the number of the first element that is NaN or infinite, or -1; of a type in `FLOATS`."""
    words = numpy.frombuffer(data, "<u%d" % FLOATS[dtype].item_bytes)
    infinite, sign = FLOATS[dtype].infinite, 1 << (8 * words.itemsize - 1)
    top, least = _ends(words)
    if max(top, least - sign) < infinite:
        return -1
    return int(numpy.flatnonzero((words & words.dtype.type(sign - 1)) >= infinite)[0])


def _ends(words: Any) -> Tuple[int, int]:
    """Return the greatest word as a signed and as an unsigned number: the most positive, the most negative."""
    return int(words.view("<i%d" % words.itemsize).max()), int(words.max())


class Counter:
    """Counts pieces of one tensor into its tally."""

    def __init__(self, numpy: Any, tally: Tally, dtype: str) -> None:
        self._np, self._tally, self._dtype = numpy, tally, dtype
        self._words = numpy.dtype("<u%d" % FLOATS[dtype].item_bytes) if dtype in FLOATS else None

    def count(self, data: memoryview, row_bytes: int, picked: int) -> None:
        """Count one piece. `picked` is how many values make up mean and norm."""
        if self._words is not None:
            self._floats(data, row_bytes, picked)
        elif self._dtype in EIGHT_BITS:
            self._eight_bits(data, row_bytes)
        else:
            values = self._np.frombuffer(data, "<" + INTEGERS[self._dtype])
            self._zero_rows(values, row_bytes, -1 if values.dtype.kind == "i" else self._np.iinfo(values.dtype).max)
            self._tally.span(int(values.min()), int(values.max()))
            self._sample(values, picked)

    def _floats(self, data: memoryview, row_bytes: int, picked: int) -> None:
        np, tally = self._np, self._tally
        words = np.frombuffer(data, self._words)
        infinite, sign = FLOATS[self._dtype].infinite, 1 << (8 * words.itemsize - 1)
        self._zero_rows(words, row_bytes, sign - 1)
        top, least = _ends(words)
        if max(top, least - sign) >= infinite:
            size = words & words.dtype.type(sign - 1)
            tally.nan += int((size > infinite).sum())
            tally.inf += int((size == infinite).sum())
            words = words[size < infinite]
            if not words.size:
                return
            top, least = _ends(words)
        # Without a positive word the greatest value is the smallest magnitude, and so without a negative one.
        high = top if top >= 0 else int(words.min())
        low = least if least >= sign else int(words.min())
        tally.span(self._value(low), self._value(high))
        self._sample(words, picked)

    def _value(self, word: int) -> float:
        return float(decode(self._dtype, word.to_bytes(FLOATS[self._dtype].item_bytes, "little"))[0])

    def _values(self, words: Any) -> Any:
        np = self._np
        if self._dtype == "bfloat16":
            return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.ascontiguousarray(words).view("<f%d" % words.itemsize).astype(np.float64)

    def _sample(self, words: Any, picked: int) -> None:
        some = words[:: -(-words.size // picked)]
        values = self._values(some) if self._words is not None else some.astype(self._np.float64)
        self._add(values)

    def _add(self, values: Any) -> None:
        self._tally.moments_add(values.size, float(values.sum()), float(self._np.dot(values, values)))
        if self._tally.wants():
            self._tally.kept.extend(values[:: -(-values.size // KEPT_OF_PIECE)].tolist())

    def _eight_bits(self, data: memoryview, row_bytes: int) -> None:
        """Count each of 256 words, which is exact."""
        np, tally = self._np, self._tally
        words = np.frombuffer(data, np.uint8)
        table = np.array(EIGHT_BITS[self._dtype])
        counts = np.bincount(words, minlength=256)
        tally.nan += int(counts[np.isnan(table)].sum())
        tally.inf += int(counts[np.isinf(table)].sum())
        self._zero_rows(words, row_bytes, 0xFF if "e8m0" in self._dtype else 0x7F)
        there = table[(counts > 0) & np.isfinite(table)]
        if there.size:
            tally.span(float(there.min()), float(there.max()))
            values = table[words[:: max(1, words.size // 65536)]]
            self._add(values[np.isfinite(values)])

    def _zero_rows(self, words: Any, row_bytes: int, mask: int) -> None:
        """Count rows of zeros: the first word of each row picks the few that are worth a full look."""
        if not row_bytes:
            return
        width = row_bytes // words.itemsize
        rows = words[: words.size // width * width].reshape(-1, width)
        self._tally.rows += len(rows)
        bits = words.dtype.type(mask)
        for number in self._np.flatnonzero((rows[:, 0] & bits) == 0):
            self._tally.zero_rows += not (rows[number] & bits).any()
