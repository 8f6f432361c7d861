"""The directory of a zip archive, and where its records lie. torch.save and numpy both write such archives."""

from __future__ import annotations

import struct
import zlib
from typing import List, NamedTuple, Optional, Tuple

from backend.agent.shards.findings import WARNING
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import torchzip as fmt

MAX_CONTENT_BYTES = 16 << 20
MAX_DIRECTORY_BYTES = 16 << 20
MAX_RECORDS = 200_000

_ENCRYPTED = 1
DEFLATED = 8


class Record(NamedTuple):
    """A record as the directory states it."""

    name: str
    header_at: int
    size_bytes: int
    packed_bytes: int
    crc32: int
    method: int
    flags: int


def read_directory(source: Source, report: Report) -> Optional[List[Record]]:
    """Read the directory, or return None where there is none to be trusted."""
    tail_at, tail = source.tail()
    at = tail.rfind(fmt.END_MAGIC)
    if at < 0 or at + fmt.END_BYTES > len(tail):
        return None
    total, size, begin, comment = struct.unpack("<HIIH", tail[at + 10 : at + fmt.END_BYTES])
    after = source.size_bytes - (tail_at + at + fmt.END_BYTES + comment)
    if after:
        report.note("trailing-bytes", "%d bytes follow the end of the archive" % after, WARNING)
    if tail[max(0, at - fmt.LOCATOR_BYTES) :].startswith(fmt.LOCATOR_MAGIC):
        (end64_at,) = struct.unpack("<Q", tail[at - 12 : at - 4])
        end64 = source.read(end64_at, fmt.END64_BYTES)
        if len(end64) != fmt.END64_BYTES or not end64.startswith(fmt.END64_MAGIC):
            report.note("bad-directory", "its zip64 end record is not where it should be")
            return None
        total, size, begin = struct.unpack("<QQQ", end64[32:56])
    if size > MAX_DIRECTORY_BYTES or total > MAX_RECORDS or begin + size > source.size_bytes:
        report.note("bad-directory", "its directory of %d records and %d bytes does not fit it" % (total, size))
        return None
    records = _records(source.read(begin, size), begin, report)
    if records is not None and len(records) > MAX_RECORDS:
        report.note("bad-directory", "its directory holds more than %d records" % MAX_RECORDS)
        return None
    return records


def _records(data: bytes, directory_at: int, report: Report) -> Optional[List[Record]]:
    records: List[Record] = []
    seen, at = set(), 0
    while at < len(data):
        if data[at : at + 4] != fmt.CENTRAL_MAGIC or at + fmt.CENTRAL_BYTES > len(data):
            report.note("bad-directory", "its directory is damaged after %d records" % len(records))
            return None
        flags, method = struct.unpack("<HH", data[at + 8 : at + 12])
        crc, packed, size, name_len, extra_len, comment_len = struct.unpack("<IIIHHH", data[at + 16 : at + 34])
        (header_at,) = struct.unpack("<I", data[at + 42 : at + 46])
        extra_at = at + fmt.CENTRAL_BYTES + name_len
        name = data[at + fmt.CENTRAL_BYTES : extra_at].decode("utf-8", "replace")
        size, packed, header_at = _zip64(data[extra_at : extra_at + extra_len], size, packed, header_at)
        if name in seen:
            report.note(
                "duplicate-record", "%s is there twice: readers differ on which counts" % name[:100], subject=name
            )
        elif header_at + fmt.LOCAL_BYTES + packed > directory_at:
            report.note("record-outside", "%s does not fit before the directory" % name[:100], subject=name)
        else:
            records.append(Record(name, header_at, size, packed, crc, method, flags))
        seen.add(name)
        at = extra_at + extra_len + comment_len
    return records


def _zip64(extra: bytes, size: int, packed: int, header_at: int) -> Tuple[int, int, int]:
    """Take the numbers that did not fit 32 bits from the zip64 field, which holds only these, in order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack("<HH", extra[at : at + 4])
        if tag == 1:
            body = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack("<%dQ" % (len(body) // 8), body[: len(body) // 8 * 8]))
            size = next(wide, size) if size == fmt.U32 else size
            packed = next(wide, packed) if packed == fmt.U32 else packed
            header_at = next(wide, header_at) if header_at == fmt.U32 else header_at
        at += 4 + length
    return size, packed, header_at


def data_at(source: Source, report: Report, record: Record) -> Optional[int]:
    """Find a record's data by its own header, as torch does; None where that header is damaged.

    A header whose lengths are zeroed sends torch.load(mmap=True) to other bytes without any error, so the
    whole header is held against the directory.
    """
    name, subject = record.name.encode("utf-8", "replace"), record.name[:100]
    header = source.read(record.header_at, fmt.LOCAL_BYTES + len(name))
    if not header.startswith(fmt.LOCAL_MAGIC) or len(header) < fmt.LOCAL_BYTES:
        what = "zeros are" if header and not header.strip(b"\0") else "something else is"
        report.note("bad-local-header", "%s: %s where its header should be" % (subject, what), subject=record.name)
        return None
    flags, method = struct.unpack("<HH", header[6:10])
    name_len, extra_len = struct.unpack("<HH", header[26:30])
    if header[30 : 30 + name_len] != name:
        report.note("name-mismatch", "%s: its own header says another name" % subject, subject=record.name)
    elif not _extra_holds(source.read(record.header_at + fmt.LOCAL_BYTES + len(name), extra_len), extra_len):
        report.note("bad-local-header", "%s: its own header is damaged" % subject, subject=record.name)
        return None
    if (record.flags | flags) & _ENCRYPTED:
        report.note("encrypted-flag", "%s is marked as encrypted" % subject, subject=record.name)
    if method != record.method:
        text = "%s: its own header and the directory disagree on how it is packed" % subject
        report.note("header-mismatch", text, subject=record.name)
    return record.header_at + fmt.LOCAL_BYTES + int(name_len) + int(extra_len)


def _extra_holds(extra: bytes, size: int) -> bool:
    """Say whether the fields of a header's extra part fill it exactly."""
    at = 0
    while at + 4 <= len(extra):
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    return at == size == len(extra)


def content(source: Source, report: Report, record: Record) -> bytes:
    """Return a small record's bytes, checked. Raises Unreadable where they cannot be had."""
    if max(record.size_bytes, record.packed_bytes) > MAX_CONTENT_BYTES:
        raise Unreadable("too-large", "its description (%s) has %d bytes" % (record.name[:100], record.size_bytes))
    at = data_at(source, report, record)
    if at is None:
        raise Unreadable("bad-local-header", "%s cannot be found in it" % record.name[:100])
    data = source.read(at, record.packed_bytes)
    if record.method == DEFLATED:
        try:
            data = zlib.decompressobj(-15).decompress(data, max(record.size_bytes, 1))
        except zlib.error:
            raise Unreadable("bad-record", "%s cannot be inflated" % record.name[:100]) from None
    elif record.method:
        raise Unreadable("bad-record", "%s is packed by a method that torch does not use" % record.name[:100])
    if record.crc32 and zlib.crc32(data) != record.crc32:
        text = "%s does not have the checksum that the directory states" % record.name[:100]
        report.note("crc-mismatch", text, subject=record.name)
    return data


def note_overlaps(report: Report, placed: List[Tuple[int, int, str]]) -> None:
    """Say where records share bytes. `placed` are (header, end of data, name)."""
    placed.sort()
    for number in range(1, len(placed)):
        (_, end, name), (after, _, other) = placed[number - 1 : number + 1]
        if end > after:
            report.note("record-overlap", "%s and %s share bytes" % (name[:80], other[:80]), subject=other)
