"""The pickle that torch.save writes for a flat dictionary of plain tensors: protocol 2, to the byte.

It is written without torch, so that an extractor needs only numpy. The order of the memo follows CPython's
pickler: a value is memoised when it is first written, and a name met again is fetched. The same walk makes a pattern
that finds such pickles again, whatever their sizes.
"""

from __future__ import annotations

import re
import struct
from typing import Dict, List, NamedTuple, Sequence, Tuple

from backend.shardfmt.dtypes import CLASS_OF

_MAX_BATCH = 1000  # CPython writes dictionary items in batches of this many


class TensorSpec(NamedTuple):
    """One contiguous tensor that owns its storage."""

    key: str
    dtype: str
    shape: Tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        total = 1
        for size in self.shape:
            total *= size
        return total


def pickle_of(tensors: Sequence[TensorSpec]) -> bytes:
    """Return data.pkl for a dictionary of tensors whose storages are "0", "1", ... in order.

    Raises ValueError for a type without a storage class of its own (the fp8 types) and for over 1,000
    tensors.
    """
    return _written(_Writer(), tensors)


def pattern_of(tensors: Sequence[TensorSpec]) -> "re.Pattern[bytes]":
    """Return what matches the pickle of such tensors in all sizes below 2 to the power of 31.

    It has a group for each number, opcode included: of each tensor its elements, its sizes, its strides.
    `numbers_of` reads them. Raises ValueError as `pickle_of` does.
    """
    return re.compile(_written(_Pattern(), tensors), re.DOTALL)


def numbers_of(found: "re.Match[bytes]") -> List[int]:
    """Return the numbers that a pattern has found."""
    return [int.from_bytes(group[1:], "little") for group in found.groups()]


def _written(out: "_Writer", tensors: Sequence[TensorSpec]) -> bytes:
    if len(tensors) > _MAX_BATCH:
        raise ValueError("%d tensors: only %d can be written in one dictionary" % (len(tensors), _MAX_BATCH))
    out.raw(b"\x80\x02}")
    out.memoise()
    if tensors:
        _items(out, tensors)
    out.raw(b".")
    return bytes(out.data)


def _items(out: "_Writer", tensors: Sequence[TensorSpec]) -> None:
    several = len(tensors) > 1
    if several:
        out.raw(b"(")
    for number, tensor in enumerate(tensors):
        if tensor.dtype not in CLASS_OF:
            raise ValueError("%s has no storage class of its own in torch's pickle" % tensor.dtype)
        out.text(tensor.key)
        _tensor(out, tensor, str(number))
    out.raw(b"u" if several else b"s")


def _tensor(out: "_Writer", tensor: TensorSpec, storage: str) -> None:
    """Write _rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())."""
    out.name("torch._utils", "_rebuild_tensor_v2")
    out.raw(b"((")
    out.shared_text("storage")
    out.name("torch", CLASS_OF[tensor.dtype])
    out.text(storage)
    out.shared_text("cpu")
    out.number(tensor.numel)
    out.raw(b"t")
    out.memoise()
    out.raw(b"QK\0")  # the offset
    out.numbers(tensor.shape)
    out.numbers(_strides(tensor.shape))
    out.raw(b"\x89")
    out.name("collections", "OrderedDict")
    out.raw(b")R")
    out.memoise()
    out.raw(b"t")
    out.memoise()
    out.raw(b"R")
    out.memoise()


def _strides(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    strides: List[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


class _Writer:
    """Opcodes and the memo."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._memo = 0
        self._known: Dict[Tuple[str, ...], int] = {}

    def raw(self, data: bytes) -> None:
        self.data += data

    def memoise(self) -> None:
        """Number the value on top of the stack."""
        self.raw(b"q%c" % self._memo if self._memo < 256 else b"r" + struct.pack("<I", self._memo))
        self._memo += 1

    def text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self.raw(b"X" + struct.pack("<I", len(raw)) + raw)
        self.memoise()

    def shared_text(self, value: str) -> None:
        """Write a text that torch writes from one constant: fetched where it was written before."""
        if not self._fetch((value,)):
            self.text(value)

    def name(self, module: str, name: str) -> None:
        if not self._fetch((module, name)):
            self.raw(b"c" + module.encode("ascii") + b"\n" + name.encode("ascii") + b"\n")
            self.memoise()

    def number(self, value: int) -> None:
        if value < 1 << 8:
            self.raw(b"K%c" % value)
        elif value < 1 << 16:
            self.raw(b"M" + struct.pack("<H", value))
        elif value < 1 << 31:
            self.raw(b"J" + struct.pack("<i", value))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.raw(b"\x8a%c" % len(raw) + raw)

    def numbers(self, values: Tuple[int, ...]) -> None:
        """Write a tuple of sizes; the empty one is never memoised."""
        if not values:
            self.raw(b")")
            return
        if len(values) > 3:
            self.raw(b"(")
        for value in values:
            self.number(value)
        self.raw({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values), b"t"))
        self.memoise()

    def _fetch(self, words: Tuple[str, ...]) -> bool:
        number = self._known.setdefault(words, self._memo)
        if number == self._memo:
            return False
        self.raw(b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number))
        return True


class _Pattern(_Writer):
    """The opcodes as a pattern, with every number left open."""

    def raw(self, data: bytes) -> None:
        self.data += re.escape(data)

    def number(self, value: int) -> None:
        self.data += rb"(K.|M..|J...[\x00-\x7f])"
