"""The writer process: rows out of shared slots into the files of their requests.

`writer.py` starts this as a program of its own, so that what it does never takes the interpreter lock from the
server's scheduler: with threads in the scheduler each system call of theirs cost a passing of that lock, 6 ms a
pass at eight clients on an H200. It knows the standard library and nothing beside it, ends when the scheduler's
end of the socket is closed, and ignores SIGINT and SIGTERM, for the server stops it last.

Frames on the socket are a length and what `marshal` makes of a tuple. A piece comes as (slot, rows, layers,
parts), a part as (number, rid, tokens, file row, slot row, rows). The answer to a piece is (slot, rows written,
numbers of requests that are whole, numbers whose file the reader removed, [number, reason] of those that failed).
"""

from __future__ import annotations

import itertools
import json
import marshal
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

FORMAT = 1
HEADER_BYTES = 4096
STATES, PART = ".states", ".part"
ID_BYTES = 8
ALIGN_BYTES = 256
_LENGTH = struct.Struct("<I")


class Part(NamedTuple):
    """Rows of one request within a piece: from `file_row` in its file, from `slot_row` in the slot."""

    number: int
    rid: str
    tokens: int
    file_row: int
    slot_row: int
    rows: int


def part_path(folder: str, rid: str, number: int) -> str:
    """Return the name of a request's file while rows are missing; the number tells two attempts apart."""
    return os.path.join(folder, f"{rid}.{number}{PART}")


def slot_places(blocks: tuple[int, ...], rows: int) -> list[int]:
    """Return where the blocks of so many rows (ids, aux, last) begin in a slot, and where the last one ends.

    The states are aligned for the device's widest loads; in a file the blocks lie side by side.
    """
    ids = rows * blocks[0]
    states = itertools.accumulate((row * rows for row in blocks[1:]), initial=ids + -ids % ALIGN_BYTES)
    return [0, *states]


def file_places(blocks: tuple[int, ...], tokens: int) -> list[int]:
    """Return where the blocks of a request (ids, aux, last) begin in its file, and where the last one ends."""
    return list(itertools.accumulate((row * tokens for row in blocks), initial=HEADER_BYTES))


def send(connection: socket.socket, frame: tuple[Any, ...]) -> None:
    """Send one frame. Raises OSError where nobody is there any more."""
    data = marshal.dumps(frame)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def frames(connection: socket.socket) -> Iterator[tuple[Any, ...]]:
    """Receive frames until the other end is closed. Raises OSError."""
    with connection.makefile("rb") as stream:
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if len(data := stream.read(length)) < length:
                return  # its sender was killed in the middle of it
            yield marshal.loads(data)


def put(fd: int, views: list[memoryview], at: int) -> None:
    """Write views side by side from a place in a file; a short write is gone on with. Raises OSError."""
    while views:
        written = os.pwritev(fd, views, at)
        at += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


class Files:
    """Writes parts of requests. Any thread may write; each request is counted under a lock."""

    def __init__(self, folder: str, blocks: tuple[int, ...], header: dict[str, Any]) -> None:
        self._folder, self._blocks, self._header = folder, blocks, header
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()

    def write(self, part: Part, slot: memoryview, rows: int, layers: list[int] | None) -> bool:
        """Write a part; say whether its request is whole now. Raises OSError: FileNotFoundError where it was let go."""
        views = [
            slot[begin + part.slot_row * row_bytes :][: part.rows * row_bytes]
            for row_bytes, begin in zip(self._blocks, slot_places(self._blocks, rows), strict=False)
        ]
        path, places = part_path(self._folder, part.rid, part.number), file_places(self._blocks, part.tokens)
        header = memoryview(self._header_of(part, places[-1], layers))
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if part.rows == part.tokens:
                put(fd, [header, *views], 0)
            else:
                for view, row_bytes, place in zip(views, self._blocks, places, strict=False):
                    put(fd, [view], place + part.file_row * row_bytes)
                if not self._last(part):
                    return False
                put(fd, [header], 0)
        finally:
            os.close(fd)
        os.rename(path, os.path.join(self._folder, part.rid + STATES))
        return True

    def _last(self, part: Part) -> bool:
        with self._lock:
            left = self._left.pop(part.number, part.tokens) - part.rows
            if left:
                self._left[part.number] = left
            return not left

    def forget(self, number: int) -> None:
        """Count no further rows of a request."""
        with self._lock:
            self._left.pop(number, None)

    def _header_of(self, part: Part, size: int, layers: list[int] | None) -> bytes:
        record = {**self._header, "rid": part.rid, "rows": part.tokens, "effective_layers": layers, "bytes": size}
        return json.dumps(record).encode("ascii").ljust(HEADER_BYTES - 1) + b"\n"


class Pieces:
    """The threads that write; the answers go back under one lock."""

    def __init__(self, connection: socket.socket, slots: memoryview, slot_bytes: int, files: Files, threads: int):
        self._connection, self._slots, self._slot_bytes, self._files = connection, slots, slot_bytes, files
        self._lock = threading.Lock()
        self._work: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(threads)]
        self._threads = [threading.Thread(target=self._write_all, args=[work]) for work in self._work]
        for thread in self._threads:
            thread.start()

    def take(self, piece: tuple[Any, ...]) -> None:
        """Hand a piece to a thread: writers of one file wait for each other in the kernel, so a request has one."""
        self._work[piece[3][0][0] % len(self._work)].put(piece)

    def close(self) -> None:
        """Write what was taken, and end."""
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()

    def _write_all(self, work: queue.SimpleQueue[Any]) -> None:
        while (piece := work.get()) is not None:
            answer = self._write(*piece)
            with self._lock:
                try:
                    send(self._connection, answer)
                except OSError:
                    pass  # the scheduler is gone; what is in the queue is written all the same

    def _write(self, slot: int, rows: int, layers: list[int] | None, parts: list[Any]) -> tuple[Any, ...]:
        view, written = self._slots[slot * self._slot_bytes :], 0
        whole: list[int] = []
        gone: list[int] = []
        failed: list[tuple[int, str]] = []
        for part in itertools.starmap(Part, parts):
            try:
                if self._files.write(part, view, rows, layers):
                    whole.append(part.number)
                written += part.rows
            except FileNotFoundError:
                gone.append(part.number)
                self._files.forget(part.number)
            except Exception as problem:
                failed.append((part.number, str(problem) if isinstance(problem, OSError) else repr(problem)))
                self._files.forget(part.number)
        return slot, written, whole, gone, failed


def main() -> None:
    """Write what comes until nobody sends any more. argv: a JSON object that `writer.py` makes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    memory = mmap.mmap(given["slots_fd"], 0, prot=mmap.PROT_READ)
    files = Files(given["folder"], tuple(given["blocks"]), given["header"])
    with socket.socket(fileno=given["socket_fd"]) as connection:
        pieces = Pieces(connection, memoryview(memory), given["slot_bytes"], files, given["writers"])
        try:
            for piece in frames(connection):
                pieces.take(piece)
        finally:
            pieces.close()


if __name__ == "__main__":
    main()
