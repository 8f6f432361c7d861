"""A finished folder of our own shards, read back: what the journal says is there, checked against every byte.

Offsets are not searched for: they follow from a sample's number and length (backend/shardfmt/torchzip.py). That
the file is what it should be is known from its size and its CRC-32 in the journal.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend.extraction.journal import Entry
from backend.extraction.writer import plan_of
from backend.shardfmt import layout

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ShardError(Exception):
    """A folder or a shard that cannot be used; the text names file, line and what is wrong."""


class Shard(NamedTuple):
    """One sample: int64 [L], int64 [L], and bfloat16 words [L, K x H] and [L, H], the last after the final norm."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int64]
    aux: NDArray[np.uint16]
    last: NDArray[np.uint16]


class ShardFolder:
    """An output folder of the extraction. `header` is the journal's, `config` is data_config.json."""

    def __init__(self, path: str) -> None:
        """Read journal and configuration. Raises ShardError."""
        self.path = path
        self.config = _object(os.path.join(path, layout.CONFIG_NAME))
        self.header, self.entries = _journal(os.path.join(path, layout.JOURNAL_NAME))
        try:
            self.hidden_size = int(self.header["hidden_size"])
            self.capture_points = [int(point) for point in self.header["capture_points"]]
            self.vocab_size = int(self.config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ShardError(f"{path}: journal or {layout.CONFIG_NAME} lack what it holds: {error!r}") from None

    @property
    def complete(self) -> bool:
        """Say whether every sample of the corpus was extracted."""
        return self.config.get("state") == "complete"

    def read(self, entry: Entry) -> Shard:
        """Read a whole sample. Raises ShardError where the file is not the one that was committed."""
        path = os.path.join(self.path, entry.file)
        try:
            data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise ShardError(f"{path}: {os.strerror(error.errno or 0)}") from None
        if data.size != entry.bytes or zlib.crc32(data.data) != entry.crc32:
            raise ShardError(f"{path}: it is not what was committed (size or CRC-32); extract again to replace it")
        spans, points = self._spans(entry), len(self.capture_points)
        parts = [data[at : at + size] for at, size in spans]
        return Shard(
            parts[0].view(np.int64),
            parts[1].view(np.int64),
            parts[2].view(np.uint16).reshape(entry.tokens, points * self.hidden_size),
            parts[3].view(np.uint16).reshape(entry.tokens, self.hidden_size),
        )

    def read_tokens(self, entry: Entry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read ids and mask alone, checked by size only. Raises ShardError."""
        path = os.path.join(self.path, entry.file)
        spans = self._spans(entry)[:2]
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != entry.bytes:
                    raise ShardError(f"{path}: its size is not {entry.bytes:,}; extract again to replace it")
                found = [np.fromfile(file, np.int64, entry.tokens, offset=at - file.tell()) for at, _ in spans]
        except OSError as error:
            raise ShardError(f"{path}: {os.strerror(error.errno or 0)}") from None
        return found[0], found[1]

    def _spans(self, entry: Entry) -> list[tuple[int, int]]:
        placed = plan_of(entry.index, entry.tokens, self.hidden_size, len(self.capture_points))[1]
        return [(record.data_at, record.size_bytes) for record in placed if "/data/" in record.name]


def _object(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            record = json.load(file)
    except OSError as error:
        raise ShardError(f"{path}: {os.strerror(error.errno or 0)}; is this a folder of our shards?") from None
    except ValueError as error:
        raise ShardError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ShardError(f"{path}: not a JSON object")
    return record


def _journal(path: str) -> tuple[dict[str, Any], list[Entry]]:
    """Read a journal without touching it, by index; a torn last line is not there."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except OSError as error:
        raise ShardError(f"{path}: {os.strerror(error.errno or 0)}; is this a folder of our shards?") from None
    entries: dict[int, Entry] = {}
    header: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number == 1:
                header = dict(record)
                continue
            entry = Entry(**{name: record[name] for name in Entry.__dataclass_fields__})
        except (ValueError, TypeError, KeyError) as error:
            raise ShardError(f"{path}:{number}: no line of a journal of this version: {error!r}") from None
        entries[entry.index] = entry
    if not entries:
        raise ShardError(f"{path}: no sample was committed")
    return header, [entries[index] for index in sorted(entries)]
