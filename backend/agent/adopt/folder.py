"""Shards of a folder that grows, counted without reading them: names and sizes, and the heads of a few.

A look costs what changed: a subfolder whose own time has not moved is not listed again, and a file that has settled
is not asked again. What a sample has in tokens stands in its head; until all heads are read, the rest is estimated
from bytes, which are proportional to tokens for one model.
"""

from __future__ import annotations

import os
import time
from typing import Dict, List, Optional, Tuple

from backend.agent.shards.show import show
from backend.shardfmt import layout
from backend.wire import Refused

HEADS_A_LOOK = 64
YOUNG_S = 120.0
"""For how long after its last write a file that cannot be read may still be one that is being written."""

COARSE_S = 2.0
"""How far a folder's time may lie behind: a name that came within it may not have moved the time again."""

DEEPEST = 3
IDS = (layout.INPUT_IDS, "token_ids")


class Folder:
    """What lies in a folder. `look` brings it up to date; `samples` are whole, `pending` may still be growing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pending: Dict[str, Tuple[int, int]] = {}
        self.bytes = 0
        self.newest = ""
        self.unreadable = 0
        self.problem = ""
        self._sizes: Dict[str, int] = {}
        self._below: Dict[str, List[str]] = {}
        self._listed: Dict[str, Tuple[int, float]] = {}
        self._unread: List[str] = []
        self._read_tokens = self._read_bytes = self._unread_bytes = 0

    @property
    def samples(self) -> int:
        """Return how many shards are whole."""
        return len(self._sizes) - len(self.pending)

    @property
    def tokens(self) -> int:
        """Return the tokens of the whole shards: read ones exactly, the others by their bytes."""
        if not self._read_bytes:
            return 0
        return self._read_tokens + round(self._unread_bytes * self._read_tokens / self._read_bytes)

    @property
    def exact(self) -> bool:
        """Say whether the tokens of every whole shard were read."""
        return not self._unread_bytes

    def look(self) -> None:
        """See what is new, and read some heads."""
        self.problem = ""
        self._walk(self.path, 0)
        for path in list(self.pending):
            self._ask(path)
        for _ in range(min(HEADS_A_LOOK, len(self._unread))):
            path = self._unread.pop()
            self._unread_bytes -= self._sizes[path]
            self._settle(path, head_tokens(path))

    def _walk(self, folder: str, depth: int) -> None:
        try:
            changed = os.stat(folder).st_mtime_ns
            seen = self._listed.get(folder)
            if seen is None or seen[0] != changed or seen[1] - changed / 1e9 < COARSE_S:
                now = time.time()
                self._list(folder)
                self._listed[folder] = (changed, now)
        except OSError as error:
            self.problem = "%s: %s" % (folder, error.strerror)
            return
        if depth < DEEPEST:
            for below in self._below.get(folder, []):
                self._walk(below, depth + 1)

    def _list(self, folder: str) -> None:
        below = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if layout.sample_index(entry.name) is not None:
                    if entry.path not in self._sizes:
                        self._add(entry.path)
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
        self._below[folder] = sorted(below)

    def _add(self, path: str) -> None:
        try:
            found = os.stat(path)
        except OSError:
            return  # renamed or removed at this moment
        self._sizes[path] = found.st_size
        self.bytes += found.st_size
        self.newest = os.path.relpath(path, self.path)
        if time.time() - found.st_mtime < YOUNG_S:
            self.pending[path] = (-1, 0)
        else:
            self._unread.append(path)
            self._unread_bytes += found.st_size

    def _ask(self, path: str) -> None:
        """Look again at a file that was written lately: one that has not changed and can be read is whole."""
        try:
            found = os.stat(path)
        except OSError:
            self.bytes -= self._sizes.pop(path)
            del self.pending[path]
            return
        state = (found.st_size, found.st_mtime_ns)
        self.bytes += found.st_size - self._sizes[path]
        self._sizes[path] = found.st_size
        same, self.pending[path] = self.pending[path] == state, state
        tokens = head_tokens(path) if same and found.st_size else None
        if tokens is not None or time.time() - found.st_mtime > YOUNG_S:
            del self.pending[path]
            self._settle(path, tokens)

    def _settle(self, path: str, tokens: Optional[int]) -> None:
        if tokens is None:
            self.unreadable += 1
            return
        self._read_tokens += tokens
        self._read_bytes += self._sizes[path]


def head_tokens(path: str) -> Optional[int]:
    """Return how many tokens a shard holds, or None where it is not whole or does not say."""
    try:
        record = show(path)
    except Refused:
        return None
    if not record["ok"]:
        return None
    by_key = {str(entry["key"]).rpartition(".")[2]: entry["shape"] for entry in record["entries"]}
    for key in IDS:
        if by_key.get(key):
            return int(by_key[key][-1])
    states = by_key.get("hidden_states")
    return int(states[0]) if states else None
