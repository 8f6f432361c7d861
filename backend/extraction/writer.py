"""The safe shard writer: a sample is under its final name whole, or not at all.

    hidden temporary name in the same folder -> reserve -> pwrite -> fdatasync every 16 samples or 2 s, a
    commit: rename all, sync the folders, then add their journal lines and sync the journal

The file equals torch.save's of the same tensors byte for byte, but for the 40-digit id, which no reader
checks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.checksums import crc32_combine
from backend.extraction.durable import DiskFull, discard, pwrite_all, reserve, retried, sync_folder
from backend.extraction.journal import Entry
from backend.shardfmt import layout, torchzip
from backend.shardfmt.torchpickle import TensorSpec, pickle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backend.extraction.engines import States
    from backend.extraction.journal import Journal

GROUP_SAMPLES = 16
GROUP_AGE_S = 2.0
"""When a group is committed: what a kill can cost (facts: shards, section 7)."""

_CHECK_WORDS = 1 << 18


@dataclass(frozen=True)
class Sample:
    """One sample to write: `index` names the file, `id` is the corpus's own name for it."""

    index: int
    id: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    states: States


class BadStates(Exception):
    """States that must not be written: a wrong shape, a NaN or an infinity."""


def check_states(states: States, tokens: int, hidden_size: int, points: int) -> None:
    """Check shapes, and that every value is finite. Raises BadStates saying which is not, and where."""
    for name, words, width in (("aux", states.aux, points * hidden_size), ("last", states.last, hidden_size)):
        if words.shape != (tokens, width):
            raise BadStates(f"{name} has the shape {list(words.shape)}, not [{tokens}, {width}]")
        if not _finite(words):
            bad = (words & 0x7FFF) >= 0x7F80
            row, column = (int(x) for x in np.argwhere(bad)[0])
            raise BadStates(f"{name} holds {int(bad.sum())} NaN or infinite values, the first at [{row}, {column}]")


def _finite(words: NDArray[np.uint16]) -> bool:
    """Look for NaN and infinity in pieces that stay in a core's cache: 2 copies of a sample never exist."""
    flat, scratch = words.reshape(-1), np.empty(_CHECK_WORDS, np.uint16)
    for begin in range(0, flat.size, _CHECK_WORDS):
        piece = flat[begin : begin + _CHECK_WORDS]
        magnitudes = np.bitwise_and(piece, 0x7FFF, out=scratch[: piece.size])
        if magnitudes.max() >= 0x7F80:
            return False
    return True


def tensors_of(tokens: int, hidden_size: int, points: int) -> list[TensorSpec]:
    """Return the four tensors of a canonical record."""
    return [
        TensorSpec(layout.INPUT_IDS, "int64", (tokens,)),
        TensorSpec(layout.LOSS_MASK, "int64", (tokens,)),
        TensorSpec(layout.AUX_HIDDEN_STATE, "bfloat16", (1, tokens, points * hidden_size)),
        TensorSpec(layout.HIDDEN_STATE, "bfloat16", (1, tokens, hidden_size)),
    ]


def plan_of(index: int, tokens: int, hidden_size: int, points: int) -> tuple[bytes, list[torchzip.Placed]]:
    """Return a sample's data.pkl and where everything lies in its file."""
    tensors = tensors_of(tokens, hidden_size, points)
    pickled = pickle_of(tensors)
    sizes = [(str(i), t.numel * (8 if t.dtype == "int64" else 2)) for i, t in enumerate(tensors)]
    return pickled, torchzip.plan(torchzip.archive_name(layout.shard_name(index)), len(pickled), sizes)


def shard_bytes(index: int, tokens: int, hidden_size: int, points: int) -> int:
    """Return the exact size of a sample's file before it exists."""
    return _size_of(len(str(index)), tokens, hidden_size, points)


@lru_cache(maxsize=1 << 16)
def _size_of(digits: int, tokens: int, hidden_size: int, points: int) -> int:
    """Plan once for all names of a length: planning costs 0.5 ms, and a corpus has few lengths."""
    return torchzip.file_bytes(plan_of(10 ** (digits - 1), tokens, hidden_size, points)[1])


def write_file(folder: str, temporary: str, sample: Sample, hidden_size: int, points: int) -> tuple[int, int]:
    """Write one whole, synced file and return its bytes and CRC-32. On any error nothing stays."""
    if sys.byteorder != "little":
        raise OSError("shards are little-endian; this machine is not")
    pickled, placed = plan_of(sample.index, len(sample.input_ids), hidden_size, points)
    bodies: list[bytes | memoryview] = [pickled, *(data for _, data in torchzip.HEAD_RECORDS)]
    bodies += [_bytes(np.asarray(sample.input_ids, np.int64)), _bytes(np.asarray(sample.loss_mask, np.int64))]
    bodies += [_bytes(sample.states.aux), _bytes(sample.states.last), torchzip.VERSION_RECORD[1], _new_id()]
    path = os.path.join(folder, temporary)
    fd = retried(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    try:
        try:
            reserve(fd, torchzip.file_bytes(placed))
            size, crc = _write_records(fd, placed, bodies)
            retried(lambda: os.fdatasync(fd))
        finally:
            os.close(fd)
    except BaseException:
        discard(path)
        raise
    return size, crc


def _write_records(fd: int, placed: list[torchzip.Placed], bodies: Sequence[bytes | memoryview]) -> tuple[int, int]:
    whole, directory = 0, b""
    for number, record in enumerate(placed):
        body = bodies[number]
        crc = zlib.crc32(body)
        head, tail = torchzip.local_header(record), torchzip.descriptor(record, crc)
        whole = crc32_combine(zlib.crc32(head, whole), crc, record.size_bytes)
        whole = zlib.crc32(tail, whole)
        pwrite_all(fd, head, record.header_at)
        pwrite_all(fd, body, record.data_at)
        pwrite_all(fd, tail, record.data_at + record.size_bytes)
        directory += torchzip.central_entry(record, crc)
    end = placed[-1].next_at
    directory += torchzip.end_records(len(placed), len(directory), end)
    pwrite_all(fd, directory, end)
    return end + len(directory), zlib.crc32(directory, whole)


def _bytes(words: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(words).data.cast("B")


def _new_id() -> bytes:
    return b"%040d" % (int.from_bytes(os.urandom(16), "little") % 10**torchzip.ID_BYTES)


class ShardWriter:
    """Writes samples into an output folder and commits them in groups.

    Any thread may write, several at a time; one thread commits and discards.
    """

    def __init__(self, out: str, journal: Journal, hidden_size: int, points: int) -> None:
        self._out, self._journal = out, journal
        self._hidden_size, self._points = hidden_size, points
        self._suffix = journal.header.suffix
        self._lock = threading.Lock()
        self._pending: list[Entry] = []
        self._since = 0.0
        self._synced: set[str] = set()

    @property
    def pending(self) -> int:
        """Return how many samples are written but not committed."""
        return len(self._pending)

    @property
    def due(self) -> bool:
        """Say whether the group should be committed now, by number or by age."""
        if not self._pending:
            return False
        return len(self._pending) >= GROUP_SAMPLES or time.monotonic() - self._since >= GROUP_AGE_S

    def write(self, sample: Sample) -> Entry:
        """Check and write one sample, hidden. Raises BadStates, DiskFull or OSError; then nothing stays."""
        check_states(sample.states, len(sample.input_ids), self._hidden_size, self._points)
        folder = os.path.join(self._out, layout.rows_folder(sample.index))
        retried(lambda: os.makedirs(folder, exist_ok=True))
        name = layout.temporary_name(sample.index, self._suffix)
        size, crc = write_file(folder, name, sample, self._hidden_size, self._points)
        file = layout.shard_path(sample.index, self._suffix)
        entry = Entry(sample.index, sample.id, file, size, len(sample.input_ids), crc, time.time())
        with self._lock:
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append(entry)
        return entry

    def commit(self) -> list[Entry]:
        """Give every pending sample its final name, then say so in the journal; return what was committed.

        Raises DiskFull or OSError; it may then be called again. What is renamed but not in the journal is
        extracted again after a crash, and replaced.
        """
        with self._lock:
            group = list(self._pending)
        for entry in group:
            final = os.path.join(self._out, entry.file)
            hidden = self._hidden(entry)
            try:
                retried(lambda hidden=hidden, final=final: os.rename(hidden, final))  # type: ignore[misc]
            except FileNotFoundError:
                if not os.path.exists(final):  # an earlier, failed commit has renamed it
                    raise
        folders = sorted({os.path.dirname(entry.file) for entry in group})
        for folder in folders:
            sync_folder(os.path.join(self._out, folder))
        if not self._synced.issuperset(folders):
            sync_folder(self._out)
            self._synced.update(folders)
        if group:
            self._journal.append(group)
        with self._lock:
            self._pending = self._pending[len(group) :]
            self._since = time.monotonic()
        return group

    def discard(self) -> None:
        """Remove what was written and not committed."""
        for entry in self._pending:
            discard(self._hidden(entry))
        self._pending = []

    def _hidden(self, entry: Entry) -> str:
        folder = os.path.dirname(os.path.join(self._out, entry.file))
        return os.path.join(folder, layout.temporary_name(entry.index, self._suffix))


__all__ = ["BadStates", "DiskFull", "Sample", "ShardWriter", "check_states", "shard_bytes", "write_file"]
