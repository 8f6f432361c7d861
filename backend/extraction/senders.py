"""Threads that send requests, one at a time each, and say what came of it."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.extraction.engines.sglang import Rejected, ServerGone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.extraction.engines.sglang import SglangEngine


@dataclass(frozen=True)
class Ended:
    """A request's end as HTTP saw it. `gone` where the connection broke, `final` where trying again is useless."""

    rid: str
    reason: str = ""
    gone: bool = False
    final: bool = False


class Senders:
    """As many threads as requests may be in flight."""

    def __init__(self, engine: SglangEngine, number: int, events: queue.Queue[Any]) -> None:
        self._engine, self._events = engine, events
        self._jobs: queue.SimpleQueue[tuple[str, Sequence[int]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"send-{n}", daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def send(self, rid: str, input_ids: Sequence[int]) -> None:
        """Have a free thread send it; its end comes as an event."""
        self._jobs.put((rid, input_ids))

    def close(self) -> None:
        """End the threads; requests that still run are broken off."""
        for _ in self._threads:
            self._jobs.put(None)
        self._engine.hang_up()
        for thread in self._threads:
            thread.join(5.0)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            rid, ids = job
            try:
                answer = self._engine.ask(rid, ids)
            except ServerGone as error:
                ended = Ended(rid, str(error), gone=True)
            except Rejected as error:
                ended = Ended(rid, str(error), final=error.final)
            else:
                ended = Ended(rid)
                if answer.prompt_tokens not in (None, len(ids)):
                    ended = Ended(rid, f"the server counted {answer.prompt_tokens} tokens of {len(ids)}")
                elif answer.cached_tokens:
                    ended = Ended(rid, f"{answer.cached_tokens} rows came out of the server's prefix cache")
            self._events.put(ended)
