"""Runs and resets as events: what changed on the host, told to whoever is connected."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List, Set

from backend.agent.paths import state_dir
from backend.agent.runs import RunStore
from backend.wire import RUN_LIVE

PERIOD_S = 1.0
FAST_S = 0.1
"""While a reset runs its journal is read ten times a second: the operator watches every signal."""

JOURNAL = "journal.jsonl"
CHUNK_BYTES = 64 * 1024


class RunsSource:
    """A source of the agent's loop: runs that changed, and the new journal lines of resets that run."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._next = 0.0
        self._next_poll = 0.0
        self._journals: Dict[str, int] = {}  # run id -> bytes already told

    def filenos(self) -> List[int]:
        """Return nothing: files are looked at, not waited for."""
        return []

    def due(self) -> float:
        """Return when to look again, on the monotonic clock."""
        return self._next

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Tell what changed since the last look."""
        now = time.monotonic()
        if now < self._next:
            return []
        messages: List[Dict[str, Any]] = []
        changed = self._store.poll() if now >= self._next_poll else []
        if now >= self._next_poll:
            self._next_poll = now + PERIOD_S
        for run in changed:
            if run.stage == "reset" and run.state in RUN_LIVE:
                self._journals.setdefault(run.id, 0)
        for run_id in list(self._journals):
            messages += self._new_events(run_id)
        for run in changed:
            messages.append({"t": "run", "run": run})
            if run.state not in RUN_LIVE:
                self._journals.pop(run.id, None)
        self._next = now + FAST_S if self._journals else self._next_poll
        return messages

    def close(self) -> None:
        """Nothing is held open."""

    def _new_events(self, run_id: str) -> List[Dict[str, Any]]:
        path = os.path.join(state_dir("runs"), run_id, JOURNAL)
        events, offset = read_events(path, self._journals[run_id])
        self._journals[run_id] = offset
        return [{"t": "reset", "run_id": run_id, "events": events}] if events else []


def read_events(path: str, offset: int) -> "tuple[List[Dict[str, Any]], int]":
    """Read the whole lines of a journal from a byte offset on; returns them and the offset behind the last one."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
    except OSError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for line in whole.splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # a torn line of a crash in the middle of a write
    return events, offset + len(whole)
