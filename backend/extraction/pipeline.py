"""An extraction from a server: many requests in flight, their states checked and written by threads.

One thread decides everything; senders ask the server, writers write, one committer commits, and all of them
answer with events. A staged file is removed only after its sample is committed.
"""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from backend.extraction import ledger as accounts
from backend.extraction.absence import Absence
from backend.extraction.durable import DiskFull
from backend.extraction.flights import SUSPECT_CRASHES, Flight, Flights
from backend.extraction.intake import states_of
from backend.extraction.senders import Ended, Senders
from backend.extraction.staging import StagingError
from backend.extraction.stop import Stop
from backend.extraction.watch import DiskWatch, StagingWatch, StallWatch
from backend.extraction.writer import BadStates, Sample, ShardWriter
from backend.shardfmt import layout
from backend.wire import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.extraction.engines.sglang import SglangEngine
    from backend.extraction.journal import Entry
    from backend.extraction.ledger import Ledger
    from backend.extraction.staging import Staged
    from backend.extraction.watch import Options

LOOK_EVERY_S = 0.004
"""How often the staging folder is looked at while requests are in flight; a look costs some 20 us."""

REST_S = 0.05
FULL_POLL_S = 1.0


@dataclass(frozen=True)
class _Done:
    """A writer's or the committer's or the probe's end: `what` is called with the future, by the deciding thread."""

    what: Callable[[Future[Any]], None]
    future: Future[Any]


class Pipeline:
    """One extraction into one locked folder."""

    def __init__(self, engine: SglangEngine, ledger: Ledger, options: Options) -> None:
        self._engine, self._ledger, self._options, self._reporter = engine, ledger, options, ledger.reporter
        self._writer = ShardWriter(ledger.out, ledger.journal, engine.hidden_size, len(engine.capture_points))
        # No SimpleQueue: a signal at the deadline of its get makes it wait for ever (CPython 3.11).
        self._events: queue.Queue[Ended | _Done] = queue.Queue()
        self._flights = Flights(ledger.missing)
        self._staging = StagingWatch(engine, ledger.reporter)
        self._disk, self._stall = DiskWatch(ledger.out), StallWatch(options.stall_s)
        self._stop = Stop()
        self._why = ""
        self._full = ""
        self._full_until = self._full_ended_at = 0.0
        self._roomless: list[Flight] = []
        self._gone = Absence(engine, options.server_wait_s)
        self._committing = self._tight = False
        self._next_at = 0.0

    def run(self, throttle: float | None) -> tuple[str, int]:
        """Extract what is missing; return the state (done, stopped or failed) and the signal that stopped it."""
        self._senders = Senders(self._engine, self._options.concurrency, self._events)
        self._writers = ThreadPoolExecutor(self._options.writers, "write")
        self._chores = ThreadPoolExecutor(2, "chores")  # no commit waits behind a sample
        with self._stop:
            try:
                self._describe()
                self._loop(throttle)
                self._drain()
            finally:
                self._senders.close()
                self._writers.shutdown(wait=True, cancel_futures=True)
                self._chores.shutdown(wait=True)
            return self._finish(), self._stop.signal

    def _describe(self) -> None:
        try:
            self._ledger.describe("running")
        except DiskFull as full:
            self._is_full(str(full), MIB)

    def _loop(self, throttle: float | None) -> None:
        self._reporter.tell("running", "")
        while self._flights.left and not self._stop.asked() and not self._why:
            self._step()
            self._watch()
            self._send(throttle)
            self._tell()

    def _drain(self) -> None:
        """Finish what is in flight, as long as one may wait, and give up the rest."""
        if self._stop.asked() or self._why:
            self._reporter.tell("stopping", "finishing what is in flight", force=True)
        end = time.monotonic() + self._options.drain_s
        while self._flights.under_way and time.monotonic() < end and not self._gone and not self._full:
            self._step()
            self._tell()
        while self._committing or any(f.staged is not None and not f.written for f in self._flights.under_way.values()):
            if self._full:
                break
            self._step()
        for flight in list(self._flights.under_way.values()):
            if not flight.written:
                self._engine.staging.forget(flight.rid)
                self._flights.end(flight)

    def _finish(self) -> str:
        """Commit what is written. The threads have ended, perhaps with a commit that nobody has heard of yet."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Done) and event.what == self._committed and not event.future.cancelled():
                self._settle(event.future.result() if event.future.exception() is None else [], _now)
        while True:
            try:
                entries = self._writer.commit()
            except DiskFull:
                self._writer.discard()
                break
            self._settle(entries, _now)
            if not self._writer.pending:
                break
        self._reporter.progress.requests_in_flight = 0
        return self._ledger.close(self._stop.asked(), self._why)

    # --- one turn ---

    def _step(self) -> None:
        """Take what has happened, look for states, commit what is due."""
        busy = bool(self._flights.under_way) or self._committing
        try:
            event: Ended | _Done | None = self._events.get(timeout=LOOK_EVERY_S if busy else REST_S)
        except queue.Empty:
            event = None
        while event is not None:
            if isinstance(event, Ended):
                self._ended(event)
            else:
                event.what(event.future)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                event = None
        self._look()
        self._lost()
        self._commit_if_due()

    def _start(self, pool: ThreadPoolExecutor, action: Callable[[], Any], what: Callable[[Future[Any]], None]) -> None:
        future = pool.submit(action)
        future.add_done_callback(lambda done: self._events.put(_Done(what, done)))

    def _ended(self, event: Ended) -> None:
        flight = self._flights.answered(event.rid)
        self._stall.moved()
        if event.gone:
            self._gone.begin(event.reason)
        if flight is None or flight.staged is not None or not event.reason:
            return
        if event.gone:
            flight.broken = f"the connection to the server broke: {event.reason}"
        else:
            self._engine.staging.forget(flight.rid)
            self._failed(flight, event.reason, final=event.final)

    def _look(self) -> None:
        """Take what the hook has finished."""
        if not self._flights.under_way:
            return
        try:
            seen = self._engine.staging.look()
        except OSError as error:
            self._why = self._why or f"the staging folder cannot be read: {error}"
            return
        for rid in seen.failed:
            flight = self._flights.under_way.get(rid)
            reason = self._read_reason(rid)
            if flight is not None and flight.staged is None:
                self._failed(flight, reason)
        for rid in seen.whole:
            flight = self._flights.under_way.get(rid)
            if flight is None:
                self._engine.staging.forget(rid)
            elif flight.staged is None:
                self._take(flight)

    def _read_reason(self, rid: str) -> str:
        try:
            return self._engine.staging.reason(rid)
        except (OSError, StagingError) as error:
            self._engine.staging.forget(rid)
            return str(error)

    def _take(self, flight: Flight) -> None:
        try:
            flight.staged = self._engine.staging.open(flight.rid)
        except (OSError, StagingError) as error:
            self._engine.staging.forget(flight.rid)
            self._failed(flight, str(error))
            return
        self._stall.moved()
        self._write(flight)

    def _write(self, flight: Flight) -> None:
        self._start(self._writers, partial(self._written_by, flight), partial(self._written, flight))

    def _written_by(self, flight: Flight) -> Entry:
        """Check and write one sample; this runs in a writer's thread."""
        row, staged = flight.row, flight.staged
        assert row is not None and staged is not None
        states = states_of(staged, row.input_ids, self._engine.hidden_size, self._engine.capture_points)
        return self._writer.write(Sample(flight.index, row.id, row.input_ids, row.loss_mask, states))

    def _written(self, flight: Flight, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            flight.written = True
            self._has_room()
            self._reporter.progress.shard = layout.shard_path(flight.index, self._ledger.journal.header.suffix)
        elif isinstance(error, DiskFull):
            self._roomless.append(flight)
            self._is_full(str(error), flight.file_bytes)
        elif isinstance(error, BadStates):
            self._engine.staging.forget(flight.rid)
            self._failed(flight, str(error))
        else:
            raise error

    def _lost(self) -> None:
        """Notice requests that were answered and left nothing."""
        patience = self._options.record_wait_s
        oldest = time.monotonic() - patience
        for flight in [f for f in self._flights.waiting() if 0 < f.answered_at < oldest and not f.broken]:
            self._engine.staging.forget(flight.rid)
            self._failed(flight, f"the server answered, and no states came within {patience:g} s")

    def _failed(self, flight: Flight, reason: str, final: bool = False, excused: bool = False) -> None:
        """Try a sample again, or list it. A disk that was full meanwhile excuses it: nothing could be taken."""
        excused = excused or bool(self._full) or flight.sent_at < self._full_ended_at
        flight.reason = reason
        row = flight.row
        if final or (not excused and flight.failures >= self._options.retries):
            self._flights.end(flight)
            self._ledger.fail(flight.index, row.id if row else "", reason, flight.attempts)
            return
        self._reporter.progress.requests_repeated += 1
        self._flights.again(flight, excused)

    # --- commits ---

    def _commit_if_due(self) -> None:
        finished = not self._flights.ready() and not self._flights.asked
        due = self._writer.due or (self._writer.pending and (self._tight or finished))
        if due and not self._committing and not (self._full and time.monotonic() < self._full_until):
            self._committing = True
            self._start(self._chores, self._writer.commit, self._committed)

    def _committed(self, future: Future[Any]) -> None:
        self._committing = False
        error = future.exception()
        if isinstance(error, DiskFull):
            self._is_full(str(error), MIB)
        elif error is not None:
            raise error
        else:
            self._settle(future.result(), self._chores.submit)

    def _settle(self, entries: list[Entry], do: Callable[..., object]) -> None:
        """Let go of what is safe now. Freeing 100 MB takes 40 ms, so that `do` may be another thread's."""
        there = {entry.index for entry in entries}
        for flight in [f for f in self._flights.under_way.values() if f.index in there]:
            kept = [flight.staged]
            self._flights.end(flight)
            do(_let_go, kept)
        if entries:
            self._stall.moved()
            self._has_room()
            self._ledger.committed(entries)

    # --- a full disk, and a server that is away ---

    def _is_full(self, why: str, needed_bytes: int) -> None:
        self._full = accounts.full(self._ledger.out, why, needed_bytes)
        self._full_until = time.monotonic() + FULL_POLL_S

    def _has_room(self) -> None:
        if self._full and not self._roomless:
            self._full, self._full_ended_at = "", time.monotonic()
            self._reporter.say("there is room again: going on")
            self._reporter.tell("running", "")

    def _watch(self) -> None:
        """Try a full disk and an absent server again, when it is time."""
        if self._full and time.monotonic() >= self._full_until:
            self._full_until = time.monotonic() + FULL_POLL_S
            needed = min((flight.file_bytes for flight in self._roomless), default=MIB)
            if accounts.free_bytes(self._ledger.out) >= needed:
                again, self._roomless = self._roomless, []
                for flight in again:
                    self._write(flight)
                if not again and not self._writer.pending:
                    self._has_room()
        self._why = self._why or self._gone.too_long()
        if self._gone.due():
            self._start(self._chores, self._gone.ask, self._asked)

    def _asked(self, future: Future[Any]) -> None:
        """Know whether the server went away, and with it what became of the requests that it had."""
        self._why = self._gone.asked(future.exception()) or self._why
        for flight in self._flights.broken():
            self._engine.staging.forget(flight.rid)
            flight.crashes += self._gone.proven
            guilty = self._gone.proven and flight.crashes > SUSPECT_CRASHES
            why = f"the server goes away whenever it gets this sample, also alone: {flight.broken}"
            self._failed(flight, why if guilty else flight.broken, final=guilty, excused=self._gone.proven)

    # --- sending ---

    def _send(self, throttle: float | None) -> None:
        """Send what may be sent now."""
        self._tight = False
        while self._flights.ready() and not self._full and not self._gone:
            if self._flights.asked >= self._options.concurrency or time.monotonic() < self._next_at:
                return
            peeked = self._flights.peek()
            flight = self._flight(peeked) if isinstance(peeked, int) else peeked
            if self._flights.alone(flight) or (self._flights.under_way and self._is_tight(flight)):
                return
            if not self._disk.has(self._flights.file_bytes + flight.file_bytes):
                if not self._flights.under_way:
                    self._is_full("no room for the next sample", flight.file_bytes)
                return
            row = self._ledger.corpus.row(flight.index)
            rid = self._engine.staging.rid(flight.index, flight.attempts + 1, flight.tokens)
            self._flights.begin(flight, rid, row)
            self._senders.send(rid, row.input_ids)
            if throttle:
                self._next_at = max(self._next_at + 1 / throttle, time.monotonic())

    def _flight(self, index: int) -> Flight:
        tokens = self._ledger.corpus.tokens(index)
        return Flight(index, tokens, self._engine.row_bytes(tokens), self._ledger.size_bytes(index))

    def _is_tight(self, flight: Flight) -> bool:
        """Say whether the staging folder has no room for one more: then commit at once, which makes room."""
        under_way = self._flights.staged_bytes
        self._tight = under_way + flight.staged_bytes > self._staging.budget_bytes(under_way)
        return self._tight

    def _tell(self) -> None:
        progress = self._reporter.progress
        progress.samples_in_flight = len(self._flights.under_way)
        progress.requests_in_flight = self._flights.asked
        if self._full:
            self._reporter.tell("paused", self._full)
        elif progress.state == "running":
            self._reporter.tell("running", self._message())
        else:
            self._reporter.tell()

    def _message(self) -> str:
        if self._gone:
            return self._gone.text()
        if self._tight:
            return self._staging.text
        now = time.monotonic()
        oldest = min((flight.sent_at for flight in self._flights.under_way.values()), default=now)
        return self._stall.text(self._flights.asked, now - oldest)


def _let_go(kept: list[Staged | None]) -> None:
    """Remove a staged file and drop its mapping, the last hold on its memory, in this thread."""
    staged = kept.pop()
    if staged is not None:
        staged.discard()


def _now(action: Callable[..., object], *args: object) -> None:
    action(*args)
