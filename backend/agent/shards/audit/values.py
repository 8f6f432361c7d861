"""Looking for bad values in bytes, without numpy: exact for NaN, infinity and zeros, and little slower than a disk.

A float's sign and exponent lie in its last byte, and few healthy values have all their exponent bits set, so that
one search of every n-th byte finds the candidates.
"""

from __future__ import annotations

from array import array
from typing import Dict, List, Optional, Tuple

from backend.shardfmt.dtypes import ITEM_BYTES

_TOP = (0x7F, 0xFF)
_WIDE = (0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF)
_NOT_FINITE: Dict[str, Tuple[Tuple[int, ...], int]] = {
    "bfloat16": (_TOP, 0x80),
    "float32": (_TOP, 0x80),
    "float64": (_TOP, 0xF0),
    "float16": (_WIDE, 0),
    "float8_e5m2": (_WIDE, 0),
    "float8_e4m3fn": (_TOP, 0),
    "float8_e4m3fnuz": ((0x80,), 0),
    "float8_e5m2fnuz": ((0x80,), 0),
}
"""By type: the last bytes that a NaN or an infinity can have, and the least value of the byte before."""

_INTS = {"int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "B"}
_LISTED = 8192
"""Numbers that are made at once."""


def first_bad(data: bytes, dtype: str) -> int:
    """Return the number of the first element that is NaN or infinite, or -1. The bytes are little-endian."""
    known = _NOT_FINITE.get(dtype)
    if known is None:
        return -1
    tops, least = known
    item = ITEM_BYTES[dtype]
    last = data[item - 1 :: item]
    found = [at for at in (_first(last, top, least, data, item) for top in tops) if at >= 0]
    return min(found) if found else -1


def _first(last: bytes, top: int, least: int, data: bytes, item: int) -> int:
    at = last.find(top)
    while at >= 0 and least and data[at * item + item - 2] < least:
        at = last.find(top, at + 1)
    return at


def zero_rows(data: bytes, row_bytes: int) -> List[int]:
    """Return the numbers of the rows that are all zero. The rows' first bytes spare a look at most of them."""
    zeros = bytes(row_bytes)
    lead = min(row_bytes, 64)
    return [
        at // row_bytes
        for at in range(0, len(data) - row_bytes + 1, row_bytes)
        if data[at : at + lead] == zeros[:lead] and data[at : at + row_bytes] == zeros
    ]


def integers(data: bytes, dtype: str) -> "array[int]":
    """Return the numbers of an integer tensor. Raises KeyError for a type that is none."""
    found: "array[int]" = array(_INTS[dtype])
    found.frombytes(data)
    return found


def ends(numbers: "array[int]") -> Tuple[int, int]:
    """Return the least and the greatest. A list's numbers are compared twice as fast as an array's."""
    least, most = numbers[0], numbers[0]
    for at in range(0, len(numbers), _LISTED):
        some = numbers[at : at + _LISTED].tolist()
        least, most = min(least, min(some)), max(most, max(some))
    return least, most


def binary(data: bytes, dtype: str) -> Optional[bytes]:
    """Return a byte for each number of a tensor that holds 0 and 1 only, else None."""
    item = ITEM_BYTES[dtype] if dtype in _INTS else 0
    if not item:
        return None
    low = data[::item]
    ones = low.count(1)
    return low if ones + low.count(0) == len(low) and data.count(0) == len(data) - ones else None
