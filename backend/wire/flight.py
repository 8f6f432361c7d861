"""Blocks of a flight record: up to a minute's (or more) rows of named numbers, column by column, with a checksum.

The host writes them to disk, sends them as they are, and the console reads them: both sides know this one layout.
A value is a number, None (not recorded), "unsupported" or "failed": a failed reading is never a number.

    head     magic, bytes of the body, crc32 of all that follows, serial, step in s, rows, first and last time in s
    body     deflated with DICTIONARY: names, kinds, decimals, first values, then each column's deltas

A column is integers after a multiplication by a power of ten; its deltas have the smallest width that holds them all
and are stored byte plane by byte plane, which deflates better. Where values are missing, a byte a row says why.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from backend.wire.telemetry import UNSUPPORTED

Value = Union[int, float, str, None]
Row = Tuple[float, Dict[str, Value]]
"""When (wall time in seconds, to a tenth), and what each column was."""

FAILED = "failed"
MAGIC = b"EZF1"
HEAD = struct.Struct("<4sIIIHHdd")
LARGEST_BODY_BYTES = 16 << 20
LARGEST_NUMBER = 1 << 61
"""What is larger could overflow as a difference; no honest count is."""

TIME = "at"
GPU_KEYS = (
    "memory_used_bytes", "memory_total_bytes", "utilisation_percent", "temperature_c", "power_w", "sm_clock_mhz",
    "clock_reasons", "ecc_uncorrected", "memory_reserved_bytes", "power_limit_w", "ecc_corrected", "remapped_pending",
    "remapped_failed", "recovery_action", "persistence", "mig", "pcie_gen", "pcie_width", "fan_percent",
    "thermal_margin_c", "holders",
)  # fmt: skip
DICTIONARY = "\n".join(
    "gpu%d.%s%s" % (gpu, key, end) for key in GPU_KEYS for end in ("", ":max", ":min") for gpu in range(8)
).encode("ascii")
"""What names deflate against. It is part of the layout: another one needs another MAGIC."""

_WIDTHS = {"0": 0, "b": 1, "h": 2, "i": 4, "q": 8}
_MARKS = {None: 1, UNSUPPORTED: 2, FAILED: 3}
_MEANT: Dict[int, Value] = {1: None, 2: UNSUPPORTED, 3: FAILED}
_MIXED = 4
_FALLBACK_DECIMALS = 3


class Head(NamedTuple):
    """What stands before a block's body. `serial` grows with each block of one writer and step."""

    size: int
    crc: int
    serial: int
    step_s: int
    rows: int
    first: float
    last: float


class FlightError(ValueError):
    """Bytes that are no block."""


def column_order(name: str) -> Tuple[str, str]:
    """Sort the same reading of all GPUs side by side: equal columns then deflate to nothing."""
    group, _, key = name.partition(".")
    return (key, group) if group.startswith("gpu") else (group, key)


def encode_block(step_s: int, serial: int, rows: Sequence[Row]) -> bytes:
    """Write rows as one block. There must be at least one row, in the order of their times."""
    times = [at for at, _ in rows]
    names = sorted({name for _, values in rows for name in values}, key=column_order)
    columns = [_pack([round(at * 10) for at in times])]
    columns += [_pack([values.get(name) for _, values in rows]) for name in names]
    text = "\n".join(names).encode("utf-8")
    body = b"".join(
        [
            struct.pack("<II", len(text), len(columns)),
            text,
            bytes(ord(column.kind) for column in columns),
            bytes(column.decimals for column in columns),
            bytes(column.state for column in columns),
            struct.pack("<%dq" % len(columns), *(column.first for column in columns)),
            *(column.data for column in columns),
        ]
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    packed = packer.compress(body) + packer.flush()
    head = HEAD.pack(MAGIC, len(packed), 0, serial, step_s, len(rows), times[0], times[-1])
    return head[:8] + struct.pack("<I", _checksum(head + packed)) + head[12:] + packed


def read_head(data: bytes, at: int = 0) -> Head:
    """Read the head of the block that begins at an offset. Raises FlightError."""
    if len(data) - at < HEAD.size:
        raise FlightError("cut short in a head")
    magic, *rest = HEAD.unpack_from(data, at)
    if magic != MAGIC:
        raise FlightError("no block begins at %d" % at)
    return Head(*rest)


def whole(data: bytes) -> bool:
    """Say whether these are the bytes of one block, unharmed."""
    try:
        head = read_head(data)
    except FlightError:
        return False
    return len(data) == HEAD.size + head.size and _checksum(data) == head.crc


def _checksum(data: bytes) -> int:
    """Sum up a block but its magic, its length and the sum itself."""
    return zlib.crc32(memoryview(data)[12:])


class Block:
    """One block that was read. Columns are decoded when they are asked for, and kept."""

    def __init__(self, data: bytes) -> None:
        """Check and unpack. Raises FlightError where it is no whole block."""
        self.head = read_head(data)
        if not whole(data):
            raise FlightError("a block is damaged")
        unpacker = zlib.decompressobj(-15, zdict=DICTIONARY)
        try:
            self._body = unpacker.decompress(data[HEAD.size :], LARGEST_BODY_BYTES)
            self._lay_out()
        except (zlib.error, struct.error, UnicodeDecodeError, IndexError, KeyError, OverflowError) as error:
            raise FlightError("a block cannot be read: %s" % error) from None
        self._decoded: Dict[str, List[Value]] = {}
        self._times: Optional[List[float]] = None

    def _lay_out(self) -> None:
        body, rows = self._body, self.head.rows
        text, count = struct.unpack_from("<II", body)
        at = 8 + text
        self.names = body[8:at].decode("utf-8").split("\n") if text else []
        if count != len(self.names) + 1 or not rows:
            raise FlightError("a block's columns do not fit its names")
        kinds, decimals, states = (body[at + part * count : at + (part + 1) * count] for part in range(3))
        firsts = struct.unpack_from("<%dq" % count, body, at + 3 * count)
        at += 11 * count
        self._where: Dict[str, Tuple[str, int, int, int, int]] = {}
        for name, kind, places, state, first in zip([TIME, *self.names], kinds, decimals, states, firsts):
            self._where[name] = (chr(kind), places, state, first, at)
            if places > _FALLBACK_DECIMALS or state > _MIXED:
                raise FlightError("a block has a column of an unknown kind")
            values = 0 if state in _MEANT else rows
            if state == _MIXED:
                values, at = body[at : at + rows].count(0), at + rows
            at += _WIDTHS[chr(kind)] * max(0, values - 1)
        if at != len(body):
            raise FlightError("a block's columns do not fill it")

    @property
    def times(self) -> List[float]:
        """Return the wall time of each row, in seconds."""
        if self._times is None:
            self._times = [float(at) / 10 for at in self.column(TIME)]  # type: ignore[arg-type]
        return self._times

    def has(self, name: str) -> bool:
        """Say whether the block has a column of this name."""
        return name in self._where

    def column(self, name: str) -> List[Value]:
        """Return a column, one value a row; all None where the block has none of that name."""
        if name not in self._decoded:
            where = self._where.get(name)
            self._decoded[name] = [None] * self.head.rows if where is None else self._unpack(*where)
        return self._decoded[name]

    def rows(self) -> List[Row]:
        """Return all of it as rows; what was not recorded is left out."""
        columns = [(name, self.column(name)) for name in self.names]
        return [
            (at, {name: column[number] for name, column in columns if column[number] is not None})
            for number, at in enumerate(self.times)
        ]

    def _unpack(self, kind: str, decimals: int, state: int, first: int, at: int) -> List[Value]:
        rows = self.head.rows
        if state in _MEANT:
            return [_MEANT[state]] * rows
        marks = b""
        if state == _MIXED:
            marks, at = self._body[at : at + rows], at + rows
        numbers = self._numbers(kind, first, at, marks.count(0) if marks else rows)
        values: List[Value] = [*numbers] if not decimals else [number / 10**decimals for number in numbers]
        if not marks:
            return values
        left = iter(values)
        return [_MEANT.get(mark) if mark else next(left) for mark in marks]

    def _numbers(self, kind: str, first: int, at: int, count: int) -> List[int]:
        if kind == "0" or count < 2:
            return [first] * count
        width = _WIDTHS[kind]
        planes = self._body[at : at + width * (count - 1)]
        data = bytearray(len(planes))
        for byte in range(width):
            data[byte::width] = planes[byte * (count - 1) : (byte + 1) * (count - 1)]
        return list(accumulate([first, *struct.unpack("<%d%s" % (count - 1, kind), data)]))


class _Packed(NamedTuple):
    kind: str
    decimals: int
    state: int
    first: int
    data: bytes


def _pack(values: Sequence[Value]) -> _Packed:
    marks = [_mark(value) for value in values]
    numbers: List[Any] = [value for value, mark in zip(values, marks) if not mark]
    if not numbers:
        state = marks[0] if len(set(marks)) == 1 else _MIXED
        return _Packed("0", 0, state, 0, bytes(marks) if state == _MIXED else b"")
    decimals = _decimals(numbers)
    whole = [round(number * 10**decimals) for number in numbers] if decimals else [int(n) for n in numbers]
    deltas = [after - before for before, after in zip(whole, whole[1:])]
    most = max([delta if delta >= 0 else -delta - 1 for delta in deltas], default=0)
    kind = "0" if not any(deltas) else next(k for k in "bhiq" if most < 1 << (8 * _WIDTHS[k] - 1))
    data = b"" if kind == "0" else struct.pack("<%d%s" % (len(deltas), kind), *deltas)
    width = _WIDTHS[kind]
    planes = b"".join(data[byte::width] for byte in range(width))
    if any(marks):
        return _Packed(kind, decimals, _MIXED, whole[0], bytes(marks) + planes)
    return _Packed(kind, decimals, 0, whole[0], planes)


def _mark(value: Value) -> int:
    """Return 0 for a number, else why there is none. What no column can hold has failed."""
    if value is None or isinstance(value, str):
        return _MARKS.get(value, 3)
    if isinstance(value, float) and (value != value or abs(value) >= LARGEST_NUMBER / 1000):
        return 3
    return 0 if abs(value) < LARGEST_NUMBER / 1000 else 3


def _decimals(numbers: Sequence[Union[int, float]]) -> int:
    if all(type(number) is int for number in numbers):
        return 0
    for places in range(_FALLBACK_DECIMALS):
        scale = 10**places
        if all(abs(number * scale - round(number * scale)) < 1e-6 for number in numbers):
            return places
    return _FALLBACK_DECIMALS


def as_number(value: Value) -> Optional[float]:
    """Return a value as a number, or None where it is none."""
    return float(value) if isinstance(value, (int, float)) else None


@dataclass
class FlightEvent:
    """Something that happened on a host. `kind` is run, reset, gpu, driver, xid, host or recorder; `level` info, warn
    or bad; `at` wall time in seconds. `run` and `gpu` say whom it is about, where it is about one."""

    at: float
    kind: str
    level: str
    text: str
    run: str = ""
    gpu: Optional[int] = None
