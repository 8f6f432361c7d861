"""Reading what torch.save writes: the pickle is the first record, the directory the end of the file."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from backend.agent.shards.findings import ERROR, INFO, WARNING
from backend.agent.shards.formats import numpyfile, salvage
from backend.agent.shards.formats.directory import Record, content, data_at, note_overlaps, read_directory
from backend.agent.shards.formats.rows import NOWHERE, Extent, add_rows
from backend.agent.shards.pickles.nodes import Storage, Unreadable
from backend.agent.shards.pickles.unpickle import Unpickler
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import torchzip as fmt

MAX_HEADERS = 1000
"""Local headers that are looked at, one read each; a sample has four storages."""


def read(source: Source, report: Report) -> None:
    """Fill the report. Raises Unreadable where nothing can be said of the contents."""
    report.format = "torch zip"
    records = read_directory(source, report)
    if records is None:
        salvage.read(source, report)
        return
    names = {record.name: record for record in records}
    pickles = [record for record in records if record.name.endswith("/" + fmt.PICKLE) and record.name.count("/") == 1]
    if not pickles:
        if numpyfile.is_archive(records):
            numpyfile.read_archive(source, report, records)
            return
        report.format = "zip"
        shown = ", ".join(record.name[:60] for record in records[:3])
        raise Unreadable("not-torch", "a zip archive that torch.save did not write: it holds %s" % (shown or "nothing"))
    archive = pickles[0].name[: -len(fmt.PICKLE)]
    _check_pickles(source, report, pickles)
    if archive + "constants.pkl" in names:
        report.note("torchscript", "a TorchScript archive: it holds code, which torch.jit.load would run")
    data = content(source, report, pickles[0])
    unpickler = Unpickler(data)
    root = unpickler.load()
    if unpickler.position != len(data):
        report.note("pickle-tail", "%d bytes follow the end of data.pkl" % (len(data) - unpickler.position))
    if _text(source, report, names.get(archive + "byteorder")) == b"big":
        report.note("big-endian", "its numbers are big-endian")
    alignment = _text(source, report, names.get(archive + ".storage_alignment"))
    where = _Storages(source, report, archive, names, int(alignment) if alignment.isdigit() else 0)
    add_rows(report, root, unpickler, where.find(unpickler.storages))


def _check_pickles(source: Source, report: Report, pickles: List[Record]) -> None:
    if len(pickles) > 1:
        report.note("two-data-pkl", "it holds more than one data.pkl: readers disagree on which one counts")
    first = salvage.first_name(source)
    if pickles[0].header_at and first.endswith("/" + fmt.PICKLE):
        report.note("two-data-pkl", "its first record is another data.pkl than the directory's", ERROR, first)


def _text(source: Source, report: Report, record: Optional[Record]) -> bytes:
    """Return the content of one of the small records at the head, or nothing."""
    if record is None or not 0 < record.size_bytes <= 32:
        return b""
    try:
        return content(source, report, record)
    except Unreadable as problem:
        report.note(problem.code, problem.text, ERROR, record.name)
        return b""


class _Storages:
    """Finds every storage's data, and says where archive and pickle disagree."""

    def __init__(self, source: Source, report: Report, archive: str, names: Dict[str, Record], alignment: int) -> None:
        self._source, self._report, self._names = source, report, names
        self._folder, self._alignment = archive + "data/", alignment

    def find(self, storages: Dict[str, Storage]) -> Dict[str, Extent]:
        """Return the extent of each."""
        where: Dict[str, Extent] = {}
        placed: List[Tuple[int, int, str]] = []
        for number, (key, storage) in enumerate(storages.items()):
            where[key] = self._one(key, storage, number < MAX_HEADERS, placed)
        note_overlaps(self._report, placed)
        if len(storages) > MAX_HEADERS:
            text = "only the first %d of %d storages were looked at" % (MAX_HEADERS, len(storages))
            self._report.note("not-checked", text, INFO)
        found = sum(self._folder + key in self._names for key in storages)
        spare = [name for name in self._names if name.startswith(self._folder)]
        if len(spare) > found:
            text = "%d storages belong to no tensor" % (len(spare) - found)
            self._report.note("unreferenced-record", text, WARNING)
        return where

    def _one(self, key: str, storage: Storage, looked: bool, placed: List[Tuple[int, int, str]]) -> Extent:
        report, record = self._report, self._names.get(self._folder + key)
        if record is None:
            text = "data/%s (%d bytes) is not in the archive" % (key, storage.size_bytes)
            report.note("storage-missing", text, ERROR, self._folder + key)
            return NOWHERE
        report.stored_bytes += record.size_bytes
        if record.size_bytes != storage.size_bytes:
            text = "data/%s has %d bytes, and its description says %d" % (key, record.size_bytes, storage.size_bytes)
            level = ERROR if record.size_bytes < storage.size_bytes else WARNING
            report.note("storage-size", text, level, record.name)
        at = data_at(self._source, report, record) if looked else None
        if at is not None:
            placed.append((record.header_at, at + record.packed_bytes, record.name))
            if self._alignment and at % self._alignment and record.size_bytes:
                text = "data/%s does not start on a multiple of %d" % (key, self._alignment)
                report.note("misaligned", text, WARNING, record.name)
        if record.method:
            text = "data/%s is compressed: it cannot be mapped or sampled" % key
            report.note("compressed-storage", text, WARNING, record.name)
            return Extent(None, record.size_bytes, record.name)
        return Extent(at, record.size_bytes, record.name, record.crc32 or None)
