"""What torch.save wrote before 1.6, and still does on request: five pickles in a row, then the storages.

The pickles are a magic number, the protocol, facts of the machine, the object, and the list of storage keys. Each
storage is its count of elements (8 bytes) and its bytes.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

from backend.agent.shards.findings import ERROR, INFO
from backend.agent.shards.formats.rows import Extent, add_rows
from backend.agent.shards.formats.salvage import pickle_at
from backend.agent.shards.pickles.nodes import EndsEarly, Mapping, Storage, Unreadable
from backend.agent.shards.pickles.unpickle import Unpickler
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source

MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""0x1950a86a20f9469cfc6c as a pickled number; protocol 4 and later have a frame before it."""

PROTOCOL = 1001
COUNT_BYTES = 8
MAX_CHECKED = 1000
"""Counts that are looked at, one read each."""


class Layout(NamedTuple):
    """What the five pickles say: the object, its storages in the file's order, and where the first begins."""

    root: Any
    unpickler: Unpickler
    order: List[Storage]
    data_at: int
    little_endian: bool

    @property
    def size_bytes(self) -> int:
        """Return the exact size of the whole file."""
        return self.data_at + sum(COUNT_BYTES + storage.size_bytes for storage in self.order)


def looks_like(head: bytes) -> bool:
    """Say whether a file begins with the magic number."""
    return MAGIC in head[:32]


def layout(source: Source) -> Layout:
    """Read the pickles. Raises Unreadable."""
    at, found = 0, []
    for _ in range(5):
        root, unpickler = pickle_at(source, at)
        at += unpickler.position
        found.append((root, unpickler))
    (_, _), (protocol, _), (machine, _), (root, unpickler), (keys, _) = found
    if protocol != PROTOCOL:
        raise Unreadable("bad-pickle", "a torch file of a protocol other than %d" % PROTOCOL)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise Unreadable("bad-pickle", "its list of storages is not a list of names")
    facts = dict(pair for pair in machine.pairs if isinstance(pair[0], str)) if isinstance(machine, Mapping) else {}
    unknown = [key for key in keys if key not in unpickler.storages]
    if unknown:
        raise Unreadable("bad-storage", "it holds a storage of which the description says nothing")
    order = [unpickler.storages[key] for key in keys]
    return Layout(root, unpickler, order, at, facts.get("little_endian") is not False)


def read(source: Source, report: Report) -> None:
    """Fill the report. Raises Unreadable where nothing can be said of the contents."""
    report.format = "torch (before 1.6)"
    try:
        found = layout(source)
    except EndsEarly:
        raise Unreadable(
            "truncated", "the file ends inside its description, after %d bytes" % source.size_bytes
        ) from None
    if not found.little_endian:
        report.note("big-endian", "its numbers are big-endian")
    where = _storages(source, report, found)
    _check_size(source, report, found)
    add_rows(report, found.root, found.unpickler, where)


def read_bare(source: Source, report: Report) -> None:
    """Describe a pickle that torch.save did not write: the names that loading it would call, and what it holds."""
    report.format = "pickle"
    report.note("bare-pickle", "a bare pickle, which torch.save did not write: loading it runs what it says")
    root, unpickler = pickle_at(source, 0)
    add_rows(report, root, unpickler, {})


def _storages(source: Source, report: Report, found: Layout) -> Dict[str, Extent]:
    where: Dict[str, Extent] = {}
    at, trusted = found.data_at, True
    for number, storage in enumerate(found.order):
        there = max(0, min(storage.size_bytes, source.size_bytes - at - COUNT_BYTES))
        if trusted and number < MAX_CHECKED and at + COUNT_BYTES <= source.size_bytes:
            count = int.from_bytes(source.read(at, COUNT_BYTES), "little")
            trusted = count == storage.numel
            if not trusted:
                text = "storage %s says %d elements, and its description %d" % (storage.key, count, storage.numel)
                report.note("storage-size", text, ERROR, storage.key)
        where[storage.key] = Extent(at + COUNT_BYTES if trusted else None, there if trusted else 0)
        report.stored_bytes += there
        at += COUNT_BYTES + storage.size_bytes
    if len(found.order) > MAX_CHECKED:
        text = "only the first %d of %d storages were looked at" % (MAX_CHECKED, len(found.order))
        report.note("not-checked", text, INFO)
    for key, storage in found.unpickler.storages.items():
        if storage.whole is not None:
            where[key] = _part(where.get(storage.whole.key), storage)
        elif key not in where:
            text = "storage %s (%d bytes) is not in the file" % (key[:100], storage.size_bytes)
            report.note("storage-missing", text, ERROR, key)
    return where


def _part(whole: Any, storage: Storage) -> Extent:
    if whole is None or whole.at is None:
        return Extent(None, 0)
    there = max(0, min(storage.size_bytes, whole.there_bytes - storage.start_bytes))
    return Extent(whole.at + storage.start_bytes, there)


def _check_size(source: Source, report: Report, found: Layout) -> None:
    total = found.size_bytes
    if source.size_bytes < total:
        at, whole = found.data_at, 0
        for storage in found.order:
            at += COUNT_BYTES + storage.size_bytes
            whole += at <= source.size_bytes
        text = "cut off: %d of %d bytes (%.1f %%) are there; %d of %d storages are whole"
        share = 100 * source.size_bytes / total
        report.note("truncated", text % (source.size_bytes, total, share, whole, len(found.order)))
    elif source.size_bytes > total:
        report.note("trailing-bytes", "%d bytes follow the last storage" % (source.size_bytes - total))
