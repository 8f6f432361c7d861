"""The extraction: a corpus in, shards out, resumable at any moment.

Exit codes: 0 every sample asked for is in the folder; 1 it failed, or some samples could not be extracted
(they are listed); 2 usage; 128 + the signal's number where SIGTERM or SIGINT stopped it: the sample in
flight was finished and everything written was committed, so starting it again goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from backend.extraction import config
from backend.extraction.corpus import Corpus, CorpusError
from backend.extraction.durable import DiskFull
from backend.extraction.engines import NAMES, EngineError, open_engine
from backend.extraction.journal import (
    FolderLock,
    Header,
    Journal,
    JournalError,
    forget_missing,
    remove_leftovers,
)
from backend.extraction.progress import Reporter
from backend.extraction.writer import BadStates, Sample, ShardWriter, shard_bytes
from backend.shardfmt import layout
from backend.wire import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from backend.extraction.engines import Engine

TICK_S = 0.2
FULL_POLL_S = 1.0
"""How often a full disk is looked at again. A quota shows only by trying, so each look may also try."""


class Stop:
    """SIGTERM and SIGINT as a wish that the loop looks at; a second one changes nothing."""

    def __init__(self) -> None:
        self.signal = 0
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._asked) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._event.set()

    def asked(self) -> bool:
        """Say whether someone wants this to end."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, or less where someone wants this to end; say whether someone does."""
        return self._event.wait(seconds)


class Extraction:
    """One extraction into one locked folder."""

    def __init__(self, engine: Engine, corpus: Corpus, out: str, journal: Journal, reporter: Reporter) -> None:
        self.failed: list[dict[str, Any]] = []
        self.resumed = 0
        self._engine, self._corpus, self._out = engine, corpus, out
        self._journal, self._reporter = journal, reporter
        self._writer = ShardWriter(out, journal, engine.hidden_size, len(engine.capture_points))
        self._stop = Stop()

    @property
    def stopped_by(self) -> int:
        """Return the signal that stopped it, or 0."""
        return self._stop.signal

    def run(self, limit: int | None, throttle: float | None) -> str:
        """Extract what is missing of the first `limit` samples; return the state: done, stopped or failed."""
        wanted = range(min(limit or len(self._corpus), len(self._corpus)))
        self._count(wanted)
        missing = [index for index in wanted if index not in self._journal.entries]
        with self._stop:
            try:
                self._with_room(lambda: self._describe("running"), MIB)
                self._loop(missing, throttle)
                return self._finish(wanted)
            except BaseException as error:
                self._reporter.tell("failed", f"{type(error).__name__}: {error}", force=True)
                raise

    def _count(self, wanted: range) -> None:
        """Set the totals, exactly: a file's size follows from its number and its tokens."""
        corpus, hidden, points = self._corpus, self._engine.hidden_size, len(self._engine.capture_points)
        there = [self._journal.entries[index] for index in wanted if index in self._journal.entries]
        progress = self._reporter.progress
        self.resumed = progress.samples_resumed = progress.samples_done = len(there)
        progress.tokens_done = sum(entry.tokens for entry in there)
        progress.bytes_written = sum(entry.bytes for entry in there)
        progress.samples_total = len(wanted)
        progress.tokens_total = sum(corpus.tokens(index) for index in wanted)
        progress.bytes_total = sum(shard_bytes(index, corpus.tokens(index), hidden, points) for index in wanted)

    def _loop(self, missing: Sequence[int], throttle: float | None) -> None:
        self._reporter.tell("running", "")
        next_at = time.monotonic()
        for index in missing:
            if not self._wait_until(next_at):
                return
            next_at = max(next_at + 1 / throttle, time.monotonic()) if throttle else 0.0
            self._one(index)
            self._commit_if_due()

    def _wait_until(self, at: float) -> bool:
        """Keep the rate limit, committing what is due meanwhile; say whether to go on."""
        while not self._stop.asked():
            left = at - time.monotonic()
            if left <= 0:
                return True
            self._stop.wait(min(left, TICK_S))
            self._commit_if_due()
        return False

    def _one(self, index: int) -> None:
        row = self._corpus.row(index)
        try:
            states = self._engine.states(row.input_ids)
            sample = Sample(index, row.id, row.input_ids, row.loss_mask, states)
            size = shard_bytes(index, len(row.input_ids), self._engine.hidden_size, len(self._engine.capture_points))
            if self._with_room(lambda: self._writer.write(sample), size):
                self._reporter.progress.shard = layout.shard_path(index)
        except (EngineError, BadStates) as error:
            self.failed.append({"index": index, "id": row.id, "reason": str(error)})
            self._reporter.progress.samples_failed = len(self.failed)
            self._reporter.say(f"sample {index} ({row.id}) was not extracted: {error}")

    def _commit_if_due(self) -> None:
        if self._writer.due:
            self._with_room(self._commit, MIB)
        self._reporter.progress.samples_in_flight = self._writer.pending
        self._reporter.tell()

    def _commit(self) -> None:
        committed = self._writer.commit()
        self._reporter.advance(len(committed), sum(e.tokens for e in committed), sum(e.bytes for e in committed))

    def _with_room(self, action: Callable[[], object], needed_bytes: int) -> bool:
        """Do it, waiting while the disk is full. Returns False, undone, where someone ended the wait."""
        while True:
            try:
                action()
            except DiskFull as full:
                if not self._room(needed_bytes, str(full)):
                    return False
                continue
            if self._reporter.progress.state == "paused":
                self._reporter.say("there is room again: going on")
                self._reporter.tell("running", "")
            return True

    def _room(self, needed_bytes: int, why: str) -> bool:
        """Wait until the disk seems to have room. Returns False where someone wants this to end."""
        if self._reporter.progress.state != "paused":
            self._commit_what_fits()
        while not self._stop.asked():
            free = _free_bytes(self._out)
            self._reporter.tell(
                "paused",
                f"disk full ({why}): {self._out} has {free // MIB:,} MiB free, {needed_bytes // MIB + 1:,} "
                "MiB are needed; it goes on by itself when there is room",
            )
            if not self._stop.wait(FULL_POLL_S) and _free_bytes(self._out) >= needed_bytes:
                return True
        return False

    def _commit_what_fits(self) -> bool:
        """Make safe what is already written; a journal line needs little room. Says whether it could."""
        try:
            self._commit()
        except DiskFull:
            return False
        return True

    def _finish(self, wanted: range) -> str:
        stopped = self._stop.asked()
        if stopped:
            self._reporter.tell("stopping", "committing what is written", force=True)
            if not self._commit_what_fits():
                self._writer.discard()
        elif not self._with_room(self._commit, MIB):
            self._writer.discard()
        whole = all(index in self._journal.entries for index in range(len(self._corpus)))
        missing = any(index not in self._journal.entries for index in wanted)
        state = "failed" if self.failed else "stopped" if missing else "done"
        if missing and not self.failed and not stopped and not self._stop.asked():
            raise AssertionError("samples are missing although nothing failed and nobody stopped it")
        self._reporter.progress.samples_in_flight = 0
        try:
            self._describe("complete" if whole else "incomplete")
        except DiskFull:
            self._reporter.say(f"{layout.CONFIG_NAME} could not be brought up to date: the disk is full")
        self._reporter.tell(state, self._ending(state), force=True)
        return state

    def _ending(self, state: str) -> str:
        if state == "failed":
            return f"{len(self.failed)} samples could not be extracted; start it again to try them again"
        return "stopped; start it again to go on" if state == "stopped" else ""

    def _describe(self, state: str) -> None:
        config.write(self._out, config.describe(self._engine, self._corpus, self._journal, state, self.failed))


def _free_bytes(path: str) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def extract(args: argparse.Namespace, reporter: Reporter) -> tuple[dict[str, Any], int]:
    """Run one extraction; return its result and exit code. Raises what `main` turns into a message."""
    began = time.monotonic()
    reporter.tell("starting", "checking the corpus")
    with contextlib.ExitStack() as stack:
        engine = open_engine(args.engine)
        stack.callback(engine.close)
        corpus = Corpus(args.corpus, engine.vocab_size, args.skip_bad)
        stack.callback(corpus.close)
        for bad in corpus.skipped:
            reporter.say(f"left out: {args.corpus}:{bad.line}: {bad.problem}")
        os.makedirs(args.out, exist_ok=True)
        stack.callback(FolderLock(args.out).release)
        journal = Journal(os.path.join(args.out, layout.JOURNAL_NAME), _header(engine, corpus))
        stack.callback(journal.close)
        remove_leftovers(args.out)
        for entry in forget_missing(journal, args.out):
            reporter.say(f"{entry.file} is gone or has another size than the journal says: extracting it again")
        work = Extraction(engine, corpus, args.out, journal, reporter)
        state = work.run(args.limit, args.throttle)
    code = {"done": 0, "failed": 1}.get(state, 128 + work.stopped_by)
    return _result(work, corpus, reporter, args.out, state, time.monotonic() - began), code


def _header(engine: Engine, corpus: Corpus) -> Header:
    return Header(
        corpus=os.path.abspath(corpus.path),
        corpus_sha256=corpus.sha256,
        corpus_bytes=corpus.bytes,
        corpus_lines=corpus.lines,
        engine=engine.name,
        model=engine.model,
        hidden_size=engine.hidden_size,
        capture_points=list(engine.capture_points),
    )


def _result(
    work: Extraction, corpus: Corpus, reporter: Reporter, out: str, state: str, seconds: float
) -> dict[str, Any]:
    """Say what is in the folder. `samples`, `tokens` and `bytes` count resumed ones too."""
    p = reporter.progress
    return {
        "state": state,
        "samples": p.samples_done,
        "samples_wanted": p.samples_total,
        "tokens": p.tokens_done,
        "bytes": p.bytes_written,
        "shards": p.samples_done,
        "resumed": work.resumed,
        "failed": work.failed,
        "skipped_lines": [bad.line for bad in corpus.skipped],
        "out": os.path.abspath(out),
        "seconds": round(seconds, 3),
    }


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    words = argparse.ArgumentParser(
        prog="extract", description="Extract hidden states of a corpus into shards; the same command resumes."
    )
    words.add_argument("--engine", choices=NAMES, default="embedded", help="what computes the states")
    words.add_argument("--corpus", required=True, help="JSON lines of input_ids, loss_mask (optional), id (optional)")
    words.add_argument("--out", required=True, help="the folder of the shards; made where absent")
    words.add_argument("--limit", type=_positive_int, help="only the first N samples")
    words.add_argument("--skip-bad", action="store_true", help="leave out bad lines and list them")
    words.add_argument("--throttle", type=_positive_float, metavar="SAMPLES_PER_S", help="a rate limit")
    words.add_argument("--json", action="store_true", help="print one JSON object at the end; all else to stderr")
    return words


def main(argv: Sequence[str]) -> int:
    """Extract, as the command line says, and return the exit code (see the top of this file)."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as usage:
        return int(usage.code or 0)
    reporter = Reporter(args.out, quiet=args.json)
    try:
        result, code = extract(args, reporter)
    except (CorpusError, JournalError, DiskFull, OSError) as error:
        text = f"the disk is full: {error}" if isinstance(error, DiskFull) else str(error)
        reporter.tell("failed", text, force=True)
        print(f"extract: {text}", file=sys.stderr, flush=True)
        result, code = {"state": "failed", "error": text, "out": os.path.abspath(args.out)}, 1
    if args.json:
        print(json.dumps(result), flush=True)
    return code


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value
