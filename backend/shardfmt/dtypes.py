"""Names and sizes of the element types that torch and safetensors write."""

from __future__ import annotations

from typing import Dict, Optional, Sequence

ITEM_BYTES: Dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the type. Packed four-bit types: one byte for two elements."""

STORAGE_CLASSES: Dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",  # counted in bytes; the tensor names its own type
}
"""The storage classes a torch pickle names, and the type of their elements."""

CLASS_OF: Dict[str, str] = {dtype: name for name, dtype in STORAGE_CLASSES.items() if name != "UntypedStorage"}
"""The storage class that torch.save names for a type; types without one go through UntypedStorage."""

SAFETENSORS: Dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The types that a safetensors header names, as torch calls them. Others are shown by their own name."""

NUMPY_TYPES: Dict[str, str] = {
    "f8": "float64", "f4": "float32", "f2": "float16",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
    "c16": "complex128", "c8": "complex64",
}  # fmt: skip
"""The types of numpy arrays, by the code after the byte order."""


def is_floating(dtype: str) -> bool:
    """Say whether a type holds floating-point numbers, for which zeros in whole pages are no data."""
    return dtype.startswith(("float", "bfloat", "complex"))


MAX_COUNT = 1 << 62
"""No tensor has more elements than this: torch counts in signed 64 bits."""


def count(shape: Sequence[int]) -> Optional[int]:
    """Return how many elements a shape holds, or None where that is more than MAX_COUNT."""
    total = 1
    for size in shape:
        total *= size
        if total > MAX_COUNT and 0 not in shape:
            return None
    return total
