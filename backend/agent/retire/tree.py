"""What is in a folder, every entry of it: counted, and summed into a digest that a confirmation is about."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from backend.agent.retire.place import Place
from backend.wire import Refused

MAX_ENTRIES = 2_000_000
MAX_DEPTH = 64


class Entry(NamedTuple):
    """One entry as it was looked at. Size and time of a folder are 0: they change while it is emptied."""

    folder: bool
    inode: int
    size_bytes: int
    mtime_ns: int


def entry_of(found: os.stat_result) -> Entry:
    """Return what is remembered of an entry."""
    if stat.S_ISDIR(found.st_mode):
        return Entry(True, found.st_ino, 0, 0)
    return Entry(False, found.st_ino, found.st_size, found.st_mtime_ns)


class Tree:
    """Every entry below a place, by its relative path, and their sums.

    `bytes` is what the files hold; `freed_bytes` what the disk gets back: blocks, and of a file with several names
    only where all of them are here.
    """

    def __init__(self) -> None:
        self.entries: Dict[str, Entry] = {}
        self.files = self.folders = self.links = self.bytes = self.freed_bytes = 0
        self.newest_at: Optional[float] = None
        self.oldest_at: Optional[float] = None
        self.parts: Dict[str, Dict[str, Any]] = {}
        self.owners: Dict[int, str] = {}
        self.problems: List[Tuple[str, str]] = []
        self._shared: Dict[int, List[int]] = {}

    @property
    def names(self) -> Set[str]:
        """Return the last part of every entry's path."""
        return {path.rsplit("/", 1)[-1] for path in self.entries}

    @property
    def inodes(self) -> Set[int]:
        """Return the inode of every entry."""
        return {entry.inode for entry in self.entries.values()}

    def digest(self, place: Place) -> str:
        """Return a digest of the place and of all that is in it: equal only where nothing has changed."""
        made = hashlib.sha256()
        top = os.fstat(place.fd)
        made.update(repr((place.root, place.target, top.st_dev, top.st_ino)).encode("utf-8", "surrogateescape"))
        for path in sorted(self.entries):
            made.update(repr((path, tuple(self.entries[path]))).encode("utf-8", "surrogateescape"))
        return made.hexdigest()

    def add(self, path: str, found: os.stat_result) -> None:
        """Count one entry."""
        if len(self.entries) >= MAX_ENTRIES:
            raise Refused("too-large", "there are more than %d entries" % MAX_ENTRIES, "delete its folders one by one")
        entry = self.entries[path] = entry_of(found)
        self.owners.setdefault(found.st_uid, path)
        top, _, below = path.partition("/")
        part = self.parts.setdefault(top if below or entry.folder else "", {"files": 0, "bytes": 0, "newest_at": 0.0})
        if entry.folder:
            self.folders += 1
            return
        if stat.S_ISLNK(found.st_mode):
            self.links += 1
        self.files += 1
        self.bytes += found.st_size
        self.newest_at = max(self.newest_at or found.st_mtime, found.st_mtime)
        self.oldest_at = min(self.oldest_at or found.st_mtime, found.st_mtime)
        part["files"] += 1
        part["bytes"] += found.st_size
        part["newest_at"] = max(part["newest_at"], found.st_mtime)
        if found.st_nlink == 1:
            self.freed_bytes += found.st_blocks * 512
        else:
            names = self._shared.setdefault(found.st_ino, [0])
            names[0] += 1
            self.freed_bytes += found.st_blocks * 512 if names[0] == found.st_nlink else 0


def walk(place: Place) -> Tree:
    """Look at everything below a place. What stands in the way of a deletion becomes a problem (code, text)."""
    tree = Tree()
    _into(place, tree, place.fd, "", 0)
    return tree


def _into(place: Place, tree: Tree, fd: int, prefix: str, depth: int) -> None:
    for name, found in _entries(tree, fd, prefix):
        path = prefix + name
        tree.add(path, found)
        if not stat.S_ISDIR(found.st_mode):
            continue
        if depth >= MAX_DEPTH:
            tree.problems.append(("too-deep", "%s: more than %d folders deep" % (path, MAX_DEPTH)))
            continue
        try:
            below = place.enter(fd, name)
        except Refused as refused:
            tree.problems.append((refused.code, "%s: %s" % (path, refused)))
            continue
        try:
            _into(place, tree, below, path + "/", depth + 1)
        finally:
            os.close(below)


def _entries(tree: Tree, fd: int, prefix: str) -> Iterator[Tuple[str, os.stat_result]]:
    try:
        names = sorted(os.listdir(fd))
    except OSError as error:
        tree.problems.append(("unreadable", "%s: %s" % (prefix or "the folder", error.strerror)))
        return
    for name in names:
        try:
            yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            tree.problems.append(("changing", "%s%s went away while it was looked at" % (prefix, name)))
        except OSError as error:
            tree.problems.append(("unreadable", "%s%s: %s" % (prefix, name, error.strerror)))
