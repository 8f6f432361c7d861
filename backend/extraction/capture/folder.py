"""The staging folder, as the writing side keeps it: what is received, what waits for the reader, what failed."""

from __future__ import annotations

import collections
import json
import os
import re
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .config import Refused
from .writing import FORMAT, STATES, part_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config, Counters

FAILED = ".failed"
LOOK_EVERY_S = 0.002
REMEMBERED = 4096
"""Ids of requests that failed, so that their further chunks are not taken for new requests."""


@dataclass
class Request:
    """One request that is being received: row `next_row` comes next; once all came its file is the writer's."""

    rid: str
    number: int
    tokens: int
    path: str
    size_bytes: int
    next_row: int = 0
    touched: float = field(default_factory=time.monotonic)
    dropped: bool = False


class Folder:
    """One rank's account of the folder. The hook's thread and those that hear of the writer share it under `lock`."""

    def __init__(self, config: Config, counters: Counters) -> None:
        """Make the folder. Raises OSError, or ValueError where it is not this user's own."""
        self.lock = threading.RLock()
        self.path = config.folder
        self._config, self._counters = config, counters
        self._receiving: dict[str, Request] = {}
        self._numbered: dict[int, Request] = {}
        self._waiting: dict[str, int] = {}
        self._over: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._begun = self._queued = 0
        self._looked_at = 0.0
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        there = os.lstat(self.path)
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
            raise ValueError(f"eightzeros capture: {self.path} is no folder of this user's own")

    def clear(self) -> None:
        """Remove what this run has left in the folder, and nothing else."""
        clear(self.path, self._config.run)

    def look(self, unless_within_s: float = 0.0) -> None:
        """See what the reader has taken or given up, and what has been too long without a row."""
        with self.lock:
            if time.monotonic() - self._looked_at < unless_within_s:
                return
            self._looked_at = time.monotonic()
            names = set(os.listdir(self.path))
            for rid in [rid for rid in self._waiting if rid + STATES not in names]:
                del self._waiting[rid]
            oldest = time.monotonic() - self._config.stale_s
            for request in list(self._receiving.values()):
                if request.next_row < request.tokens and os.path.basename(request.path) not in names:
                    self.let_go(request)
                elif request.touched < oldest:
                    self.fail(request.rid, f"no further rows came for {self._config.stale_s:g} s", request)
            self._count()

    def let_go(self, request: Request) -> None:
        """Count a request as given up by the reader, who removed its file: no failure of it, and told to nobody."""
        with self.lock:
            if not request.dropped:
                self._counters.abandoned += 1
                self._drop(request)
                self._count()

    def receiving(self, rid: str) -> Request | None:
        """Return the request that is being received under this id."""
        return self._receiving.get(rid)

    def is_over(self, rid: str) -> bool:
        """Say whether this request has failed or was given up: its further chunks mean nothing."""
        return rid in self._over

    def queue(self, pieces: int) -> None:
        """Count pieces that the writer has still to write: up by one that is handed over, down by one done."""
        with self.lock:
            self._queued += pieces

    def reserve(self, rid: str, tokens: int, size: int, deadline: float, flush: Callable[[], None]) -> Request:
        """Begin a request, waiting for room. Raises Refused or OSError. `flush` hands over what is collected.

        Where the reader has nothing to take and nothing is being written, waiting would never end: the
        request is begun without room then, and counted.
        """
        bound, began = self._config.bound_bytes, time.monotonic()
        if size > bound:
            raise Refused(f"its {tokens} tokens need {size:,} bytes, and the staging holds {bound:,} (bound_bytes)")
        old, flushed = self._receiving.get(rid), False
        if old is not None:
            self._drop(old)
        try:
            while True:
                with self.lock:
                    full = self._used() + size > bound
                    if not full or (flushed and not self._waiting and not self._queued):
                        self._counters.over_bound += full
                        return self._begin(rid, tokens, size)
                if not flushed:
                    flush()
                    flushed = True
                elif time.monotonic() > deadline:
                    raise Refused(f"the staging was full for {self._config.patience_s:g} s: nobody reads it")
                else:
                    time.sleep(LOOK_EVERY_S)
                self.look()
        finally:
            self._counters.wait_s += time.monotonic() - began

    def _begin(self, rid: str, tokens: int, size: int) -> Request:
        self._begun += 1
        path = part_path(self.path, rid, self._begun)
        os.mknod(path, stat.S_IFREG | 0o600)  # one call where opening takes two: this is the server's own thread
        request = self._receiving[rid] = self._numbered[self._begun] = Request(rid, self._begun, tokens, path, size)
        self._over.pop(rid, None)
        self._count()
        return request

    def _used(self) -> int:
        return sum(request.size_bytes for request in self._receiving.values()) + sum(self._waiting.values())

    def _count(self) -> None:
        self._counters.staged_bytes = used = self._used()
        self._counters.high_water_bytes = max(used, self._counters.high_water_bytes)

    def _drop(self, request: Request) -> None:
        with self.lock:
            request.dropped = True
            self._numbered.pop(request.number, None)
            if self._receiving.get(request.rid) is request:
                del self._receiving[request.rid]
            self._over[request.rid] = None
            while len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
        if request.path:
            remove(request.path)

    def heard(self, whole: list[int], gone: list[int], failed: list[tuple[int, str]]) -> None:
        """Take in what the writer says of requests, by number. Never raises."""
        with self.lock:
            for request in filter(None, map(self._numbered.get, whole)):
                del self._numbered[request.number], self._receiving[request.rid]
                self._waiting[request.rid] = request.size_bytes
                self._counters.whole += 1
            for request in filter(None, map(self._numbered.get, gone)):
                self.let_go(request)
            for number, reason in failed:
                if number in self._numbered:
                    self.fail(self._numbered[number].rid, reason, self._numbered[number])

    def fail_all(self, reason: str) -> None:
        """Fail every request that is being received: rows of it are lost. Never raises."""
        with self.lock:
            for request in list(self._numbered.values()):
                self.fail(request.rid, reason, request)

    def fail(self, rid: str, reason: str, request: Request | None = None) -> None:
        """Say why a request was not captured, once. Never raises."""
        with self.lock:
            request = request or self._receiving.get(rid) or Request(rid, 0, 0, "", 0)
            if request.dropped or rid in self._waiting:
                return
            self._drop(request)
            self._counters.failed += 1
            self._counters.error = f"{rid}: {reason}"
        try:
            record = {"format": FORMAT, "rid": rid, "reason": reason}
            replace(os.path.join(self.path, rid + FAILED), json.dumps(record).encode("ascii"))
        except OSError as error:
            self._counters.error = f"{rid}: {reason} (and this could not be written: {error})"


def clear(folder: str, run: str) -> int:
    """Remove a run's states, failures and unfinished files from a folder; return how many."""
    ours, removed = re.compile(re.escape(run) + r"-.*(\.states|\.failed|\.part|\.tmp)"), 0
    for name in os.listdir(folder):
        if ours.fullmatch(name):
            remove(os.path.join(folder, name))
            removed += 1
    return removed


def replace(path: str, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the new one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def remove(path: str) -> None:
    """Remove a file, if it is there and can be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass
