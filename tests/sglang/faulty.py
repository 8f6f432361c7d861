"""The capture hook with a fault: a factory for --forward-hooks whose hook breaks for one sample.

Samples of index 666 meet an exception where rows are assigned, those of index 667 a full disk where they are written.
"""

from __future__ import annotations

import os
from typing import Any

from eightzeros_capture import folder, hook


def factory(config: dict[str, Any]) -> Any:
    """Break the hook, then make it."""
    receive, begin = hook.Capture._receive, folder.Folder._begin

    def breaking_receive(self: Any, work: Any, form: Any, part: Any) -> None:
        if "-666-" in part.rid:
            raise ZeroDivisionError("asked for by the test")
        receive(self, work, form, part)

    def breaking_begin(self: Any, rid: str, tokens: int, size: int) -> Any:
        request = begin(self, rid, tokens, size)
        if "-667-" in rid:
            os.unlink(request.path)
            os.symlink("/dev/full", request.path)
        return request

    hook.Capture._receive, folder.Folder._begin = breaking_receive, breaking_begin
    return hook.factory(config)
