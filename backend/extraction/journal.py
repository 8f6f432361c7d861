"""journal.jsonl: which samples are in the output folder. A resume believes it, and not the names of files.

The first line says what is extracted: corpus (by content), engine and weights, capture points. Every further
line is one committed sample. Lines are added only after the files they name are durable. A torn last line,
which a crash may leave, is cut off; any other damage is an error with its line number.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from backend.extraction.durable import discard, pwrite_all, retried, sync_folder
from backend.shardfmt import layout
from backend.wire import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence


class JournalError(Exception):
    """A folder that this extraction must not write into; the text says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """One committed sample. `file` is relative to the folder, `crc32` of all of it, `at` wall seconds."""

    index: int
    id: str
    file: str
    bytes: int
    tokens: int
    crc32: int
    at: float


@dataclass(frozen=True)
class Header:
    """What is extracted. All of it must be equal for a resume, but for where the corpus lies."""

    corpus: str
    corpus_sha256: str
    corpus_bytes: int
    corpus_lines: int
    engine: str
    model: str
    hidden_size: int
    capture_points: list[int]
    suffix: str = layout.SUFFIXES[0]
    schema: int = SCHEMA


_WORDS = {
    "schema": "journal version",
    "corpus_sha256": "corpus (SHA-256)",
    "corpus_bytes": "corpus size in bytes",
    "corpus_lines": "corpus lines",
    "engine": "engine",
    "model": "model",
    "hidden_size": "hidden size",
    "capture_points": "capture points",
    "suffix": "file suffix",
}


class FolderLock:
    """Holds an output folder, so that no two extractions write into one. The lock ends with the process."""

    def __init__(self, out: str) -> None:
        """Take the lock. Raises JournalError where another process holds it."""
        self._fd = os.open(os.path.join(out, layout.LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                text = f"{out}: another extraction (pid {holder}) writes here; stop it, or use another folder"
            else:
                text = f"{out}: the folder cannot be locked: {error}"
            raise JournalError(text) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let the folder go."""
        os.close(self._fd)


class Journal:
    """The open journal of a locked folder."""

    def __init__(self, path: str, header: Header) -> None:
        """Open or begin the journal. Raises JournalError where it belongs to something else or is damaged."""
        self.path, self.header = path, header
        self.entries: dict[int, Entry] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._size = self._read(header)
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, header: Header) -> int:
        """Read what is there, cut a torn tail, and return the size."""
        with open(self.path, "rb") as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        if not lines:
            return self._begin(header)
        found = _parsed(self.path, 1, lines[0])
        if len(lines) == 1 and found.get("schema") == header.schema:
            return self._begin(header)  # nothing was extracted yet: there is nothing to protect
        self._compare(found, header)
        for number, raw in enumerate(lines[1:], 2):
            entry = _entry(self.path, number, raw, header.suffix)
            self.entries[entry.index] = entry
        if whole < len(data):
            os.ftruncate(self._fd, whole)
        return whole

    def _begin(self, header: Header) -> int:
        line = _line(asdict(header))
        os.ftruncate(self._fd, 0)
        pwrite_all(self._fd, line, 0)
        retried(lambda: os.fsync(self._fd))
        sync_folder(os.path.dirname(self.path) or ".")
        return len(line)

    def _compare(self, found: dict[str, Any], wanted: Header) -> None:
        found = {"suffix": layout.SUFFIXES[0], **found}  # journals before it could be chosen
        for name, words in _WORDS.items():
            want = getattr(wanted, name)
            if found.get(name) != want:
                raise JournalError(
                    f"{self.path}: this folder was begun with another {words}: {found.get(name)!r}, now "
                    f"{want!r}; use another folder, or what it was begun with"
                )

    def drop(self, index: int) -> None:
        """Forget a sample whose file is not what the journal says; its next line replaces this one."""
        del self.entries[index]

    def append(self, entries: Sequence[Entry]) -> None:
        """Add lines and make them durable, or leave the journal as it was. Raises DiskFull or OSError."""
        data = b"".join(_line(asdict(entry)) for entry in entries)
        try:
            pwrite_all(self._fd, data, self._size)
            retried(lambda: os.fsync(self._fd))
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self.entries.update((entry.index, entry) for entry in entries)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def remove_leftovers(out: str) -> int:
    """Remove the temporary files that a killed extraction left in a locked folder; return how many."""
    removed = 0
    for folder in os.scandir(out):
        if not layout.is_rows_folder(folder.name) or not folder.is_dir(follow_symlinks=False):
            continue
        for file in os.scandir(folder.path):
            if layout.is_our_temporary(file.name) and not file.is_dir(follow_symlinks=False):
                discard(file.path)
                removed += 1
    return removed


def forget_missing(journal: Journal, out: str) -> list[Entry]:
    """Drop the samples whose file is gone or has another size, to be extracted again; return them."""
    lost = []
    for entry in list(journal.entries.values()):
        try:
            there = os.stat(os.path.join(out, entry.file)).st_size
        except OSError:
            there = -1
        if there != entry.bytes:
            journal.drop(entry.index)
            lost.append(entry)
    return lost


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def _parsed(path: str, number: int, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise JournalError(
            f"{path}: line {number} is no JSON object: the journal is damaged; cut it off before that line"
        )
    return record


def _entry(path: str, number: int, raw: bytes, suffix: str) -> Entry:
    record = _parsed(path, number, raw)
    try:
        entry = Entry(**{name: record[name] for name in Entry.__dataclass_fields__})
        expected = layout.shard_path(entry.index, suffix)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}: line {number} is no sample of this version: {error!r}") from None
    if entry.file != expected:
        raise JournalError(f"{path}: line {number} names {entry.file!r} for sample {entry.index}, not {expected}")
    return entry
