"""SIGTERM and SIGINT as a wish that a loop looks at."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


SLICE_S = 0.05


class Stop:
    """Remembers the first signal; a further one changes nothing.

    The handler takes no lock: it runs between two steps of the thread that may hold it (threading.Event would).
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._asked) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def asked(self) -> bool:
        """Say whether someone wants this to end."""
        return bool(self.signal)

    def wait(self, seconds: float) -> bool:
        """Wait, or less where someone wants this to end; say whether someone does."""
        end = time.monotonic() + seconds
        while not self.signal and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))
        return self.asked()
