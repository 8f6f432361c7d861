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

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config, Counters

FORMAT = 1
HEADER_BYTES = 4096
STATES, FAILED, PART = ".states", ".failed", ".part"
LOOK_EVERY_S = 0.002
REMEMBERED = 4096
"""Ids of requests that failed, so that their further chunks are not taken for new requests."""


@dataclass
class Request:
    """One request that is being received: row `next_row` comes next, `left` rows are not written yet."""

    rid: str
    number: int
    tokens: int
    path: str
    size_bytes: int
    left: int
    next_row: int = 0
    touched: float = field(default_factory=time.monotonic)
    dropped: bool = False


class Folder:
    """One rank's account of the folder. The hook's thread and the writers share it under `lock`."""

    def __init__(self, config: Config, counters: Counters) -> None:
        """Make the folder. Raises OSError, or ValueError where it is not this user's own."""
        self.lock = threading.RLock()
        self.path = config.folder
        self._config, self._counters = config, counters
        self._receiving: dict[str, Request] = {}
        self._waiting: dict[str, int] = {}
        self._over: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._begun = self._queued = 0
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        there = os.lstat(self.path)
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
            raise ValueError(f"eightzeros capture: {self.path} is no folder of this user's own")

    def clear(self) -> None:
        """Remove what this run has left in the folder, and nothing else."""
        clear(self.path, self._config.run)

    def look(self) -> None:
        """See what the reader has taken or given up, and what has been too long without a row."""
        with self.lock:
            names = set(os.listdir(self.path))
            for rid in [rid for rid in self._waiting if rid + STATES not in names]:
                del self._waiting[rid]
            oldest = time.monotonic() - self._config.stale_s
            for request in list(self._receiving.values()):
                if request.left and os.path.basename(request.path) not in names:
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
        """Count pieces that writers have still to write: up by one that is handed over, down by one done."""
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
        path = os.path.join(self.path, f"{rid}.{self._begun}{PART}")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        request = self._receiving[rid] = Request(rid, self._begun, tokens, path, size, tokens)
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
            self._receiving.pop(request.rid, None)
            self._over[request.rid] = None
            while len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
        if request.path:
            remove(request.path)

    def written(self, request: Request, rows: int, header: Callable[[Request], bytes]) -> None:
        """Count rows as written; after the last ones the file gets its header and its name. Raises OSError."""
        with self.lock:
            request.left -= rows
            if request.left or request.dropped:
                return
        pwrite(request.path, [(memoryview(header(request)), 0)])
        with self.lock:  # one that was dropped meanwhile has no file any more: this raises
            os.rename(request.path, os.path.join(self.path, request.rid + STATES))
            del self._receiving[request.rid]
            self._waiting[request.rid] = request.size_bytes
            self._counters.whole += 1

    def fail(self, rid: str, reason: str, request: Request | None = None) -> None:
        """Say why a request was not captured, once. Never raises."""
        with self.lock:
            request = request or self._receiving.get(rid) or Request(rid, 0, 0, "", 0, 0)
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


def pwrite(path: str, blocks: list[tuple[memoryview, int]]) -> None:
    """Write blocks at their places in a file. The call lets other threads run; a short write is gone on with."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for view, at in blocks:
            while view:
                written = os.pwrite(fd, view, at)
                view, at = view[written:], at + written
    finally:
        os.close(fd)


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
