"""Waiting on conditions: a test never sleeps for a fixed time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float = 10.0, every_s: float = 0.02) -> T:
    """Return the condition's first true value. Fails naming the condition where it stays false."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"still {value!r} after {timeout_s} s: {getattr(condition, '__name__', condition)}")
        time.sleep(every_s)
