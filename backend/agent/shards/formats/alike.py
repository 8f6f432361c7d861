"""Torch files that differ from one read before only in sizes and checksums: an audit meets thousands of them.

The numbers in such a file's pickle tell how long everything in it is, and with that every header, the directory and
the end of the file (shardfmt). So these are made as their writer made them, and compared byte by byte, with the same
checksums as in a full reading. A file that differs anywhere is not alike and is read in full: no fault is named here,
so that none can be named otherwise.
"""

from __future__ import annotations

import zlib
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent.shards.pickles.walk import key_of
from backend.agent.shards.report import Part, Report, entry
from backend.agent.shards.source import Source
from backend.shardfmt import torchzip as fmt
from backend.shardfmt.dtypes import CLASS_OF, ITEM_BYTES, is_floating
from backend.shardfmt.torchpickle import TensorSpec, numbers_of, pattern_of

MAX_TENSORS = 64
"""More of them would near the bounds of a report, which are not kept here."""

MAX_KINDS = 4

_CHECKED = (".storage_alignment", "byteorder")
"""The small records whose contents a full reading looks at."""

_PICKLE = b"/" + fmt.PICKLE.encode("ascii")
_SMALL: Dict[str, bytes] = {name: data for name, data in fmt.HEAD_RECORDS if name in _CHECKED}


class Alike:
    """The kinds of file that one reader of many files has met."""

    def __init__(self) -> None:
        self._kinds: List[_Kind] = []

    def read(self, source: Source, report: Report) -> bool:
        """Fill an empty report as a full reading would, or leave it and return False."""
        return any(kind.read(source, report) for kind in self._kinds)

    def learn(self, source: Source, report: Report) -> None:
        """Remember the kind of a file that was just read in full and without a finding, where it can be told."""
        specs = _specs(report)
        if not specs or len(self._kinds) >= MAX_KINDS:
            return
        kind, again = _Kind(specs), Report()
        if kind.read(source, again) and told(again) == told(report):
            self._kinds.append(kind)


def told(report: Report) -> List[Any]:
    """Return all that a reading put into a report."""
    return [value for name, value in sorted(vars(report).items()) if not name.startswith("_")]


def _specs(report: Report) -> List[TensorSpec]:
    """Return the tensors of a report, or none where they are not of a flat dictionary of plain tensors."""
    rows = report.entries
    plain = report.format == "torch zip" and not (report.findings or report.values or report.metadata)
    if not plain or not 0 < len(rows) == report.tensors <= MAX_TENSORS:
        return []
    for number, row in enumerate(rows):
        named = key_of(row["key"]) == row["key"] and row["storage"] == str(number)
        if not named or row["dtype"] not in CLASS_OF or not row["bytes"] or row["note"]:
            return []
    return [TensorSpec(row["key"], row["dtype"], tuple(row["shape"])) for row in rows]


class _Sized(NamedTuple):
    """A tensor as one file has it."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    size_bytes: int


class _Kind:
    """Files of the same tensors in the same order, by key, type and number of axes."""

    def __init__(self, specs: List[TensorSpec]) -> None:
        self._specs = specs
        self._pattern = pattern_of(specs)

    def read(self, source: Source, report: Report) -> bool:
        """Fill the report where the file is of this kind and as it was written."""
        head = source.head
        begin = fmt.LOCAL_BYTES + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        found = self._pattern.match(head, begin)
        name = head[fmt.LOCAL_BYTES : fmt.LOCAL_BYTES + int.from_bytes(head[26:28], "little")]
        if found is None or not name.endswith(_PICKLE) or name.count(b"/") != 1 or not name.isascii():
            return False
        sized = self._sized(numbers_of(found))
        if sized is None:
            return False
        storages = [(str(number), tensor.size_bytes) for number, tensor in enumerate(sized)]
        placed = fmt.plan(name[: -len(_PICKLE)].decode("ascii"), found.end() - begin, storages)
        sums = _checksums(source, placed)
        if sums is None or not _is_written(source, placed, sums, found.group()):
            return False
        self._fill(report, sized, placed, sums)
        return True

    def _sized(self, numbers: List[int]) -> Optional[List[_Sized]]:
        """Return the tensors, or None where one is not contiguous or does not fill its storage."""
        sized: List[_Sized] = []
        at = 0
        for spec in self._specs:
            rank = len(spec.shape)
            shape = tuple(numbers[at + 1 : at + 1 + rank])
            strides = tuple(numbers[at + 1 + rank : at + 1 + 2 * rank])
            step = 1
            for size, stride in zip(reversed(shape), reversed(strides)):
                if stride != step:
                    return None
                step *= size
            if not step or step != numbers[at]:
                return None
            sized.append(_Sized(shape, strides, step * ITEM_BYTES[spec.dtype]))
            at += 1 + 2 * rank
        return sized

    def _fill(self, report: Report, sized: List[_Sized], placed: List[fmt.Placed], sums: List[int]) -> None:
        report.format = "torch zip"
        first = 1 + len(fmt.HEAD_RECORDS)
        for number, (spec, tensor) in enumerate(zip(self._specs, sized)):
            record, size = placed[first + number], tensor.size_bytes
            row = entry(spec.key, spec.dtype, tensor.shape, size)
            row.update(stride=list(tensor.strides), offset=record.data_at, storage=str(number))
            report.entries.append(row)
            crc32 = sums[first + number] or None
            report.parts.append(Part(record.name, spec.key, record.data_at, size, crc32, is_floating(spec.dtype)))
            report.count(size)
            report.stored_bytes += size


def _checksums(source: Source, placed: List[fmt.Placed]) -> Optional[List[int]]:
    """Return every record's checksum, or None where directory and end are not those of these records."""
    at, tail = source.tail()
    at = placed[-1].next_at - at
    if at < 0 or fmt.file_bytes(placed) != source.size_bytes:
        return None
    begin = at
    sums: List[int] = []
    made: List[bytes] = []
    for record in placed:
        sums.append(int.from_bytes(tail[at + 16 : at + 20], "little"))
        made.append(fmt.central_entry(record, sums[-1]))
        at += len(made[-1])
    made.append(fmt.end_records(len(placed), at - begin, placed[-1].next_at))
    return sums if b"".join(made) == tail[begin:] else None


def _is_written(source: Source, placed: List[fmt.Placed], sums: List[int], pickle: bytes) -> bool:
    """Say whether the headers and small records that a full reading looks at are as they were written.

    A checksum of 0 says that none was made.
    """
    for record, crc32 in zip(placed, sums):
        name = record.name.partition("/")[2]
        content = pickle if name == fmt.PICKLE else _SMALL.get(name)
        if content is None and not name.startswith("data/"):
            continue
        size = record.data_at - record.header_at
        if source.read(record.header_at, size) != fmt.local_header(record):
            return False
        if content is None:
            continue
        if crc32 not in (0, zlib.crc32(content)) or source.read(record.data_at, len(content)) != content:
            return False
    return True
