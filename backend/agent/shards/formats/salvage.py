"""A torch file whose directory is missing: what it was meant to hold, how far it got, what of it is whole."""

from __future__ import annotations

import re
import struct
from typing import Any, Dict, List, NamedTuple, Tuple

from backend.agent.shards.findings import ERROR
from backend.agent.shards.formats.rows import Extent, add_rows
from backend.agent.shards.pickles.nodes import EndsEarly, Unreadable
from backend.agent.shards.pickles.unpickle import Unpickler
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import torchzip as fmt

MAX_PICKLE_BYTES = 16 << 20
AFTER_PICKLE_BYTES = 20 * 1024
"""Enough to see which small records follow the pickle, each padded to 4,096 at most."""

_ALIGNMENT = re.compile(rb"\.storage_alignmentFB..Z*([1-9][0-9]{0,6})PK\x07\x08", re.DOTALL)


class Salvaged(NamedTuple):
    """What the first record tells of the whole file."""

    archive: str
    root: Any
    unpickler: Unpickler
    placed: List[fmt.Placed]

    @property
    def size_bytes(self) -> int:
        """Return the exact size of the finished file."""
        return fmt.file_bytes(self.placed)

    def storages(self) -> Dict[str, fmt.Placed]:
        """Return where each storage lies, by key."""
        folder = self.archive + "data/"
        return {record.name[len(folder) :]: record for record in self.placed if record.name.startswith(folder)}


def first_name(source: Source) -> str:
    """Return the name of the first record, as its own header says it."""
    name_len = int.from_bytes(source.head[26:28], "little")
    return source.head[fmt.LOCAL_BYTES : fmt.LOCAL_BYTES + name_len].decode("utf-8", "replace")


def salvage(source: Source) -> Salvaged:
    """Read the first record and place all others as torch.save does. Raises Unreadable where it is no pickle."""
    if len(source.head) < fmt.LOCAL_BYTES:
        raise Unreadable("truncated", "the file ends inside its first header (%d bytes)" % len(source.head))
    name_len, extra_len = struct.unpack("<HH", source.head[26:30])
    name = first_name(source)
    if not name.endswith("/" + fmt.PICKLE):
        raise Unreadable("not-torch", "a zip archive without its directory, which torch.save did not write")
    begin = fmt.LOCAL_BYTES + name_len + extra_len
    root, unpickler = pickle_at(source, begin)
    archive = name[: -len(fmt.PICKLE)]
    after = source.read(begin + unpickler.position, AFTER_PICKLE_BYTES)
    return Salvaged(archive, root, unpickler, _expected(archive, unpickler, after, begin))


def pickle_at(source: Source, begin: int) -> Tuple[Any, Unpickler]:
    """Read the pickle that begins there, of unknown length; `position` counts from there."""
    size = max(1, len(source.head) - begin)
    while True:
        unpickler = Unpickler(source.read(begin, size))
        try:
            return unpickler.load(), unpickler
        except EndsEarly:
            if begin + size >= source.size_bytes:
                raise
            if size >= MAX_PICKLE_BYTES:
                raise Unreadable("too-large", "its description is over %d bytes" % MAX_PICKLE_BYTES) from None
        size = min(size * 8, MAX_PICKLE_BYTES)


def _expected(archive: str, unpickler: Unpickler, after: bytes, pickle_at: int) -> List[fmt.Placed]:
    """Place every record as torch.save would have. Older ones leave out some records at the head."""
    head = [(name, len(data)) for name, data in fmt.HEAD_RECORDS if (archive + name).encode() in after]
    if not after:
        head = list(fmt.HEAD_SIZES)
    found = _ALIGNMENT.search(after)
    alignment = int(found.group(1)) if found else fmt.ALIGNMENT
    head = [(name, len(str(alignment)) if name == ".storage_alignment" else size) for name, size in head]
    storages = [(key, storage.size_bytes) for key, storage in unpickler.storages.items()]
    placed = fmt.plan(archive[:-1], unpickler.position, storages, head, alignment)
    shift = pickle_at - placed[0].data_at
    return placed if not shift else [r._replace(data_at=r.data_at + shift, next_at=r.next_at + shift) for r in placed]


def read(source: Source, report: Report) -> None:
    """Fill the report from the head of the file."""
    try:
        found = salvage(source)
    except Unreadable as problem:
        report.format = "zip" if problem.code == "not-torch" else report.format
        raise
    where, whole = {}, 0
    storages = found.storages()
    for key, record in storages.items():
        there = max(0, min(record.size_bytes, source.size_bytes - record.data_at))
        where[key] = Extent(record.data_at, there)
        report.stored_bytes += there
        whole += there == record.size_bytes
        if there == record.size_bytes and record.data_at <= source.size_bytes:
            _check_written(source, report, record)
    text = "cut off: %d of %d bytes (%.1f %%) are there; %d of %d storages are whole"
    share = 100 * source.size_bytes / found.size_bytes
    report.note("truncated", text % (source.size_bytes, found.size_bytes, share, whole, len(storages)))
    add_rows(report, found.root, found.unpickler, where)


def add_whole(report: Report, found: Salvaged) -> None:
    """Fill the report from the head of a file that is known to be whole."""
    where = {}
    for key, record in found.storages().items():
        where[key] = Extent(record.data_at, record.size_bytes, record.name)
        report.stored_bytes += record.size_bytes
    add_rows(report, found.root, found.unpickler, where)


def _check_written(source: Source, report: Report, record: fmt.Placed) -> None:
    header = source.read(record.header_at, fmt.LOCAL_BYTES)
    if not header.startswith(fmt.LOCAL_MAGIC):
        text = "%s was never written: zeros are where its header should be" % record.name[:100]
        report.note("not-written", text, ERROR, record.name)
