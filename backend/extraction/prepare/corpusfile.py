"""corpus.jsonl in its final order: samples go to a spool in the order they come, and are copied out permuted.

Only where each line lies is held in memory (8 bytes a sample and its length), never the samples.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from typing import TYPE_CHECKING, Any

from backend.extraction.durable import discard, pwrite_all, retried

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK_BYTES = 8 << 20


class Spool:
    """A hidden file of lines that is gone when this is closed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._starts = array("Q")
        self._size = 0
        self._waiting = bytearray()

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._starts)

    def add(self, record: dict[str, Any]) -> None:
        """Add a line. Raises DiskFull or OSError."""
        line = json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"
        self._starts.append(self._size + len(self._waiting))
        self._waiting += line
        if len(self._waiting) >= _BLOCK_BYTES:
            self._flush()

    def copy(self, path: str, order: Sequence[int]) -> tuple[int, str]:
        """Write the lines in this order, synced, and return the bytes and their SHA-256."""
        self._flush()
        digest, at = hashlib.sha256(), 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            block = bytearray()
            for number in order:
                block += self._line(number)
                if len(block) >= _BLOCK_BYTES:
                    at = _put(fd, block, at, digest)
            at = _put(fd, block, at, digest)
            retried(lambda: os.fsync(fd))
        finally:
            os.close(fd)
        return at, digest.hexdigest()

    def close(self) -> None:
        """Close and remove it."""
        os.close(self._fd)
        discard(self._path)

    def _flush(self) -> None:
        pwrite_all(self._fd, bytes(self._waiting), self._size)
        self._size += len(self._waiting)
        self._waiting.clear()

    def _line(self, number: int) -> bytes:
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self) else self._size
        return os.pread(self._fd, end - start, start)


def _put(fd: int, block: bytearray, at: int, digest: Any) -> int:
    digest.update(block)
    pwrite_all(fd, bytes(block), at)
    at += len(block)
    block.clear()
    return at
