"""How the server does, for the run's supervisor: progress.json in the run's folder (wire.Progress)."""

from __future__ import annotations

import json
import os
import time
from typing import Any

EVERY_S = 2.0
FASTEST_S = 0.3


class Report:
    """Writes when something changed, and now and then to show that it lives; without a run's folder nothing."""

    def __init__(self) -> None:
        self._folder = os.environ.get("EIGHTZEROS_RUN_DIR", "")
        self._last: tuple[str, str] = ("", "")
        self._at = 0.0
        self.figures: dict[str, Any] = {}

    def tell(self, state: str, message: str) -> None:
        """Say the state (starting, ready, running: no longer answering, stopping, done, failed) and a line."""
        now = time.monotonic()
        wait_s = 0.0 if state != self._last[0] else FASTEST_S if message != self._last[1] else EVERY_S
        if now - self._at < wait_s or not self._folder:
            return
        self._last, self._at = (state, message), now
        record = {"at": time.time(), "state": state, "message": message[:900], **self.figures}
        path = os.path.join(self._folder, "progress.json")
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="ascii") as file:
                json.dump(record, file)
            os.replace(temporary, path)
        except OSError as error:
            print(f"eightzeros: progress.json could not be written: {error}", flush=True)
