"""The account of one extraction: what was asked for, what is there, and what could not be extracted."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from backend.extraction import config
from backend.extraction.durable import DiskFull, discard, replace_file
from backend.extraction.writer import shard_bytes
from backend.shardfmt import layout
from backend.wire import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.extraction.corpus import Corpus
    from backend.extraction.engines import Engine
    from backend.extraction.journal import Entry, Journal
    from backend.extraction.progress import Reporter


class Ledger:
    """Keeps progress, failed.jsonl and data_config.json of one locked folder. For one thread."""

    def __init__(
        self,
        engine: Engine,
        corpus: Corpus,
        out: str,
        journal: Journal,
        reporter: Reporter,
        wanted: Sequence[int],
    ) -> None:
        self.engine, self.corpus, self.out, self.reporter = engine, corpus, out, reporter
        self.wanted = wanted
        self.journal = journal
        self.resumed = 0
        self._failed: dict[int, dict[str, Any]] = {}
        self._path = os.path.join(out, layout.FAILED_NAME)
        self._earlier = _read(self._path)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Return what could not be extracted this time, by index."""
        return [self._failed[index] for index in sorted(self._failed)]

    @property
    def missing(self) -> list[int]:
        """Return the wanted samples that are neither there nor failed, in their order."""
        return [i for i in self.wanted if i not in self.journal.entries and i not in self._failed]

    def size_bytes(self, index: int) -> int:
        """Return the exact size of a sample's file."""
        return shard_bytes(index, self.corpus.tokens(index), self.engine.hidden_size, len(self.engine.capture_points))

    def count(self) -> None:
        """Set the totals, exactly: a file's size follows from its number and its tokens."""
        entries = self.journal.entries
        there = [entries[index] for index in self.wanted if index in entries]
        progress = self.reporter.progress
        self.resumed = progress.samples_resumed = progress.samples_done = len(there)
        progress.tokens_done = sum(entry.tokens for entry in there)
        progress.bytes_written = sum(entry.bytes for entry in there)
        progress.samples_total = len(self.wanted)
        progress.tokens_total = sum(self.corpus.tokens(index) for index in self.wanted)
        left = sum(self.size_bytes(index) for index in self.wanted if index not in entries)
        progress.bytes_total = progress.bytes_written + left

    def committed(self, entries: Sequence[Entry]) -> None:
        """Count what is safe now."""
        self.reporter.advance(len(entries), sum(e.tokens for e in entries), sum(e.bytes for e in entries))

    def fail(self, index: int, name: str, reason: str, attempts: int = 1) -> None:
        """List a sample as not extracted, with its last reason."""
        record = {"index": index, "id": name, "tokens": self.corpus.tokens(index), "attempts": attempts,
                  "reason": reason, "at": time.time()}  # fmt: skip
        self._failed[index] = record
        self.reporter.progress.samples_failed = len(self._failed)
        self.reporter.say(f"sample {index} ({name}) was not extracted: {reason}")
        try:
            with open(self._path, "ab") as file:
                file.write(_line(record))
        except OSError as error:
            self.reporter.say(f"{self._path}: {error}; the reason is in {layout.CONFIG_NAME} at the end")

    def describe(self, state: str) -> None:
        """Write data_config.json. Raises DiskFull or OSError."""
        config.write(self.out, config.describe(self.engine, self.corpus, self.journal, state, self.failed))

    def close(self, stopped: bool, why: str = "") -> str:
        """Bring the files up to date and return the state: done, stopped or failed.

        `why` is what ended it before its time, other than a signal.
        """
        entries = self.journal.entries
        missing = any(index not in entries for index in self.wanted)
        state = "failed" if self._failed or why else "stopped" if missing else "done"
        if missing and not self._failed and not stopped and not why:
            raise AssertionError("samples are missing although nothing failed and nobody stopped it")
        self.reporter.progress.samples_in_flight = self.reporter.progress.requests_in_flight = 0
        try:
            self._list_failed()
            self.describe("complete" if all(i in entries for i in range(len(self.corpus))) else "incomplete")
        except DiskFull:
            self.reporter.say(f"{layout.CONFIG_NAME} could not be brought up to date: the disk is full")
        self.reporter.tell(state, why or self._ending(state), force=True)
        return state

    def _ending(self, state: str) -> str:
        if state == "failed":
            return f"{len(self._failed)} samples could not be extracted; start it again to try them again"
        return "stopped; start it again to go on" if state == "stopped" else ""

    def _list_failed(self) -> None:
        """Write failed.jsonl anew: one line a sample that is not there, also of earlier runs."""
        merged = {**self._earlier, **self._failed}
        lines = [_line(merged[i]) for i in sorted(merged) if i not in self.journal.entries]
        if lines:
            replace_file(self._path, b"".join(lines))
        else:
            discard(self._path)


def free_bytes(path: str) -> int:
    """Return the room that this user has on a path's filesystem."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def full(out: str, why: str, needed_bytes: int) -> str:
    """Say that the disk is full, in the words of a paused run."""
    return (
        f"disk full ({why}): {out} has {free_bytes(out) // MIB:,} MiB free, {needed_bytes // MIB + 1:,} "
        "MiB are needed; it goes on by itself when there is room"
    )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def _read(path: str) -> dict[int, dict[str, Any]]:
    """Read an earlier failed.jsonl; it is a list for people, so that a line that is none is left out."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
            found[int(record["index"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found
