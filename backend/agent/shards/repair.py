"""Giving a cut torch file its tail back, in a copy: where every tensor is whole and only the directory is missing.

A writer that was killed after its last tensor loses some 1 KB of directory; torch refuses the file all the same.
What was lost follows from the description to the byte (`shardfmt.torchzip`), so the copy is the file that torch.save
would have made, but for the 40-digit id that no reader checks.
"""

from __future__ import annotations

import errno
import os
import zlib
from typing import Any, Dict, Optional

from backend.agent.shards.describe import describe
from backend.agent.shards.findings import ERROR
from backend.agent.shards.formats.salvage import Salvaged, salvage
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source, refusal
from backend.shardfmt import torchzip as fmt
from backend.wire import Refused

PIECE_BYTES = 1 << 20
MENDED = {"truncated", "sparse"}
"""What a file may be found with and be mended: holes are kept as they are, and said."""


def repair(path: str, out: str) -> Dict[str, Any]:
    """Write a mended copy of `path` as `out`, which must not exist. The original is never written to.

    Returns {path, out, bytes, lost_bytes, tensors, notes}: `lost_bytes` is what was made anew. Raises Refused
    (whole, cannot-repair, exists, and those of `Source`) saying what cannot be mended and why; then nothing is
    left. The copy is written beside its final name, synced, and linked to it.
    """
    source = Source(path)
    try:
        report = describe(source)
        _refuse_others(source, report)
        found = _salvaged(source)
        _refuse_lost(source, report, found)
        _write(source, found, out)
        if source.changed():
            os.unlink(out)
            raise Refused("changed", "%s was written to meanwhile" % path, "repair it when its writer is done")
        return {
            "path": path,
            "out": out,
            "bytes": found.size_bytes,
            "lost_bytes": found.size_bytes - source.size_bytes,
            "tensors": report.tensors,
            "notes": [finding.as_note() for finding in report.findings if finding.code != "truncated"],
        }
    finally:
        source.close()


def _refuse_others(source: Source, report: Report) -> None:
    codes = {finding.code for finding in report.findings if finding.level == ERROR}
    if not codes:
        raise Refused("whole", "%s needs no repair: nothing is wrong with it" % source.path)
    if report.format != "torch zip" or "truncated" not in codes:
        worst = next(finding for finding in report.findings if finding.level == ERROR)
        text = "%s cannot be mended: %s" % (source.path, worst.text)
        raise Refused("cannot-repair", text, "only a torch file that lost its end can be")
    for finding in report.findings:
        if finding.level == ERROR and finding.code not in MENDED:
            raise Refused("cannot-repair", "%s cannot be mended: %s" % (source.path, finding.text))


def _salvaged(source: Source) -> Salvaged:
    try:
        return salvage(source)
    except Unreadable as problem:
        raise Refused("cannot-repair", "%s cannot be mended: %s" % (source.path, problem.text)) from None


def _refuse_lost(source: Source, report: Report, found: Salvaged) -> None:
    there = source.size_bytes
    lost = [key for key, held in found.storages().items() if held.size_bytes and held.data_at + held.size_bytes > there]
    if lost:
        rows = [row["key"] for row in report.entries if not row["whole"]]
        shown = ", ".join(rows[:5]) + (" and %d more" % (len(rows) - 5) if len(rows) > 5 else "")
        text = "%s cannot be mended: the end of %s is lost with it" % (source.path, shown or "a storage")
        raise Refused("cannot-repair", text, "extract this sample again")


def _write(source: Source, found: Salvaged, out: str) -> None:
    if os.path.lexists(out):
        raise Refused("exists", "%s exists" % out, "name a file that does not: nothing is overwritten")
    folder, name = os.path.split(out)
    temporary = os.path.join(folder, ".%s.%d.tmp" % (name, os.getpid()))
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_records(source, found, fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        _name(temporary, out)
        _sync(folder or ".")
    except FileExistsError:
        _discard(temporary)
        raise Refused("exists", "%s exists" % out, "name a file that does not: nothing is overwritten") from None
    except OSError as error:
        _discard(temporary)
        if error.errno is None:
            raise
        raise Refused("cannot-write", "%s: %s" % (out, refusal(out, error).message)) from None
    except BaseException:
        _discard(temporary)
        raise


def _name(temporary: str, out: str) -> None:
    """Give the copy its name without ever replacing a file that came meanwhile, where the filesystem can link."""
    try:
        os.link(temporary, out)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(out):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), out) from None
        os.rename(temporary, out)
    else:
        os.unlink(temporary)


def _write_records(source: Source, found: Salvaged, fd: int) -> None:
    directory = b""
    for record in found.placed:
        head = _original_header(source, record)
        crc = _copy(source, record, fd, head)
        _put(fd, fmt.descriptor(record, crc), record.data_at + record.size_bytes)
        directory += fmt.central_entry(record, crc)
    end = found.placed[-1].next_at
    _put(fd, directory + fmt.end_records(len(found.placed), len(directory), end), end)


def _original_header(source: Source, record: fmt.Placed) -> bytes:
    """Return the record's own header as it stands in the file, or anew where it is cut off."""
    size = record.data_at - record.header_at
    head = source.read(record.header_at, size)
    return head if len(head) == size and head.startswith(fmt.LOCAL_MAGIC) else fmt.local_header(record)


def _copy(source: Source, record: fmt.Placed, fd: int, head: bytes) -> int:
    """Copy a record and return its CRC-32. The small records at the end are known; holes stay holes."""
    _put(fd, head, record.header_at)
    made = _known(record)
    if made is not None and record.data_at + record.size_bytes > source.size_bytes:
        _put(fd, made, record.data_at)
        return zlib.crc32(made)
    crc, at, end = 0, record.data_at, record.data_at + record.size_bytes
    while at < end:
        data = source.read(at, min(PIECE_BYTES, end - at))
        if not data:
            raise Refused("changed", "%s became shorter meanwhile" % source.path)
        crc = zlib.crc32(data, crc)
        if (at, at + len(data)) not in source.holes(at, at + len(data)):
            _put(fd, data, at)
        at += len(data)
    return crc


def _known(record: fmt.Placed) -> Optional[bytes]:
    """Return the content of a record that is the same in every file."""
    if record.name.endswith("/" + fmt.ID_RECORD):
        return b"0" * fmt.ID_BYTES
    return fmt.VERSION_RECORD[1] if record.name.endswith("/" + fmt.VERSION_RECORD[0]) else None


def _put(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _discard(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
