"""Rows from the device into files: pinned slots, a stream of its own, and threads that write."""

from __future__ import annotations

import ctypes
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .config import Refused, words
from .folder import FORMAT, HEADER_BYTES, Request, pwrite

if TYPE_CHECKING:
    from .config import Config, Counters
    from .folder import Folder

ID_BYTES = 8
CLOSE_S = 5.0
_cuda: Any = torch.cuda  # parts of it are untyped


class Part(NamedTuple):
    """Rows of one request within a piece: from `file_row` in its file, from `slot_row` in the slot."""

    request: Request
    file_row: int
    slot_row: int
    rows: int


@dataclass(frozen=True)
class Form:
    """What a row is made of, the same for every request of a server."""

    points: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Bytes a row of ids, aux and last, in the order in which slots and files hold these blocks."""
        last = self.hidden_size * self.dtype.itemsize
        return ID_BYTES, self.points * last, last

    def places(self, rows: int) -> list[int]:
        """Return where the blocks of so many rows begin, counted from the first, and where the last one ends."""
        places = [0]
        for row_bytes in self.blocks:
            places.append(places[-1] + rows * row_bytes)
        return places

    def file_bytes(self, tokens: int) -> int:
        """Return the size of a request's file."""
        return HEADER_BYTES + self.places(tokens)[-1]


@dataclass
class _Piece:
    slot: torch.Tensor
    rows: int
    parts: list[Part]
    event: Any | None = None


class Sink:
    """Takes pieces of at most `slot_rows` rows. Whoever calls `send` waits while every slot is in use."""

    def __init__(self, config: Config, folder: Folder, counters: Counters, form: Form, device: torch.device) -> None:
        """Make slots and threads. Raises Refused where a slot cannot hold a row, or what torch raises."""
        self.form, self.slot_rows = form, config.slot_bytes // sum(form.blocks)
        if not self.slot_rows:
            raise Refused(f"a row has {sum(form.blocks):,} bytes, and a slot only {config.slot_bytes:,} (slot_bytes)")
        self._folder, self._counters = folder, counters
        cuda = device.type == "cuda"
        self._stream = _cuda.Stream(device) if cuda else None
        self._slots: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()  # the last one used is in the cache
        self._work: list[queue.SimpleQueue[_Piece | None]] = [queue.SimpleQueue() for _ in range(config.writers)]
        with torch.inference_mode(False):
            for _ in range(config.slots):
                self._slots.put(torch.empty(config.slot_bytes, dtype=torch.uint8, pin_memory=cuda))
        self._threads = [threading.Thread(target=self._write_all, args=[work], daemon=True) for work in self._work]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let the writers finish what they were given, and end them."""
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def send(self, parts: list[Part], sources: list[torch.Tensor], deadline: float) -> None:
        """Copy rows (ids, aux, last) into a slot and hand it to the writers. Raises Refused or what torch raises."""
        began = time.monotonic()
        try:
            slot = self._slots.get(timeout=max(0.0, deadline - began))
        except queue.Empty:
            raise Refused("no slot became free in time: the staging folder is written too slowly") from None
        finally:
            self._counters.wait_s += time.monotonic() - began
        piece = _Piece(slot, sources[0].shape[0], parts)
        try:
            self._copy(piece, sources)
        except BaseException:
            self._slots.put(slot)
            raise
        self._folder.queue(1)
        # Writers of one file wait for each other in the kernel, so a request has one writer.
        self._work[parts[0].request.number % len(self._work)].put(piece)

    def _copy(self, piece: _Piece, sources: list[torch.Tensor]) -> None:
        places = self.form.places(piece.rows)
        targets = [
            piece.slot[begin:end].view(source.dtype).view(source.shape)
            for source, (begin, end) in zip(sources, itertools.pairwise(places), strict=True)
        ]
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self._stream.wait_stream(_cuda.current_stream(sources[0].device))
        with _cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            piece.event = _cuda.Event(blocking=True)  # a writer that spun would take a core from the server
            piece.event.record(self._stream)

    def _write_all(self, work: queue.SimpleQueue[_Piece | None]) -> None:
        while (piece := work.get()) is not None:
            problem: Exception | None = None
            try:
                if piece.event is not None:
                    piece.event.synchronize()
            except Exception as error:
                problem = Refused(f"the copy from the device failed: {error!r}")
            for part in piece.parts:
                try:
                    if problem is not None:
                        raise problem
                    if not part.request.dropped:
                        self._write(piece, part)
                except FileNotFoundError:
                    self._folder.let_go(part.request)
                except Exception as error:
                    self._folder.fail(part.request.rid, words(error), part.request)
            self._folder.queue(-1)
            self._slots.put(piece.slot)

    def _write(self, piece: _Piece, part: Part) -> None:
        view = memoryview((ctypes.c_ubyte * piece.slot.numel()).from_address(piece.slot.data_ptr())).cast("B")
        here, there = self.form.places(piece.rows), self.form.places(part.request.tokens)
        blocks = []
        for row_bytes, begin, at in zip(self.form.blocks, here, there, strict=False):
            first = begin + part.slot_row * row_bytes
            place = HEADER_BYTES + at + part.file_row * row_bytes
            blocks.append((view[first : first + part.rows * row_bytes], place))
        pwrite(part.request.path, blocks)
        with self._folder.lock:
            self._counters.rows += part.rows
            self._counters.bytes += part.rows * sum(self.form.blocks)
        self._folder.written(part.request, part.rows, self._header)

    def _header(self, request: Request) -> bytes:
        record = {
            "format": FORMAT,
            "rid": request.rid,
            "rows": request.tokens,
            "points": self._counters.points,
            "hidden_size": self.form.hidden_size,
            "dtype": self._counters.dtype,
            "effective_layers": self._counters.effective_layers,
            "bytes": request.size_bytes,
        }
        return json.dumps(record).encode("ascii").ljust(HEADER_BYTES - 1) + b"\n"
