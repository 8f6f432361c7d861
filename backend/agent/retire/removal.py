"""The deletion: set aside under another name at once, then emptied from the leaves on, only what was confirmed.

A crash before the rename has changed nothing; after it, what is left lies in `.NAME.retired` and is deleted by the same
command. Whatever differs from what was looked at (another inode, a new file, a link where a folder was) ends it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Callable, Dict

from backend.agent.retire.place import Place, aside_of, same
from backend.agent.retire.tree import Tree, entry_of
from backend.wire import Refused


class Removal:
    """One deletion of one place. Its counts say how far it is, whatever ends it."""

    def __init__(self, place: Place, tree: Tree, tick: Callable[[], bool], say: Callable[..., None]) -> None:
        """`tick` is called before each entry and returns whether to stop; `say(step, **facts)` is kept at once."""
        self._place, self._tree, self._tick, self._say = place, tree, tick, say
        self.done: Dict[str, int] = {"files": 0, "folders": 0, "bytes": 0}
        self.stopped = False

    def run(self) -> None:
        """Delete. Raises Refused `changed`, `busy` or `mount`, or OSError; what is gone is in `done`."""
        self._own()
        if not self._place.resumes:
            self._set_aside()
        self._empty(self._place.fd, "")
        if self.stopped:
            return
        self._same_there(aside_of(self._place.name))
        os.rmdir(aside_of(self._place.name), dir_fd=self._place.parent_fd)
        self.done["folders"] += 1
        os.fsync(self._place.parent_fd)
        self._say("removed")

    def _own(self) -> None:
        """Be the only one of ours that deletes here."""
        try:
            fcntl.flock(self._place.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused("busy", "another run deletes %s" % self._place.path, "follow it: eightzeros runs") from None

    def _set_aside(self) -> None:
        """Rename it, and make sure that what was renamed is what was looked at."""
        place = self._place
        aside = aside_of(place.name)
        self._same_there(place.name)
        self._say("renaming", to=aside)
        os.rename(place.name, aside, src_dir_fd=place.parent_fd, dst_dir_fd=place.parent_fd)
        try:
            self._same_there(aside)
        except Refused:
            os.rename(aside, place.name, src_dir_fd=place.parent_fd, dst_dir_fd=place.parent_fd)
            raise
        os.fsync(place.parent_fd)
        self._say("renamed", to=aside)

    def _same_there(self, name: str) -> None:
        try:
            found = os.stat(name, dir_fd=self._place.parent_fd, follow_symlinks=False)
        except OSError as error:
            raise self._changed(name, error.strerror or "") from None
        if not same(found, os.fstat(self._place.fd)):
            raise self._changed(name, "it is another folder, or a link")

    def _empty(self, fd: int, prefix: str) -> None:
        for name in sorted(os.listdir(fd)):
            if self._tick():
                self.stopped = True
                return
            path = prefix + name
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            known = self._tree.entries.get(path)
            if known is None or known != entry_of(found):
                raise self._changed(path, "it is new" if known is None else "it was written or replaced")
            if stat.S_ISDIR(found.st_mode):
                self._folder(fd, name, path, found)
                if self.stopped:
                    return
                continue
            os.unlink(name, dir_fd=fd)
            self.done["files"] += 1
            self.done["bytes"] += found.st_size

    def _folder(self, fd: int, name: str, path: str, found: os.stat_result) -> None:
        try:
            below = self._place.enter(fd, name)
        except Refused as refused:
            raise self._changed(path, str(refused)) from None
        try:
            if not same(os.fstat(below), found):
                raise self._changed(path, "it is another folder")
            self._empty(below, path + "/")
        finally:
            os.close(below)
        if not self.stopped:
            os.rmdir(name, dir_fd=fd)  # never follows: on a link it fails
            self.done["folders"] += 1

    def _changed(self, path: str, how: str) -> Refused:
        text = "%s changed after it was looked at: %s" % (path, how)
        return Refused("changed", text, "find out who writes there, then ask for a new plan")
