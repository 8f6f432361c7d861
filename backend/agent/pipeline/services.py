"""When a stage that serves is up: its own progress says `ready`, or its address answers."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from typing import Optional

from backend.agent.pipeline.order import StepOrder
from backend.wire import Run

ANSWER_S = 2.0


class Patience:
    """Waits for one service; `look` is asked again and again while it runs."""

    def __init__(self, order: StepOrder) -> None:
        self._order = order
        self._ends = time.monotonic() + order.ready_timeout_s

    def look(self, run: Run) -> Optional[str]:
        """Return "" once the service is up, the reason to end it where it takes too long, else None."""
        if self._up(run):
            return ""
        if time.monotonic() < self._ends:
            return None
        said = run.progress.message if run.progress is not None else ""
        return "it was not ready within %.0f s%s" % (self._order.ready_timeout_s, ": %s" % said if said else "")

    def _up(self, run: Run) -> bool:
        if self._order.ready_url:
            return answers(self._order.ready_url)
        return run.progress is not None and run.progress.state == "ready"


def answers(url: str) -> bool:
    """Say whether an address answers 200."""
    parts = urllib.parse.urlsplit(url)
    try:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=ANSWER_S)
        try:
            connection.request("GET", parts.path or "/")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return False
