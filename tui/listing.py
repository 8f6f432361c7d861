"""Asks a host for the folders of a tree, a page at a time, and for what a running extraction has added since."""

from __future__ import annotations

import posixpath
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from tui.screens.base import answer
from tui.shardtree import ShardTree

if TYPE_CHECKING:
    from backend.wire import Run
    from tui.app import EightZeros

MAX_LISTED = 200_000
"""Entries that are listed without being asked for."""

FOLLOW_S = 2.0
"""How often a running extraction's folder is asked for what is new."""

OVERLAP_S = 30.0
"""A file gets its name after its last byte: what is asked for anew reaches back so far."""


class Shown(Protocol):
    """Who shows the tree."""

    @property
    def is_running(self) -> bool:
        """Say whether it is still there."""

    def listed(self, *, land: bool = False) -> None:
        """Show the lines as they are now; `land` with the first page of a new top."""

    def failed(self, path: str, error: Exception) -> None:
        """Say that a folder cannot be listed."""


class Listing:
    """One tree that is being listed. One request at a time; a folder that was opened comes first."""

    def __init__(self, app: EightZeros, host: str, top: str, shown: Shown) -> None:
        self.tree = ShardTree(top)
        self.todo: deque[str] = deque([""])
        self._app, self._host, self._shown = app, host, shown
        self._busy = self._ended = False
        self._grown_at = time.monotonic()

    def start(self) -> None:
        """Go on listing beside the screen."""
        if not self._busy:
            self._busy = True
            self._app.work_on(self._list(), "listing")

    def end(self) -> None:
        """Ask for nothing more."""
        self._ended = True

    def want(self, name: str) -> None:
        """List a folder next."""
        if name in self.todo:
            self.todo.remove(name)
        self.todo.insert(0, name)
        self.start()

    @property
    def _over(self) -> bool:
        return self._ended or not self._shown.is_running

    async def _list(self) -> None:
        try:
            while self.todo and not self._over:
                await self._page(self.todo.popleft())
        finally:
            self._busy = False

    async def _ask(self, name: str, offset: int = 0, since: float = 0.0) -> dict[str, Any]:
        path = posixpath.join(self.tree.top, name) if name else self.tree.top
        return await answer(self._app.fleet.list_shards(self._host, path, offset, since))

    async def _page(self, name: str) -> None:
        tree, known = self.tree, self.tree.folders.get(name)
        try:
            listing = await self._ask(name, (known.following if known else 0) or 0)
        except Exception as error:
            if not self._over:
                self._shown.failed(posixpath.join(tree.top, name), error)
            return
        if self._over:
            return
        if not name:
            tree.top = str(listing.get("path") or tree.top)
        land = not name and not tree.folders[""].entries
        tree.take(name, listing)
        if tree.folders[name].following is not None:
            self.todo.appendleft(name)
        if tree.listed < MAX_LISTED:
            self.todo.extend(part for part in tree.parts(name) if part not in self.todo)
        self._shown.listed(land=land)

    def follow(self, run: Run) -> None:
        """Ask now and then for what a run has written since the last time."""
        now = time.monotonic()
        if not self.todo and not self._busy and now - self._grown_at >= FOLLOW_S:
            self._grown_at, self._busy = now, True
            self._app.work_on(self._grow(posixpath.dirname(run.progress.shard if run.progress else "")), "listing")

    async def _grow(self, name: str) -> None:
        try:
            changed = False
            if name not in self.tree.folders:
                changed = self.tree.grow("", await self._ask(""))
            known = self.tree.folders.get(name)
            since = max(1.0, known.newest_at - OVERLAP_S) if known and known.newest_at else 0.0
            offset: int | None = 0
            while offset is not None and not self._over:
                listing = await self._ask(name, offset, since)
                if name not in self.tree.folders:
                    self.tree.take(name, listing)
                    changed = True
                changed = self.tree.grow(name, listing) or changed
                offset = listing.get("next")
            if changed and not self._over:
                self._shown.listed()
        finally:
            self._busy = False
