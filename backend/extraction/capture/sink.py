"""Rows from the device into shared slots: buffers on the device, a stream of its own, and a thread that waits."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .config import Refused, words
from .writer import CLOSE_S, Writer
from .writing import ALIGN_BYTES, FORMAT, ID_BYTES, Part, file_places, slot_places

if TYPE_CHECKING:
    from .config import Config, Counters
    from .folder import Folder

PAGE_BYTES = 4096
BUFFERS = 8
"""Pieces that may be on their way from the device at once; the device itself waits where there are more."""

_cuda: Any = torch.cuda  # parts of it are untyped


class Rows(NamedTuple):
    """Rows of a pass: ids [n], each capture point [n, H], and last [n, H]."""

    ids: torch.Tensor
    points: list[torch.Tensor]
    last: torch.Tensor


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

    def file_bytes(self, tokens: int) -> int:
        """Return the size of a request's file."""
        return file_places(self.blocks, tokens)[-1]

    def fill(self, buffer: torch.Tensor, rows: Rows) -> int:
        """Lay rows out in a buffer of bytes as a slot holds them; return how many bytes."""
        count, places = rows.ids.shape[0], slot_places(self.blocks, rows.ids.shape[0])
        buffer[: count * ID_BYTES].view(torch.int64).copy_(rows.ids)
        aux = buffer[places[1] : places[2]].view(self.dtype).view(count, -1)
        if len(rows.points) == 1:
            aux.copy_(rows.points[0])
        else:
            torch.cat(rows.points, dim=-1, out=aux)
        buffer[places[2] : places[3]].view(self.dtype).view(count, -1).copy_(rows.last)
        return places[3]


class _Buffer:
    """Rows on the device, until `copied` says that they have left it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.copied = data, _cuda.Event()


def _cut(memory: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [memory[begin : begin + size] for begin in range(0, memory.numel(), size)]


class _Piece(NamedTuple):
    slot: int
    frame: tuple[Any, ...]
    event: Any | None


class Sink:
    """Takes pieces of at most `slot_rows` rows. Whoever calls `send` waits while every slot is in use."""

    def __init__(self, config: Config, folder: Folder, counters: Counters, form: Form, device: torch.device) -> None:
        """Make slots and threads. Raises Refused where a slot cannot hold a row, or what torch raises."""
        self.form, self.slot_rows = form, config.slot_bytes // sum(form.blocks)
        if not self.slot_rows:
            raise Refused(f"a row has {sum(form.blocks):,} bytes, and a slot only {config.slot_bytes:,} (slot_bytes)")
        self._folder, self._counters = folder, counters
        size = config.slot_bytes + ALIGN_BYTES
        size += -size % PAGE_BYTES
        header = {"format": FORMAT, "points": counters.points, "hidden_size": form.hidden_size,
                  "dtype": counters.dtype}  # fmt: skip
        about = {"folder": folder.path, "writers": config.writers, "blocks": form.blocks, "header": header}
        self._writer = Writer(about, config.slots, size, self._heard, self._lost)
        self._pinned: torch.Tensor | None = None
        self._stream: Any = None
        with torch.inference_mode(False):
            memory = torch.frombuffer(self._writer.memory, dtype=torch.uint8)
            self._slots = _cut(memory, size)
            if device.type == "cuda":
                # The buffers come first: where the device has no room for them, nothing is pinned yet.
                data = torch.empty(min(BUFFERS, config.slots) * size, dtype=torch.uint8, device=device)
                self._buffers = [_Buffer(part) for part in _cut(data, size)]
                self._events = [_cuda.Event(blocking=True) for _ in self._slots]  # one that spun would take a core
                self._stream = _cuda.Stream(device)
                self._pin(memory, device)
        self._turn = 0
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in range(config.slots):
            self._free.put(slot)
        self._flying: set[int] = set()
        self._copied: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._forwarder = threading.Thread(target=self._forward_all, name="eightzeros-forward", daemon=True)
        self._forwarder.start()

    def _pin(self, memory: torch.Tensor, device: torch.device) -> None:
        """Pin the slots. Where the host does not allow it copies are right but slow, and the counters say so."""
        code = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if not code:
            self._pinned = memory
            return
        said = f"{memory.numel():,} bytes of slots could not be pinned (CUDA error {code}): copies will be slow"
        self._counters.error = said
        try:
            torch.zeros(1, device=device)
        except RuntimeError:
            pass  # CUDA keeps a refusal for whoever launches the next kernel, which must not be the server

    def close(self) -> None:
        """Let the writer finish what it was given, and end it."""
        self._copied.put(None)
        self._forwarder.join(CLOSE_S)
        self._writer.close()
        if self._pinned is not None and not self._forwarder.is_alive():  # else the device may still write to them
            # CUDA goes by address: whatever came to lie there next would count as pinned, and could not be.
            _cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None

    def send(self, parts: list[Part], rows: Rows, deadline: float) -> None:
        """Copy rows into a slot and have them written. Raises Refused or what torch raises."""
        began = time.monotonic()
        try:
            slot = self._free.get(timeout=max(0.0, deadline - began))
        except queue.Empty:
            raise Refused("no slot became free in time: the staging folder is written too slowly") from None
        finally:
            self._counters.wait_s += time.monotonic() - began
        try:
            event = self._copy(slot, rows)
        except BaseException:
            self._free.put(slot)
            raise
        self._folder.queue(1)
        frame = (slot, rows.ids.shape[0], self._counters.effective_layers, [tuple(part) for part in parts])
        self._copied.put(_Piece(slot, frame, event))

    def _copy(self, slot: int, rows: Rows) -> Any | None:
        """Start the copy; return the event that says when it is done. What it reads may change from now on."""
        target = self._slots[slot]
        if self._stream is None:
            self.form.fill(target, rows)
            return None
        buffer, self._turn = self._buffers[self._turn], (self._turn + 1) % len(self._buffers)
        computing = _cuda.current_stream(rows.last.device)
        computing.wait_event(buffer.copied)
        size = self.form.fill(buffer.data, rows)
        self._stream.wait_stream(computing)
        with _cuda.stream(self._stream):
            target[:size].copy_(buffer.data[:size], non_blocking=True)
            buffer.copied.record(self._stream)
            self._events[slot].record(self._stream)
        return self._events[slot]

    def _forward_all(self) -> None:
        """Tell the writer of each piece as its copy is done."""
        while (piece := self._copied.get()) is not None:
            try:
                if piece.event is not None:
                    piece.event.synchronize()
            except Exception as error:
                self._give_up(piece, f"the copy from the device failed: {error!r}")
                continue
            with self._folder.lock:
                self._flying.add(piece.slot)
            try:
                self._writer.send(piece.frame)
            except Exception as error:
                with self._folder.lock:
                    mine = piece.slot in self._flying
                    self._flying.discard(piece.slot)
                if mine:  # else `_lost` has seen to it
                    self._give_up(piece, f"the process that writes the states cannot be told: {words(error)}")

    def _give_up(self, piece: _Piece, reason: str) -> None:
        failed = [(part[0], reason) for part in piece.frame[3]]
        self._folder.heard([], [], failed)
        self._land(piece.slot)

    def _land(self, slot: int) -> None:
        self._folder.queue(-1)
        self._free.put(slot)

    def _heard(self, answer: tuple[Any, ...]) -> None:
        slot, rows, whole, gone, failed = answer
        with self._folder.lock:
            self._counters.rows += rows
            self._counters.bytes += rows * sum(self.form.blocks)
            self._flying.discard(slot)
        self._folder.heard(whole, gone, failed)
        self._land(slot)

    def _lost(self, reason: str) -> None:
        """Fail what was being received: the writer that held rows of it is gone. The next piece starts another."""
        self._folder.fail_all(reason)
        with self._folder.lock:
            slots, self._flying = self._flying, set()
        for slot in slots:
            self._land(slot)
