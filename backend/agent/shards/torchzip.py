"""Reading what torch.save writes: the pickle is the first record, the directory the end of the file."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent.shards import walk
from backend.agent.shards.nodes import EndsEarly, Opaque, Storage, Tensor, Unreadable
from backend.agent.shards.rebuild import understood
from backend.agent.shards.report import ERROR, INFO, WARNING, Report, entry
from backend.agent.shards.source import Source
from backend.agent.shards.unpickle import Unpickler
from backend.shardfmt import torchzip as fmt

MAX_PICKLE_BYTES = 16 << 20
MAX_DIRECTORY_BYTES = 16 << 20
MAX_RECORDS = 200_000
AFTER_PICKLE_BYTES = 1024
"""Enough to see which small records follow the pickle, each padded to 64."""

MAX_HEADERS = 1000
"""Local headers that are looked at, one read each; a sample has four storages."""


class Record(NamedTuple):
    """A record as the directory states it."""

    name: str
    header_at: int
    size_bytes: int
    packed_bytes: int
    crc32: int
    method: int
    flags: int


class Extent(NamedTuple):
    """Where a storage's data lies and how much of it is there. `at` is None where that is unknown."""

    at: Optional[int]
    there_bytes: int


def read(source: Source, report: Report) -> None:
    """Fill the report. Raises Unreadable where nothing can be said of the contents."""
    report.format = "torch zip"
    records = _directory(source, report)
    if records is None:
        _salvage(source, report)
        return
    names = {record.name: record for record in records}
    pickles = [record for record in records if record.name.endswith("/" + fmt.PICKLE) and record.name.count("/") == 1]
    if not pickles:
        report.format = "zip"
        shown = ", ".join(record.name[:60] for record in records[:3])
        raise Unreadable("not-torch", "a zip archive that torch.save did not write: it holds %s" % (shown or "nothing"))
    archive = pickles[0].name[: -len(fmt.PICKLE)]
    if len(pickles) > 1:
        report.note("two-pickles", "it holds more than one data.pkl: readers disagree on which one counts")
    if archive + "constants.pkl" in names:
        report.note("torchscript", "a TorchScript archive: it holds code, which torch.jit.load would run")
    data = _content(source, report, pickles[0])
    unpickler = Unpickler(data)
    root = unpickler.load()
    if unpickler.position != len(data):
        report.note("pickle-tail", "%d bytes follow the end of data.pkl" % (len(data) - unpickler.position))
    order = names.get(archive + "byteorder")
    if order and order.size_bytes == 3 and _content(source, report, order) == b"big":
        report.note("big-endian", "its numbers are big-endian")
    where = _storages(source, report, unpickler.storages, names, archive)
    _rows(report, root, unpickler, where)


def _directory(source: Source, report: Report) -> Optional[List[Record]]:
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
    return _records(source.read(begin, size), begin, report)


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
            report.note("duplicate-record", "%s is there twice: readers differ on which counts" % name[:100])
        elif header_at + fmt.LOCAL_BYTES + packed > directory_at:
            report.note("record-outside", "%s does not fit before the directory" % name[:100])
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


def _data_at(source: Source, report: Report, record: Record) -> Optional[int]:
    """Find a record's data by its local header, as torch does (under mmap even by a zeroed one)."""
    name = record.name.encode("utf-8", "replace")
    header = source.read(record.header_at, fmt.LOCAL_BYTES + len(name))
    if not header.startswith(fmt.LOCAL_MAGIC) or len(header) < fmt.LOCAL_BYTES:
        what = "zeros are" if header and not header.strip(b"\0") else "something else is"
        report.note("bad-local-header", "%s: %s where its header should be" % (record.name[:100], what))
        return None
    name_len, extra_len = struct.unpack("<HH", header[26:30])
    if header[30 : 30 + name_len] != name:
        report.note("name-mismatch", "%s: its own header says another name" % record.name[:100])
    return record.header_at + fmt.LOCAL_BYTES + int(name_len) + int(extra_len)


def _content(source: Source, report: Report, record: Record) -> bytes:
    """Return a small record's bytes, checked. Raises Unreadable where they cannot be had."""
    if max(record.size_bytes, record.packed_bytes) > MAX_PICKLE_BYTES:
        raise Unreadable("too-large", "its description (%s) has %d bytes" % (record.name[:100], record.size_bytes))
    if record.flags & 1:
        report.note("encrypted", "%s is marked as encrypted" % record.name[:100])
    at = _data_at(source, report, record)
    if at is None:
        raise Unreadable("bad-local-header", "%s cannot be found in it" % record.name[:100])
    data = source.read(at, record.packed_bytes)
    if record.method == 8:
        try:
            data = zlib.decompressobj(-15).decompress(data, max(record.size_bytes, 1))
        except zlib.error:
            raise Unreadable("bad-record", "%s cannot be inflated" % record.name[:100]) from None
    elif record.method:
        raise Unreadable("bad-record", "%s is packed by a method that torch does not use" % record.name[:100])
    if record.crc32 and zlib.crc32(data) != record.crc32:
        report.note("crc-mismatch", "%s does not have the checksum that the directory states" % record.name[:100])
    return data


def _storages(
    source: Source, report: Report, storages: Dict[str, Storage], names: Dict[str, Record], archive: str
) -> Dict[str, Extent]:
    """Find every storage's data, and say where archive and pickle disagree."""
    where = {}
    for number, (key, storage) in enumerate(storages.items()):
        record = names.get("%sdata/%s" % (archive, key))
        if record is None:
            report.note("storage-missing", "data/%s (%d bytes) is not in the archive" % (key, storage.size_bytes))
            where[key] = Extent(None, 0)
            continue
        report.stored_bytes += record.size_bytes
        if record.size_bytes != storage.size_bytes:
            text = "data/%s has %d bytes, and its description says %d"
            level = ERROR if record.size_bytes < storage.size_bytes else WARNING
            report.note("storage-size", text % (key, record.size_bytes, storage.size_bytes), level)
        if record.method:
            report.note("compressed", "data/%s is compressed: it cannot be mapped or sampled" % key, WARNING)
        at = _data_at(source, report, record) if number < MAX_HEADERS else None
        where[key] = Extent(at, record.size_bytes)
    if len(storages) > MAX_HEADERS:
        report.note(
            "not-checked",
            "only the first %d of %d storages were looked at" % (MAX_HEADERS, len(storages)),
            INFO,
        )
    found = sum("%sdata/%s" % (archive, key) in names for key in storages)
    spare = sum(name.startswith(archive + "data/") for name in names) - found
    if spare:
        report.note("unreferenced", "%d storages belong to no tensor" % spare, WARNING)
    return where


def _salvage(source: Source, report: Report) -> None:
    """Without a directory: say what the file was meant to hold, how far it got, and what of it is whole."""
    head = source.head
    if len(head) < fmt.LOCAL_BYTES:
        raise Unreadable("truncated", "the file ends inside its first header (%d bytes)" % len(head))
    name_len, extra_len = struct.unpack("<HH", head[26:30])
    name = head[30 : 30 + name_len].decode("utf-8", "replace")
    if not name.endswith("/" + fmt.PICKLE):
        report.format = "zip"
        raise Unreadable("truncated", "a zip archive without its directory, which torch.save did not write")
    unpickler, root, data = _pickle_at(source, 30 + name_len + extra_len)
    archive, after = (
        name[: -len(fmt.PICKLE)],
        data[unpickler.position : unpickler.position + AFTER_PICKLE_BYTES],
    )
    placed = _expected(archive, unpickler, after, 30 + name_len + extra_len)
    total = fmt.file_bytes(placed)
    where = {}
    for record in placed:
        if record.name.startswith(archive + "data/"):
            there = max(0, min(record.size_bytes, source.size_bytes - record.data_at))
            where[record.name[len(archive) + 5 :]] = Extent(record.data_at, there)
            report.stored_bytes += there
            if there == record.size_bytes:
                _check_written(source, report, record)
    whole = sum(where[key].there_bytes == storage.size_bytes for key, storage in unpickler.storages.items())
    text = "cut off: %d of %d bytes (%.1f %%) are there; %d of %d storages are whole"
    numbers = (source.size_bytes, total, 100 * source.size_bytes / total, whole, len(where))
    report.note("truncated", text % numbers)
    _rows(report, root, unpickler, where)


def _pickle_at(source: Source, begin: int) -> Tuple[Unpickler, Any, bytes]:
    size = max(1, len(source.head) - begin)
    while True:
        data = source.read(begin, size)
        unpickler = Unpickler(data)
        try:
            return unpickler, unpickler.load(), data
        except EndsEarly:
            if begin + size >= source.size_bytes:
                raise
            if size >= MAX_PICKLE_BYTES:
                raise Unreadable("too-large", "its description is over %d bytes" % MAX_PICKLE_BYTES) from None
        size *= 8


def _expected(archive: str, unpickler: Unpickler, after: bytes, pickle_at: int) -> List[fmt.Placed]:
    """Place every record as torch.save would have. Older ones leave out some records at the head."""
    head = [(name, len(data)) for name, data in fmt.HEAD_RECORDS if (archive + name).encode() in after]
    if len(after) < AFTER_PICKLE_BYTES:
        head = list(fmt.HEAD_SIZES)
    storages = [(key, storage.size_bytes) for key, storage in unpickler.storages.items()]
    placed = fmt.plan(archive[:-1], unpickler.position, storages, head)
    shift = pickle_at - placed[0].data_at
    return placed if not shift else [r._replace(data_at=r.data_at + shift, next_at=r.next_at + shift) for r in placed]


def _check_written(source: Source, report: Report, record: fmt.Placed) -> None:
    header = source.read(record.header_at, fmt.LOCAL_BYTES)
    if not header.startswith(fmt.LOCAL_MAGIC):
        report.note("not-written", "%s was never written: zeros are where its header should be" % record.name[:100])


def _rows(report: Report, root: Any, unpickler: Unpickler, where: Dict[str, Extent]) -> None:
    used: Dict[str, List[Tensor]] = {}
    for key, leaf in walk.leaves(root, report):
        if isinstance(leaf, Tensor):
            used.setdefault(leaf.storage.key, []).append(leaf)
            if report.full and leaf.end * (leaf.item_bytes or 0) <= leaf.storage.size_bytes:
                report.count(leaf.size_bytes)
            else:
                report.tensor(_row(report, key, leaf, where.get(leaf.storage.key, Extent(None, 0))))
        else:
            report.value(key or "(root)", walk.text_of(leaf))
            if isinstance(leaf, Opaque) and not key:
                report.note("not-a-container", "it holds %s, not tensors by name" % walk.text_of(leaf), WARNING)
    for key, tensors in used.items():
        _note_sharing(report, key, tensors)
    walk.note_names([name for name, found in unpickler.names.items() if not understood(found)], report)


def _row(report: Report, key: str, tensor: Tensor, extent: Extent) -> Dict[str, Any]:
    row = entry(key or "(root)", tensor.dtype, tensor.shape, tensor.size_bytes)
    row.update(stride=list(tensor.stride), storage=tensor.storage.key, contiguous=tensor.contiguous)
    item = tensor.item_bytes
    if item is None:
        report.note("unknown-type", "%s has the type %s, whose size is not known here" % (key, tensor.dtype), WARNING)
        return row
    if tensor.size_bytes is None:
        report.note("shape-overflow", "%s has more elements than torch can count" % row["key"])
    beyond = tensor.end * item - tensor.storage.size_bytes
    if beyond > 0:
        elements = -(-beyond // item)
        text = "%s ends %d element%s beyond its storage"
        report.note("view-outside-storage", text % (row["key"], elements, "" if elements == 1 else "s"))
    row["offset"] = None if extent.at is None else extent.at + tensor.offset * item
    row["whole"] = beyond <= 0 and tensor.end * item <= extent.there_bytes
    words = ["parameter"] if tensor.parameter else []
    if tensor.size_bytes is not None and tensor.size_bytes > tensor.storage.size_bytes:
        words.append("repeated: %d stored bytes" % tensor.storage.size_bytes)
    if not tensor.storage.device.startswith("cpu"):
        words.append("saved from %s" % tensor.storage.device[:20])
    row["note"] = ", ".join(words)
    return row


def _note_sharing(report: Report, key: str, tensors: List[Tensor]) -> None:
    """Say where a storage is shared, or far larger than what is used of it: a slice saves all of a batch."""
    stored = tensors[0].storage.size_bytes
    used = sum(min(tensor.size_bytes or 0, stored) for tensor in tensors)
    if len(tensors) > 1:
        types = sorted({tensor.dtype for tensor in tensors})
        if len(types) > 1:
            text = "%d tensors share storage %s under the types %s; torch may refuse it"
            report.note("two-types", text % (len(tensors), key, " and ".join(types)), WARNING)
        else:
            report.note("shared-storage", "%d tensors share storage %s" % (len(tensors), key), INFO)
    if 0 < used * 2 < stored:
        text = "storage %s has %d bytes, %d times what its tensors use (%d): a slice, saved with all its batch"
        report.note("oversized-storage", text % (key, stored, stored // used, used), WARNING)
