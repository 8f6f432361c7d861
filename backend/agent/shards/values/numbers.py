"""Element types as numbers, by the standard library alone."""

from __future__ import annotations

import array
import math
import struct
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple


class Bits(NamedTuple):
    """Where a floating-point word keeps its exponent: sign-stripped words from `infinite` on are Inf or NaN."""

    item_bytes: int
    infinite: int


FLOATS: Dict[str, Bits] = {
    "bfloat16": Bits(2, 0x7F80),
    "float16": Bits(2, 0x7C00),
    "float32": Bits(4, 0x7F800000),
    "float64": Bits(8, 0x7FF0000000000000),
}
INTEGERS: Dict[str, str] = {
    "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B",
    "bool": "B", "qint8": "b", "quint8": "B", "qint32": "i",
}  # fmt: skip
"""The array code of each integer type; quantized ones are shown as they are stored."""

COMPLEX: Dict[str, str] = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}
"""The type of both parts of a complex number. Their statistics are those of the parts."""


def _eight_bits(exponent_bits: int, bias: int, special: Callable[[int], float]) -> List[float]:
    """Return the value of each of 256 words: sign, exponent, mantissa. `special` gives NaN, Inf or 0.0 (no)."""
    mantissa_bits = 7 - exponent_bits
    values = []
    for word in range(256):
        exponent = word >> mantissa_bits & ((1 << exponent_bits) - 1)
        fraction = (word & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        size = math.ldexp(fraction + 1 if exponent else fraction, (exponent or 1) - bias)
        values.append(special(word) or (-size if word & 0x80 else size))
    return values


def _e5m2(word: int) -> float:
    if word & 0x7F == 0x7C:
        return -math.inf if word & 0x80 else math.inf
    return math.nan if word & 0x7F > 0x7C else 0.0


EIGHT_BITS: Dict[str, List[float]] = {
    "float8_e4m3fn": _eight_bits(4, 7, lambda word: math.nan if word & 0x7F == 0x7F else 0.0),
    "float8_e5m2": _eight_bits(5, 15, _e5m2),
    "float8_e4m3fnuz": _eight_bits(4, 8, lambda word: math.nan if word == 0x80 else 0.0),
    "float8_e5m2fnuz": _eight_bits(5, 16, lambda word: math.nan if word == 0x80 else 0.0),
    "float8_e8m0fnu": [math.ldexp(1.0, word - 127) for word in range(255)] + [math.nan],
}
"""The value of each word of the one-byte types."""


def known(dtype: str) -> bool:
    """Say whether values of a type can be told."""
    return dtype in FLOATS or dtype in INTEGERS or dtype in COMPLEX or dtype in EIGHT_BITS


def part_of(dtype: str) -> Tuple[str, int]:
    """Return the type whose numbers are counted, and how many make an element."""
    return (COMPLEX[dtype], 2) if dtype in COMPLEX else (dtype, 1)


def decode(dtype: str, data: bytes) -> Sequence[Any]:
    """Return little-endian bytes of a real type as numbers."""
    if dtype in EIGHT_BITS:
        table = EIGHT_BITS[dtype]
        return [table[word] for word in data]
    if dtype == "float16":
        return struct.unpack("<%de" % (len(data) // 2), data)
    code = INTEGERS.get(dtype) or ("d" if dtype == "float64" else "f")
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        data = bytes(wide)
    found = array.array(code)
    found.frombytes(data)
    return found


def told(dtype: str, data: bytes) -> Any:
    """Return one element as JSON may hold it: a number, or text where it is complex or not finite."""
    if dtype in COMPLEX:
        real, imaginary = decode(COMPLEX[dtype], data)
        return "%r%s%rj" % (real, "" if imaginary < 0 or math.isnan(imaginary) else "+", imaginary)
    value = decode(dtype, data)[0]
    return bool(value) if dtype == "bool" else finite(value)


def finite(value: Any) -> Any:
    """Return a number as JSON may hold it: text where it is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
