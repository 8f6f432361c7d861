"""Asks a host what is in the chosen path: the tensors of a file, or how long a folder's sequences are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from tui.screens.base import answer

if TYPE_CHECKING:
    from tui.app import EightZeros

PATIENCE_S = 0.5
"""How long the shard before stays in sight while the next one is read: blanks between would flicker."""


class Beside(Protocol):
    """Who shows what was read."""

    @property
    def is_running(self) -> bool:
        """Say whether it is still there."""

    def read(self) -> None:
        """Show what is known now."""

    def failed(self, path: str, error: Exception) -> None:
        """Say that a path cannot be read."""


class ShardReader:
    """What is known of one path, `path`. One request at a time: while a cursor runs, only what it is on at the answer.

    `shard` is a file's description; `lengths` a folder's, or why there is none; both are empty until the host answers.
    """

    def __init__(self, app: EightZeros, host: str, beside: Beside) -> None:
        self.path, self.folder = "", True
        self.shard: dict[str, Any] = {}
        self.lengths: dict[str, Any] | str | None = None
        self._app, self._host, self._beside = app, host, beside
        self._asking = ""
        self._wanted_at = 0.0

    @property
    def slow(self) -> bool:
        """Say whether an answer takes longer than what was shown before may stay."""
        return time.monotonic() - self._wanted_at > PATIENCE_S

    @property
    def waiting(self) -> bool:
        """Say whether an answer is awaited."""
        return bool(self._asking)

    def want(self, path: str, folder: bool) -> None:
        """Read a path."""
        self.path, self.folder, self.shard, self.lengths = path, folder, {}, None
        self._wanted_at = time.monotonic()
        if not self._asking:
            self._ask()

    def want_values(self) -> None:
        """Read a sample of the shard's values too, once."""
        if self.shard and not self.shard.get("statistics") and not self._asking:
            self._ask(values=True)

    def _ask(self, values: bool = False) -> None:
        self._asking = self.path
        self._app.work_on(self._read(self.path, self.folder, values), "shard")

    async def _read(self, path: str, folder: bool, values: bool) -> None:
        fleet = self._app.fleet
        found: dict[str, Any] | Exception
        try:
            if folder:
                found = await answer(fleet.shard_lengths(self._host, path))
            else:
                shard = await answer(fleet.show_shard(self._host, path, values))
                found = {"path": path, **shard}
        except Exception as error:
            found = error
        self._asking = ""
        if not self._beside.is_running:
            return
        if path != self.path:
            self._ask()
        elif isinstance(found, Exception):
            self.lengths = str(found)
            self._beside.failed(path, found)
        else:
            self.shard, self.lengths = ({}, found) if folder else (found, None)
            self._beside.read()
