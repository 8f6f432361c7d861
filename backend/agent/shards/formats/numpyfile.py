"""numpy's files: an array (.npy), or a zip archive of them (.npz). A structured or object type is named, not read."""

from __future__ import annotations

import re
import zlib
from typing import List, NamedTuple, Optional, Tuple

from backend.agent.shards.findings import ERROR, WARNING
from backend.agent.shards.formats.directory import DEFLATED, Record, data_at
from backend.agent.shards.pickles import walk
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Part, Report, entry
from backend.agent.shards.source import Source
from backend.shardfmt.dtypes import ITEM_BYTES, MAX_COUNT, NUMPY_TYPES, count, is_floating
from backend.wire import printable

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 64 * 1024
MAX_MEMBERS = 1000
_HEADER = re.compile(
    r"\s*\{\s*'descr':\s*(?P<descr>'[^']{1,40}'|\[.*\]),\s*'fortran_order':\s*(?P<order>True|False),"
    r"\s*'shape':\s*\((?P<shape>[0-9, ]{0,400})\),?\s*\}\s*",
    re.DOTALL,
)


class Header(NamedTuple):
    """What an array's header says. `dtype` is torch's name, or numpy's own where there is none."""

    dtype: str
    item_bytes: int
    shape: Tuple[int, ...]
    fortran: bool
    big_endian: bool
    objects: bool
    data_at: int

    @property
    def size_bytes(self) -> Optional[int]:
        """Return the bytes of the array, or None where they cannot be counted."""
        total = count(self.shape)
        return None if total is None else total * self.item_bytes


def header_of(start: bytes) -> Header:
    """Read the header at the start of an array. Raises Unreadable."""
    if not start.startswith(MAGIC) or len(start) < 12:
        raise Unreadable("bad-header", "an array without numpy's header")
    wide = start[6] >= 2
    size = int.from_bytes(start[8:12] if wide else start[8:10], "little")
    begin = 12 if wide else 10
    if size > MAX_HEADER_BYTES:
        raise Unreadable("too-large", "a numpy header of %d bytes" % size)
    if len(start) < begin + size:
        raise Unreadable("truncated", "the file ends inside its numpy header")
    found = _HEADER.fullmatch(start[begin : begin + size].decode("utf-8", "replace"))
    if found is None:
        raise Unreadable("bad-header", "a numpy header that numpy does not write")
    shape = tuple(int(word) for word in found.group("shape").split(",") if word.strip() and len(word) < 25)
    if any(size > MAX_COUNT for size in shape):
        raise Unreadable("bad-header", "a numpy header with a size that is no count")
    descr = found.group("descr").strip("'")
    name = NUMPY_TYPES.get(descr.lstrip("<>=|"), "")
    objects = "O" in descr
    fortran = found.group("order") == "True"
    return Header(
        name or printable(descr, 40), ITEM_BYTES.get(name, 0), shape, fortran, descr[0] == ">", objects, begin + size
    )


def needed_bytes(source: Source) -> int:
    """Return the size of a whole .npy file. Raises Unreadable."""
    header = header_of(source.read(0, MAX_HEADER_BYTES + 12))
    return header.data_at + (header.size_bytes or 0)


def read(source: Source, report: Report) -> None:
    """Fill the report from a .npy file. Raises Unreadable."""
    report.format = "numpy"
    header = header_of(source.read(0, min(source.size_bytes, MAX_HEADER_BYTES + 12)))
    there = source.size_bytes - header.data_at
    _add(report, "(array)", header, header.data_at, there, None)
    needed = header.size_bytes
    if needed is not None and header.item_bytes and there < needed:
        text = "cut off: %d of %d bytes are there" % (source.size_bytes, header.data_at + needed)
        report.note("truncated", text)
    elif needed is not None and header.item_bytes and there > needed:
        report.note("trailing-bytes", "%d bytes follow the array" % (there - needed))


def is_archive(records: List[Record]) -> bool:
    """Say whether a zip archive is what numpy.savez writes."""
    return bool(records) and all(record.name.endswith(".npy") for record in records)


def read_archive(source: Source, report: Report, records: List[Record]) -> None:
    """Fill the report from a .npz file's records."""
    report.format = "numpy archive"
    for record in records[:MAX_MEMBERS]:
        key = walk.key_of(record.name[: -len(".npy")])
        at = data_at(source, report, record)
        if at is None:
            continue
        try:
            _add_member(source, report, record, key, at)
        except Unreadable as problem:
            report.note(problem.code, "%s: %s" % (record.name[:100], problem.text), ERROR, key)
    if len(records) > MAX_MEMBERS:
        report.note(
            "not-checked", "only the first %d of %d arrays were looked at" % (MAX_MEMBERS, len(records)), WARNING
        )


def _add_member(source: Source, report: Report, record: Record, key: str, at: int) -> None:
    start = source.read(at, min(record.packed_bytes, 4096))
    if record.method == DEFLATED:
        try:
            start = zlib.decompressobj(-15).decompress(start, 4096)
        except zlib.error:
            raise Unreadable("bad-record", "cannot be inflated") from None
        header = header_of(start)
        _add(report, key, header, None, record.size_bytes - header.data_at, None)
    elif record.method:
        raise Unreadable("bad-record", "packed by a method that numpy does not use")
    else:
        header = header_of(start)
        _add(report, key, header, at + header.data_at, record.size_bytes - header.data_at, record)
    needed = header.size_bytes
    if header.item_bytes and needed != record.size_bytes - header.data_at:
        there = record.size_bytes - header.data_at
        report.note("storage-size", "%s has %d bytes, and its shape needs %s" % (key, there, needed), ERROR, key)


def _add(
    report: Report, key: str, header: Header, at: Optional[int], there_bytes: int, record: Optional[Record]
) -> None:
    size = header.size_bytes if header.item_bytes else there_bytes
    row = entry(key, header.dtype, header.shape, size)
    whole = size is not None and size <= there_bytes
    row.update(stride=_strides(header), offset=at, storage=key, whole=whole, contiguous=not header.fortran)
    if header.objects:
        row["note"] = "objects"
        report.note("unknown-global", "%s holds Python objects: loading it runs a pickle" % key, ERROR, key)
    elif not header.item_bytes:
        report.note("unknown-type", "%s has the type %s, which is not known here" % (key, header.dtype), WARNING, key)
    if size is None:
        report.note("shape-overflow", "%s has more elements than can be counted" % key, ERROR, key)
    if header.big_endian:
        report.note("big-endian", "%s: its numbers are big-endian" % key, WARNING, key)
    report.stored_bytes += max(0, min(size or 0, there_bytes))
    report.tensor(row)
    if record is not None:
        first = record.size_bytes - there_bytes
        floating = is_floating(header.dtype)
        report.parts.append(Part(record.name, key, (at or 0) - first, record.size_bytes, record.crc32, floating))
    elif at is not None and there_bytes > 0:
        report.parts.append(Part("", key, at, min(size or 0, there_bytes), None, is_floating(header.dtype)))


def _strides(header: Header) -> List[int]:
    strides, step = [], 1
    for size in header.shape if header.fortran else header.shape[::-1]:
        strides.append(step)
        step = min(step * max(size, 1), MAX_COUNT)
    return strides if header.fortran else strides[::-1]
