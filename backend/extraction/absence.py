"""A server that is away: when to ask again, how long to wait, and whether it was away at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backend.extraction.engines import EngineRefused
from backend.extraction.engines.sglang import Rejected, ServerGone

if TYPE_CHECKING:
    from backend.extraction.engines.sglang import SglangEngine

PROBE_EVERY_S = 1.0


class Absence:
    """Begins with a broken connection and ends with an answer. A connection may break at a server that lives."""

    def __init__(self, engine: SglangEngine, patience_s: float) -> None:
        self._engine, self._patience_s = engine, patience_s
        self._why = ""
        self._since = self._ask_at = 0.0
        self._asking = False
        self.proven = False

    def __bool__(self) -> bool:
        """Say whether the server is to be left alone."""
        return bool(self._why)

    def begin(self, why: str) -> None:
        """Note a broken connection."""
        if not self._why:
            self._why, self._since, self._ask_at, self.proven = why, time.monotonic(), 0.0, False

    def due(self) -> bool:
        """Say whether to `ask` now; true once each time."""
        if not self._why or self._asking or time.monotonic() < self._ask_at:
            return False
        self._asking = True
        return True

    def ask(self) -> None:
        """Ask the server what it is, in a thread that may wait. Raises what `asked` takes."""
        self._engine.alive()
        self._engine.recheck()

    def asked(self, error: BaseException | None) -> str:
        """Take an end of `ask`; return why the extraction cannot go on with this server, if so."""
        self._asking = False
        if error is None:
            self._why = ""
        elif isinstance(error, EngineRefused):
            return str(error)
        elif isinstance(error, (ServerGone, Rejected)):
            self._why, self.proven, self._ask_at = str(error), True, time.monotonic() + PROBE_EVERY_S
        else:
            raise error
        return ""

    def too_long(self) -> str:
        """Return the last words of an extraction that has waited long enough, or nothing."""
        if not self._why or time.monotonic() - self._since <= self._patience_s:
            return ""
        return (
            f"the server at {self._engine.settings.url} has been away for {self._patience_s:g} s ({self._why}): "
            "start it, then this command again: it goes on from here"
        )

    def text(self) -> str:
        """Say for how long it is still waited, once that is worth saying."""
        away = time.monotonic() - self._since
        if not self._why or away < PROBE_EVERY_S:
            return ""
        return f"the server does not answer ({self._why}): waiting up to {self._patience_s - away:.0f} s more for it"
