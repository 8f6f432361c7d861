"""CRC-32 of two runs of bytes, one behind the other, from those of each: no byte is read again.

A CRC is a remainder of polynomials over GF(2), and to be followed by n bytes multiplies it by x to the power of 8n.
Here as everywhere in zip and gzip the highest bit stands for x to the power of 0 (polynomial 0xEDB88320).
"""

from __future__ import annotations

from typing import List

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def _times(a: int, b: int) -> int:
    """Multiply modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _squares(count: int) -> List[int]:
    """Return x to the powers of 8, 16, 32, ..."""
    found = [_X]
    for _ in range(count + 2):
        found.append(_times(found[-1], found[-1]))
    return found[3:]


_POWERS = _squares(48)
"""For runs of up to 2 to the power of 48 bytes."""


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two runs in a row, of which the second has so many bytes."""
    for number, power in enumerate(_POWERS):
        if second_bytes >> number & 1:
            first = _times(power, first)
    return first ^ second
