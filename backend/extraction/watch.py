"""What a concurrent extraction keeps an eye on: room on the disk, room in the staging folder, and whether it moves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.extraction import ledger as accounts
from backend.wire import GIB

if TYPE_CHECKING:
    from backend.extraction.engines.sglang import SglangEngine
    from backend.extraction.progress import Reporter

LOOK_EVERY_S = 0.5
SHARE = 0.9
"""Of the room in the staging folder, what is filled at most: the rest is for what is being begun."""

SWEEP_EVERY_S = 10.0


@dataclass(frozen=True)
class Options:
    """How hard to try, and how long to wait. Seconds."""

    concurrency: int = 32
    writers: int = 4
    retries: int = 3
    server_wait_s: float = 300.0
    record_wait_s: float = 30.0
    drain_s: float = 10.0
    stall_s: float = 120.0


class StagingWatch:
    """Says how many bytes may be under way, and shows the hook's counters.

    A request's bytes are known before it is sent, so that the folder is never filled: as it gets full, by
    samples that wait for a slow disk or by others in /dev/shm, fewer requests are sent.
    """

    def __init__(self, engine: SglangEngine, reporter: Reporter) -> None:
        self._engine, self._reporter = engine, reporter
        self._looked_at = self._swept_at = 0.0
        self._budget = 0

    def budget_bytes(self, under_way_bytes: int) -> int:
        """Return what may be under way in all, `under_way_bytes` being so already."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look(under_way_bytes)
        return self._budget

    def _look(self, under_way_bytes: int) -> None:
        engine, progress = self._engine, self._reporter.progress
        writing = [rank for rank in engine.ranks() if rank.get("writes")]
        bound = engine.capture.bound_bytes * max(1, len(writing))
        progress.staging_bound_bytes = bound
        progress.staging_bytes = sum(int(rank.get("staged_bytes", 0)) for rank in writing)
        progress.staging_high_bytes = sum(int(rank.get("high_water_bytes", 0)) for rank in writing)
        progress.capture_wait_s = max((float(rank.get("wait_s", 0.0)) for rank in writing), default=0.0)
        try:
            room = os.statvfs(engine.staging.folder)
            free = room.f_bavail * room.f_frsize
            if time.monotonic() - self._swept_at >= SWEEP_EVERY_S:
                self._swept_at = time.monotonic()
                engine.sweep()
        except OSError:
            free = bound
        self._budget = int(SHARE * min(bound, min(under_way_bytes, progress.staging_bytes) + free))

    @property
    def text(self) -> str:
        """Describe the folder in words."""
        p = self._reporter.progress
        return (
            f"the staging folder {self._engine.staging.folder} is nearly full ({p.staging_bytes / GIB:.1f} GiB of "
            f"{self._budget / GIB:.1f} that may be used): fewer requests are sent"
        )


class DiskWatch:
    """Says whether the output's disk has room, looking twice a second at most."""

    def __init__(self, out: str) -> None:
        self._out, self._looked_at, self._free = out, 0.0, 0

    def has(self, needed_bytes: int) -> bool:
        """Say whether there is room for so many bytes."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S or self._free < needed_bytes:
            self._looked_at = time.monotonic()
            self._free = accounts.free_bytes(self._out)
        return self._free >= needed_bytes


class StallWatch:
    """Notices that nothing has moved for a while."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._moved_at = time.monotonic()

    def moved(self) -> None:
        """Note that something was answered, staged or committed."""
        self._moved_at = time.monotonic()

    def text(self, asked: int, oldest_s: float) -> str:
        """Say what stands still, or nothing."""
        still = time.monotonic() - self._moved_at
        if still < self._patience_s or not asked:
            return ""
        return (
            f"stalled: nothing has come for {still:.0f} s; {asked} requests wait for the server, the oldest for "
            f"{oldest_s:.0f} s: look at the server's log"
        )
