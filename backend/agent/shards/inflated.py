"""A gzipped file read as what it inflates to, forward in pieces: its head costs little, all else what lies before."""

from __future__ import annotations

import zlib
from typing import Any, Iterator, Tuple

from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.source import Source

KEPT_BYTES = 64 * 1024
"""The head that stays in memory: the description of a hidden-state sample lies in it."""

_PACKED_BYTES = 16 * 1024
_PIECE_BYTES = 1 << 20
GZIP = 31  # zlib's number for a gzip stream, whose checksum and length it verifies at the end
_TRAILER_BYTES = 8


class Inflated(Source):
    """The inflated stream of an open file. `size_bytes` is what its reader says it should be (see `formats.gzipped`).

    Reading backwards, beyond the head that is kept, begins anew. Where the stream ends early a read is short;
    where it is damaged, reads raise Unreadable.
    """

    def __init__(self, packed: Source) -> None:
        self._packed = packed
        self.path, self.modified_at = packed.path, packed.modified_at
        self.size_bytes = self.allocated_bytes = 1 << 62
        self.members = 0
        self.ended = False
        self.head = b""
        self._begin()
        self.head = self.read(0, KEPT_BYTES)

    @property
    def stated_bytes(self) -> int:
        """Return the size that the end of the file states, which counts modulo 2**32."""
        return int.from_bytes(self._packed.read(max(0, self._packed.size_bytes - 4), 4), "little")

    def read(self, at: int, size: int) -> bytes:
        """Return the bytes at an offset of the inflated stream: fewer where it ends."""
        if at + size <= len(self.head):
            return self.head[at : at + size]
        if at < self._at:
            self._begin()
        while self._at < at and self._next(min(_PIECE_BYTES, at - self._at)):
            pass
        parts, left = [], size
        while left > 0:
            part = self._next(min(_PIECE_BYTES, left))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset of the inflated stream and return how much."""
        data = self.read(at, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole stream."""
        self._begin()
        while True:
            part = self._next(_PIECE_BYTES)
            if not part:
                return
            yield part

    def tail(self) -> Tuple[int, bytes]:
        """Refuse: the end of a stream costs all of it."""
        raise Unreadable("unsupported-format", "a gzipped file whose end would have to be inflated")

    def holes(self, begin: int, end: int) -> Iterator[Tuple[int, int]]:
        """Yield nothing: holes of the file are none of the stream."""
        return iter(())

    def changed(self) -> bool:
        """Say whether the file was written to since it was opened."""
        return self._packed.changed()

    def close(self) -> None:
        """Leave the file to whoever opened it."""

    def _begin(self) -> None:
        self._inflater: Any = zlib.decompressobj(GZIP)
        self._waiting, self._packed_at, self._at = b"", 0, 0
        self.members, self.ended = 1, False

    def _next(self, size: int) -> bytes:
        """Return up to `size` bytes more, or nothing at the end."""
        while True:
            if not self._waiting and not self._inflater.eof:
                self._waiting = self._packed.read(self._packed_at, _PACKED_BYTES)
                self._packed_at += len(self._waiting)
                if not self._waiting:
                    return b""
            if self._inflater.eof and not self._next_member():
                self.ended = True
                return b""
            try:
                part: bytes = self._inflater.decompress(self._waiting, size)
            except zlib.error:
                text = "its compressed stream is damaged after %d bytes of contents" % self._at
                raise Unreadable("bad-gzip", text) from None
            self._waiting = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            if part:
                self._at += len(part)
                return part

    def _next_member(self) -> bool:
        if len(self._waiting) < _TRAILER_BYTES:
            more = self._packed.read(self._packed_at, _PACKED_BYTES)
            self._packed_at += len(more)
            self._waiting += more
        if not self._waiting.startswith(b"\x1f\x8b"):
            return False
        self._inflater = zlib.decompressobj(GZIP)
        self.members += 1
        return True
