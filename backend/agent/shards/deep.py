"""The checks that read every byte: checksums where they were stored, and pages of zeros among numbers."""

from __future__ import annotations

import zlib
from typing import Tuple

from backend.agent.shards.findings import ERROR, INFO, WARNING
from backend.agent.shards.inflated import Inflated
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Part, Report
from backend.agent.shards.source import Source

PAGE_BYTES = 4096
"""What a filesystem loses at a time."""

PIECE_BYTES = 1 << 20
_ZEROS = bytes(PAGE_BYTES)


def check(source: Source, report: Report) -> None:
    """Add what reading everything tells. A lost page is zeros; a flipped bit is another checksum."""
    content = report.content
    if isinstance(content, Inflated):
        _check_stream(content, report)
        return
    summed = 0
    for part in report.parts:
        summed += part.crc32 is not None
        _check_part(source, report, part)
    if report.parts and not summed:
        text = "it was written without checksums: a flipped bit among its values cannot be found"
        report.note("no-checksum", text, INFO)


def _check_part(source: Source, report: Report, part: Part) -> None:
    crc, zero_pages, first = 0, 0, -1
    at, end = part.at, part.at + part.size_bytes
    while at < end:
        size = min(PIECE_BYTES - at % PAGE_BYTES, end - at)
        data = source.read(at, size)
        if len(data) < size:
            report.note("truncated", "%s ends while it is read" % part.key, ERROR, part.key)
            return
        crc = zlib.crc32(data, crc) if part.crc32 is not None else 0
        if part.floating:
            found, where = _zero_pages(data, -at % PAGE_BYTES)
            first = at + where if found and first < 0 else first
            zero_pages += found
        at += size
    if part.crc32 is not None:
        report.sums.append((part.at, part.size_bytes, crc))
    changed = part.crc32 is not None and crc != part.crc32
    if changed:
        text = "%s (%s) does not have the checksum that was stored: its values changed after they were written"
        report.note("crc-mismatch", text % (part.key, part.name), ERROR, part.key)
    if zero_pages:
        text = "%s has %d pages of 4 KiB that are all zero, the first at byte %d of the file"
        level = WARNING if part.crc32 is not None and not changed else ERROR
        report.note("zero-pages", text % (part.key, zero_pages, first), level, part.key)


def _zero_pages(data: bytes, begin: int) -> Tuple[int, int]:
    """Count the whole pages of zeros from `begin` on, and say where the first is."""
    found, first = 0, 0
    for at in range(begin, len(data) - PAGE_BYTES + 1, PAGE_BYTES):
        if data[at] == 0 and data[at : at + PAGE_BYTES] == _ZEROS:
            first = at if not found else first
            found += 1
    return found, first


def _check_stream(content: Inflated, report: Report) -> None:
    """Inflate all of a gzipped file: zlib holds it against the stream's own checksum."""
    total = 0
    try:
        for piece in content.pieces():
            total += len(piece)
            if total > content.size_bytes:
                report.note("trailing-bytes", "its contents go on after the last tensor")
                return
    except Unreadable as problem:
        report.note(problem.code, problem.text)
    for row in report.entries:
        end = None if row["offset"] is None or row["bytes"] is None else row["offset"] + row["bytes"]
        row["whole"] = end is not None and end <= total
    if total < content.size_bytes or not content.ended:
        whole = sum(bool(row["whole"]) for row in report.entries)
        text = "cut off: %d of %d bytes can be inflated; %d of %d listed tensors are whole"
        numbers = (total, content.size_bytes, whole, len(report.entries))
        report.note("truncated", text % numbers)
