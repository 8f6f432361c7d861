"""The capture hook with a fault: a factory for --forward-hooks whose hook breaks for one sample.

Samples of index 666 meet an exception where rows are assigned, those of index 667 where they are written.
"""

from __future__ import annotations

from typing import Any

from eightzeros_capture import hook, sink


def factory(config: dict[str, Any]) -> Any:
    """Break the hook, then make it."""
    receive, write = hook.Capture._receive, sink.Sink._write

    def breaking_receive(self: Any, work: Any, form: Any, part: Any) -> None:
        if "-666-" in part.rid:
            raise ZeroDivisionError("asked for by the test")
        receive(self, work, form, part)

    def breaking_write(self: Any, piece: Any, part: Any) -> None:
        if "-667-" in part.request.rid:
            raise OSError(28, "No space left on device")
        write(self, piece, part)

    hook.Capture._receive, sink.Sink._write = breaking_receive, breaking_write
    return hook.factory(config)
