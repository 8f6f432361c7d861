"""Whether the server answers, asked in a thread of its own: an answer may take 20 s, and the log goes on meanwhile."""

from __future__ import annotations

import http.client
import threading
import time

TIMEOUT_S = 30.0
"""SGLang's own deadline is 20 s; it answers the moment that the scheduler has shown a sign of life."""

ASK_EVERY_S, READY_EVERY_S = 0.5, 10.0
"""A server that runs generates one token to answer, so it is asked rarely."""


class Health:
    """Asks again and again until `stop`. `said` is what the last request gave, in words."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        self.answered_at = 0.0
        self.failing_since = 0.0
        self.said = ""
        self.thread = threading.Thread(target=self._ask_on, name="health", daemon=True)
        self.thread.start()

    @property
    def answers(self) -> bool:
        """Say whether the last request was answered with 200."""
        return self.answered_at > 0 and not self.failing_since

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def _ask_on(self) -> None:
        while not self._over.is_set():
            good = self._ask("/health") and (self.answered_at > 0 or self._ask("/health_generate"))
            now = time.monotonic()
            if good:
                self.answered_at, self.failing_since = now, 0.0
            else:
                self.failing_since = self.failing_since or now
            self._over.wait(READY_EVERY_S if good else ASK_EVERY_S)

    def _ask(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
            self.said = f"{path} answers {status}"
            return status == 200 or (path == "/health_generate" and status == 404)
        except (OSError, http.client.HTTPException) as error:
            self.said = f"{path}: {type(error).__name__}"
            return False
        finally:
            connection.close()
