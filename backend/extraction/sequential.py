"""An extraction with an engine in this process: one sample after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backend.extraction import ledger as accounts
from backend.extraction.durable import DiskFull
from backend.extraction.engines import EngineError
from backend.extraction.stop import Stop
from backend.extraction.writer import BadStates, Sample, ShardWriter
from backend.shardfmt import layout
from backend.wire import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.extraction.engines import Computing
    from backend.extraction.ledger import Ledger

TICK_S = 0.2
FULL_POLL_S = 1.0
"""How often a full disk is looked at again. A quota shows only by trying, so each look may also try."""


class Sequential:
    """One extraction into one locked folder."""

    def __init__(self, engine: Computing, ledger: Ledger) -> None:
        self._engine, self._ledger, self._reporter = engine, ledger, ledger.reporter
        self._writer = ShardWriter(ledger.out, ledger.journal, engine.hidden_size, len(engine.capture_points))
        self._stop = Stop()

    def run(self, throttle: float | None) -> tuple[str, int]:
        """Extract what is missing; return the state (done, stopped or failed) and the signal that stopped it."""
        with self._stop:
            self._with_room(lambda: self._ledger.describe("running"), MIB)
            self._loop(throttle)
            return self._finish(), self._stop.signal

    def _loop(self, throttle: float | None) -> None:
        self._reporter.tell("running", "")
        next_at = time.monotonic()
        for index in self._ledger.missing:
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
        row = self._ledger.corpus.row(index)
        try:
            states = self._engine.states(row.input_ids)
            sample = Sample(index, row.id, row.input_ids, row.loss_mask, states)
            if self._with_room(lambda: self._writer.write(sample), self._ledger.size_bytes(index)):
                self._reporter.progress.shard = layout.shard_path(index, self._ledger.journal.header.suffix)
        except (EngineError, BadStates) as error:
            self._ledger.fail(index, row.id, str(error))

    def _commit_if_due(self) -> None:
        if self._writer.due:
            self._with_room(self._commit, MIB)
        self._reporter.progress.samples_in_flight = self._writer.pending
        self._reporter.tell()

    def _commit(self) -> None:
        self._ledger.committed(self._writer.commit())

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
        out = self._ledger.out
        while not self._stop.asked():
            self._reporter.tell("paused", accounts.full(out, why, needed_bytes))
            if not self._stop.wait(FULL_POLL_S) and accounts.free_bytes(out) >= needed_bytes:
                return True
        return False

    def _commit_what_fits(self) -> bool:
        """Make safe what is already written; a journal line needs little room. Says whether it could."""
        try:
            self._commit()
        except DiskFull:
            return False
        return True

    def _finish(self) -> str:
        stopped = self._stop.asked()
        if stopped:
            self._reporter.tell("stopping", "committing what is written", force=True)
            if not self._commit_what_fits():
                self._writer.discard()
        elif not self._with_room(self._commit, MIB):
            self._writer.discard()
        return self._ledger.close(stopped or self._stop.asked())
