"""Our shards as a data folder of speculators 0.9: arrow dataset, one safetensors file a row, vocabulary maps.

    hidden work folder beside the output -> each row's file whole and synced, then named -> dataset and maps
    -> the work folder takes the output's name

So the output is there whole or not at all. A row's file under its name in the work folder is finished: the same
command goes on from there, and the plan kept in it refuses another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend.extraction.bfloat16 import bfloat16_words
from backend.extraction.durable import discard, pwrite_all, replace_file, reserve, retried, sync_folder
from backend.extraction.formats import arrow
from backend.extraction.formats.finalnorm import FinalNorm, before_norm
from backend.extraction.formats.torchfile import counts_file
from backend.extraction.formats.vocabulary import add_trained, vocabulary_map
from backend.extraction.journal import FolderLock
from backend.extraction.prepare.permutation import shuffled
from backend.extraction.readshard import ShardError, ShardFolder
from backend.shardfmt import layout
from backend.wire import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from backend.extraction.journal import Entry
    from backend.extraction.progress import Reporter
    from backend.extraction.readshard import Shard

STATES_FOLDER, RECORD_NAME, PLAN_NAME = "hidden_states", "export.json", ".plan.json"
ORDERS = ("corpus", "shuffled")
_BLOCK_ROWS = 1024


class Wishes(NamedTuple):
    """What is asked for. The order is the corpus's (which prepare has shuffled) or that of a seed."""

    out: str
    order: str = "corpus"
    seed: int = 0
    draft_vocab_size: int = 0


class SpeculatorsExport:
    """One export. `asked` says whether someone wants it to end; then it raises KeyboardInterrupt between rows."""

    def __init__(
        self, folder: ShardFolder, norm: FinalNorm, wishes: Wishes, reporter: Reporter, asked: Callable[[], bool]
    ) -> None:
        self._folder, self._norm, self._wishes, self._reporter, self._asked = folder, norm, wishes, reporter, asked
        count = len(folder.entries)
        order = shuffled(count, wishes.seed) if wishes.order == "shuffled" else range(count)
        self._rows = [folder.entries[number] for number in order]
        out = os.path.abspath(wishes.out)
        self._out = out
        self._work = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.part")
        self._plan = self._digest()

    def run(self) -> dict[str, Any]:
        """Export, and return the record. Raises ShardError, DiskFull or OSError; what is finished stays."""
        if os.path.exists(self._out):
            return self._there()
        os.makedirs(os.path.join(self._work, STATES_FOLDER), exist_ok=True)
        lock = FolderLock(self._work)
        try:
            self._claim()
            self._enough_room()
            self._states()
            record = self._finish()
            discard(os.path.join(self._work, layout.LOCK_NAME))
            discard(os.path.join(self._work, PLAN_NAME))
            os.rename(self._work, self._out)
            sync_folder(os.path.dirname(self._out))
        finally:
            lock.release()
        self._reporter.tell("done", "", force=True)
        return record

    def _digest(self) -> str:
        """Return what makes two exports the same: the shards' content, their order, the norm and the maps."""
        wishes = self._wishes
        seed = wishes.seed if wishes.order == "shuffled" else None
        record = [SCHEMA, self._folder.hidden_size, self._folder.capture_points, wishes.order, seed,
                  wishes.draft_vocab_size, hashlib.sha256(self._norm.scale.tobytes()).hexdigest(),
                  [(entry.index, entry.bytes, entry.crc32) for entry in self._rows]]  # fmt: skip
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()

    def _there(self) -> dict[str, Any]:
        try:
            with open(os.path.join(self._out, RECORD_NAME), "rb") as file:
                record: dict[str, Any] = json.load(file)
            if record.get("plan") == self._plan:
                self._reporter.tell("done", "it is there already", force=True)
                return record
        except (OSError, ValueError, AttributeError):
            pass
        raise ShardError(f"{self._out} is there, and is not this export; use another name, or remove it")

    def _claim(self) -> None:
        path = os.path.join(self._work, PLAN_NAME)
        try:
            with open(path, encoding="ascii") as file:
                begun = file.read().strip()
        except FileNotFoundError:
            begun = ""
        if begun and begun != self._plan:
            raise ShardError(f"{self._work}: another export was begun there; finish it, or remove it")
        if not begun:
            replace_file(path, self._plan.encode() + b"\n")
        states = os.path.join(self._work, STATES_FOLDER)
        for name in os.listdir(states):
            if name.endswith(".tmp"):
                discard(os.path.join(states, name))

    def _size(self, entry: Entry) -> int:
        return len(_header(entry.tokens, len(self._folder.capture_points), self._folder.hidden_size)) + entry.tokens * (
            8 + (len(self._folder.capture_points) + 1) * self._folder.hidden_size * 2
        )

    def _path(self, row: int) -> str:
        return os.path.join(self._work, STATES_FOLDER, f"hs_{row}.safetensors")

    def _done(self, row: int, entry: Entry) -> bool:
        try:
            return os.stat(self._path(row)).st_size == self._size(entry)
        except OSError:
            return False

    def _enough_room(self) -> None:
        rows = list(enumerate(self._rows))
        progress = self._reporter.progress
        missing = [(row, entry) for row, entry in rows if not self._done(row, entry)]
        need = sum(self._size(entry) for _, entry in missing) + 16 * sum(entry.tokens for _, entry in rows)
        room = os.statvfs(self._work)
        if need > room.f_bavail * room.f_frsize:
            raise ShardError(
                f"the export needs {need:,} bytes more, and {self._work} has {room.f_bavail * room.f_frsize:,} free; "
                "make room, or export to another disk. Nothing was written now"
            )
        progress.samples_total, progress.tokens_total = len(rows), sum(entry.tokens for _, entry in rows)
        progress.bytes_total = sum(self._size(entry) for _, entry in rows)
        there = [entry for row, entry in rows if self._done(row, entry)]
        progress.samples_done, progress.tokens_done = len(there), sum(entry.tokens for entry in there)
        progress.bytes_written = sum(self._size(entry) for entry in there)
        progress.samples_resumed = len(there)

    def _states(self) -> None:
        for row, entry in enumerate(self._rows):
            if self._done(row, entry):
                continue
            if self._asked():
                raise KeyboardInterrupt
            shard = self._folder.read(entry)
            self._row(row, shard, before_norm(shard.last, self._norm, entry.file))
            self._reporter.advance(1, entry.tokens, self._size(entry))
            self._reporter.tell("running", "")
        sync_folder(os.path.join(self._work, STATES_FOLDER))

    def _row(self, row: int, shard: Shard, before: NDArray[np.float32]) -> None:
        """Write one row's file whole, synced, then under its name."""
        tokens, points, hidden = len(shard.input_ids), len(self._folder.capture_points), self._folder.hidden_size
        head = _header(tokens, points, hidden)
        final = self._path(row)
        temporary = os.path.join(os.path.dirname(final), f".hs_{row}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            try:
                at = len(head) + 8 * tokens
                reserve(fd, at + 2 * tokens * (points + 1) * hidden)
                pwrite_all(fd, head, 0)
                pwrite_all(fd, shard.input_ids.tobytes(), len(head))
                for begin in range(0, tokens, _BLOCK_ROWS):
                    end = min(begin + _BLOCK_ROWS, tokens)
                    block = np.empty((end - begin, points + 1, hidden), np.uint16)
                    block[:, :points] = shard.aux[begin:end].reshape(end - begin, points, hidden)
                    block[:, points] = bfloat16_words(before[begin:end])
                    pwrite_all(fd, block.data.cast("B"), at)
                    at += block.nbytes
                retried(lambda: os.fdatasync(fd))
            finally:
                os.close(fd)
            os.rename(temporary, final)
        except BaseException:
            discard(temporary)
            raise

    def _finish(self) -> dict[str, Any]:
        """Write what a trainer reads beside the states, then the record."""
        self._reporter.tell("running", "writing the dataset", force=True)
        counts = np.zeros(self._folder.vocab_size, np.int64)
        arrow.write_dataset(self._work, self._tokens(counts), self._plan[:16])
        found = {int(token): int(counts[token]) for token in np.flatnonzero(counts)}
        replace_file(os.path.join(self._work, "token_freq.pt"), counts_file("token_freq.pt", found))
        draft, covered = self._wishes.draft_vocab_size, None
        if draft:
            maps = vocabulary_map(counts, draft)
            covered = round(maps.covered, 6)
            for name, values in (("d2t", maps.d2t), ("t2d", maps.t2d)):
                _save(os.path.join(self._work, f"{name}-{draft}.npy"), values)
        record = {
            "schema": SCHEMA, "at": time.time(), "format": "speculators 0.9", "plan": self._plan,
            "shards": os.path.abspath(self._folder.path), "model": self._folder.header.get("model"),
            "samples": len(self._rows), "tokens": sum(entry.tokens for entry in self._rows),
            "bytes": sum(self._size(entry) for entry in self._rows), "order": self._wishes.order,
            "seed": self._wishes.seed if self._wishes.order == "shuffled" else None,
            "target_layer_ids": self._folder.capture_points, "hidden_size": self._folder.hidden_size,
            "last": f"before the final norm, up to each row's length: divided by {self._norm.source}",
            "draft_vocab_size": draft or None, "draft_vocab_covers": covered,
            "rows": [entry.index for entry in self._rows],
        }  # fmt: skip
        replace_file(os.path.join(self._work, RECORD_NAME), json.dumps(record).encode("ascii") + b"\n")
        return record

    def _tokens(self, counts: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for entry in self._rows:
            if self._asked():
                raise KeyboardInterrupt
            ids, mask = self._folder.read_tokens(entry)
            add_trained(counts, ids, mask)
            yield ids, mask


def _header(tokens: int, points: int, hidden: int) -> bytes:
    """Return the safetensors header: ids first, so that both tensors are aligned to their element."""
    ids = 8 * tokens
    states = 2 * tokens * (points + 1) * hidden
    header = {
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids]},
        "hidden_states": {"dtype": "BF16", "shape": [tokens, points + 1, hidden], "data_offsets": [ids, ids + states]},
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _save(path: str, values: NDArray[Any]) -> None:
    from io import BytesIO

    buffer = BytesIO()
    np.save(buffer, values)
    replace_file(path, buffer.getvalue())
