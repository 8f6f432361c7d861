"""bfloat16 as words: rounding to it, and reading it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def bfloat16_words(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16, half to even, and return the words. NaN stays NaN, too large becomes infinite.

    Two roundings (float64 to float32 to bfloat16) can differ from one; the words are what two give,
    everywhere.
    """
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
    return rounded


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return values as float32; uint16 are bfloat16's words."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
