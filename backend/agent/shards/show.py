"""What is in one tensor file, at once: `show(path)` reads its head and tail and runs nothing of what it says.

Measured: 33 KB and 5 reads for a hidden-state shard of any size (facts: shards, section 3).
"""

from __future__ import annotations

import re
from typing import Any, Dict, Optional, Tuple

from backend.agent.shards import safetensors, torchzip
from backend.agent.shards.nodes import Unreadable
from backend.agent.shards.report import ERROR, INFO, WARNING, Report
from backend.agent.shards.source import Source
from backend.shardfmt import safetensors as safetensors_format
from backend.shardfmt.torchzip import LOCAL_MAGIC

READ_HERE = "this version reads torch zip files (torch.save since 1.6) and safetensors"

_SIGNS: Tuple[Tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", "a file compressed by gzip, as SpecForge writes with --compress"),
    (b"\x93NUMPY", "numpy", "a numpy array (.npy)"),
    (b"PK\x05\x06", "zip", "an empty zip archive"),
    (b"\x89HDF\r\n\x1a\n", "HDF5", "an HDF5 file"),
    (b"\x00\x05\x16\x07", "AppleDouble", "what macOS keeps beside a file of another name, not a shard"),
    (b"GGUF", "GGUF", "a GGUF model"),
    (b"PAR1", "parquet", "a parquet table"),
)
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The number that opens files of torch.save before 1.6, as a pickle."""

_LFS = re.compile(rb"version https://git-lfs[^\n]*\n(?:[^\n]*\n)*?size ([0-9]{1,18})\n")


def show(path: str) -> Dict[str, Any]:
    """Describe one file.

    Returns a dictionary that fits one message:

    - path, bytes, modified_at (wall seconds), format ("torch zip", "safetensors", or what else it is)
    - ok: whether no note is an error
    - tensors: how many there are; entries: those listed, in the file's order; truncated: whether fewer
    - each entry: key, dtype (torch's name), shape, bytes (of all its elements; None where uncountable),
      stride (in elements), offset (of its first element, in bytes from the start of the file; None where
      unknown), storage (the name of the one it views), contiguous, whole (all its bytes are there), note
    - logical_bytes: the sum of the entries' bytes; stored_bytes: each storage once
    - values: {key, text} of what is no tensor; metadata: texts of a safetensors header
    - notes: {code, level: info | warning | error, text}

    All texts are safe to show. Raises wire.Refused (not-found, is-folder, not-a-file, forbidden, unreadable)
    where there is nothing to describe; whatever is in the file, it raises nothing else.
    """
    source = Source(path)
    try:
        report = Report()
        try:
            _read(source, report)
        except Unreadable as problem:
            report.note(problem.code, problem.text)
        except MemoryError:
            report.note("too-large", "its description needs more memory than there is")
        _note_holes(source, report)
        return _result(source, report)
    finally:
        source.close()


def _read(source: Source, report: Report) -> None:
    head = source.head
    if head.startswith(LOCAL_MAGIC):
        torchzip.read(source, report)
    elif _LEGACY in head[:32]:
        report.format = "torch (before 1.6)"
        report.note("not-read", "written by torch.save in its format before 1.6; %s" % READ_HERE)
    elif not _known(head, source, report):
        if safetensors_format.looks_like(head):
            safetensors.read(source, report)
        else:
            _unknown(head, source, report)


def _known(head: bytes, source: Source, report: Report) -> bool:
    """Name files that are something else."""
    pointer = _LFS.match(head)
    if pointer:
        report.format = "Git LFS pointer"
        text = "a Git LFS pointer: the real file, of {:,} bytes, was not fetched (git lfs pull)"
        report.note("lfs-pointer", text.format(int(pointer.group(1))))
        return True
    for sign, name, words in _SIGNS:
        if head.startswith(sign):
            report.format = name
            report.note("not-read", "%s; %s" % (words, READ_HERE))
            return True
    if source.size_bytes == 0:
        report.format = "empty"
        report.note("empty-file", "it has 0 bytes: its writer was killed or the disk was full")
        return True
    if not head.strip(b"\0"):
        report.format = "zeros"
        report.note("zero-filled", "its first %d bytes are all zero: a crash before the data was synced" % len(head))
        return True
    return False


def _unknown(head: bytes, source: Source, report: Report) -> None:
    if head[257:262] == b"ustar":
        name, words = "tar", "a tar archive"
    elif head[0] == 0x80 and len(head) > 1 and head[1] <= 5:
        name, words = "pickle", "a bare pickle, which torch.save did not write: loading it runs what it says"
    else:
        text = _text_start(head)
        name, words = ("text", "a text file") if text is not None else ("unknown", "no format that is known here")
    report.format = name
    report.note("not-read", "%s; %s" % (words, READ_HERE))


def _text_start(head: bytes) -> Optional[str]:
    """Return the first line where the bytes are text."""
    try:
        text = head[:-4].decode("utf-8") if len(head) > 4096 else head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 8:
            return None
        text = head[: error.start].decode("utf-8")
    line = text.split("\n", 1)[0]
    return line if line.replace("\t", "").replace("\r", "").isprintable() else None


def _note_holes(source: Source, report: Report) -> None:
    """Say where much of a file was never written: such holes read as zeros, without any error."""
    if source.size_bytes > 1 << 20 and source.allocated_bytes < source.size_bytes // 2:
        text = "only %d of %d bytes are allocated: the rest reads as zeros, or the filesystem compresses"
        report.note("sparse", text % (source.allocated_bytes, source.size_bytes), WARNING)


def _result(source: Source, report: Report) -> Dict[str, Any]:
    if report.values_left_out:
        report.note("values-left-out", "%d more values are not listed" % report.values_left_out, INFO)
    if report.notes_left_out:
        report.note("notes-left-out", "%d more findings of these kinds" % report.notes_left_out, ERROR)
    return {
        "path": source.path,
        "format": report.format,
        "bytes": source.size_bytes,
        "modified_at": source.modified_at,
        "ok": report.ok,
        "tensors": report.tensors,
        "entries": report.entries,
        "truncated": len(report.entries) < report.tensors,
        "logical_bytes": report.logical_bytes,
        "stored_bytes": report.stored_bytes,
        "values": report.values,
        "metadata": report.metadata,
        "notes": report.notes,
    }
