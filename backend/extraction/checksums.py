"""CRC-32 of two runs of bytes put together, from the CRC-32 of each: the bytes are read once, not twice.

The method is the one of zlib's own crc32_combine: a CRC is a polynomial over GF(2), and following it by n more
bytes multiplies it by x to the power 8n, modulo the CRC's polynomial. It is here because Python has no name
for zlib's.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: in a CRC-32 the highest power is the lowest bit."""


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of A + B, given that of A, that of B, and the length of B."""
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift(size_bytes: int) -> int:
    """Return x to the power of 8 times the size."""
    power, factor = _ONE, _ONE >> 8
    while size_bytes:
        if size_bytes & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        size_bytes >>= 1
    return power
