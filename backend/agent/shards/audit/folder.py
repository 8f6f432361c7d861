"""What lies in a folder of shards: which files are samples, and what else writers and machines have left there.

Folders that are links are not entered, so that a walk ends. What a file holds is not looked at here.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from backend.agent.shards.audit.faults import ERROR, WARNING, Faults, runs_of
from backend.agent.shards.source import kind_of
from backend.shardfmt import layout

YOUNG_S = 30.0
"""A file written this lately may still be one that is being written (facts: shards, section 6)."""

MAX_RUNS = 20
_WRITING = re.compile(r".*\.(?:tmp|part|partial|incomplete)(?:\.[^.]*)?")
_LOOKS_LIKE = re.compile(r"(?:data|hs)_0*([0-9]{1,12})\b.*\.(?:pt|ckpt|ckpt\.gz|safetensors)")
_ROWS = re.compile(r"rows_([0-9]{1,12})-([0-9]{1,12})")


class File(NamedTuple):
    """One sample's file. `path` is relative; `sample` is None where its name holds no number."""

    path: str
    sample: Optional[int]
    size: int
    mtime_ns: int
    inode: int

    def young(self, now: float) -> bool:
        """Say whether it may still be being written; a time in the future counts as now."""
        return now - self.mtime_ns / 1e9 < YOUNG_S


class Tree:
    """A walked folder: `files` are the samples in order, `others` counts what is neither sample nor fault.

    `locked` are the files whose lock somebody holds, `extracting` whether an extraction of ours is writing there.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: List[File] = []
        self.faults = Faults()
        self.others = 0
        self.ranges: Set[Tuple[int, int]] = set()
        self.locked: Set[str] = set()
        self._named: List[File] = []
        self._folders: List[str] = []
        self._inodes: Dict[Tuple[int, int], str] = {}
        self._now = time.time()
        self.extracting = _held(os.path.join(root, layout.LOCK_NAME))

    def walk(self) -> "Tree":
        """Look at every name below the root. Raises OSError where the root itself cannot be listed."""
        self._folders = [""]
        first = True
        while self._folders:
            folder = self._folders.pop()
            try:
                with os.scandir(os.path.join(self.root, folder)) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                if first:
                    raise
                self.faults.add("unreadable", "the folder cannot be listed: %s" % error.strerror, folder)
                continue
            first = False
            self._rows(folder)
            for entry in entries:
                self._take(folder, entry)
        if not self.files:  # a layout that names files by conversation
            self.files, self._named = self._named, []
        self.others += len(self._named)
        self.files.sort(key=lambda file: (file.sample is None, file.sample or 0, layout.natural_key(file.path)))
        self._judge()
        return self

    def _rows(self, folder: str) -> None:
        match = _ROWS.fullmatch(os.path.basename(folder))
        if match:
            self.ranges.add((int(match.group(1)), int(match.group(2))))

    def _take(self, folder: str, entry: "os.DirEntry[str]") -> None:
        path = os.path.join(folder, entry.name)
        index = layout.sample_index(entry.name)
        try:
            if entry.is_dir(follow_symlinks=False):
                if index is not None:
                    self.faults.add("not-a-file", "a folder with the name of a sample", path)
                self._folders.append(path)
                return
            found = entry.stat()
        except OSError as error:
            self._odd(path, index, entry, error)
            return
        if stat.S_ISDIR(found.st_mode):
            level = ERROR if _ROWS.fullmatch(entry.name) else WARNING
            self.faults.add("link-folder", "a link to a folder: what is in it was not looked at", path, level=level)
        elif not stat.S_ISREG(found.st_mode):
            if index is not None:
                self.faults.add("not-a-file", "it is %s" % kind_of(found.st_mode), path, index)
        elif self._unfinished(path, entry.name, found):
            pass
        elif layout.file_kind(entry.name) == "shard":
            self._shard(path, entry.name, index, found)
        else:
            self.others += 1

    def _odd(self, path: str, index: Optional[int], entry: "os.DirEntry[str]", error: OSError) -> None:
        if entry.is_symlink():
            level = WARNING if index is None else ERROR
            self.faults.add("dangling-link", "a link to nothing, or to itself", path, index, level)
        elif not isinstance(error, FileNotFoundError):  # a writer renamed it at this moment
            self.faults.add("unreadable", "it cannot be looked at: %s" % error.strerror, path, index)

    def _unfinished(self, path: str, name: str, found: os.stat_result) -> bool:
        """Take what a writer leaves beside the shards: temporary files, and locks that nobody holds."""
        lock = name.endswith(".lock") and name != layout.LOCK_NAME
        if not lock and not _WRITING.fullmatch(name):
            return False
        if lock and _held(os.path.join(self.root, path)):
            self.locked.add(path[: -len(".lock")])
        elif self._now - found.st_mtime < YOUNG_S or (self.extracting and layout.is_our_temporary(name)):
            self.faults.add("in-flight", "it is being written", path, level=WARNING)
        else:
            what = "a lock that nobody holds" if lock else "what a writer left that did not finish"
            self.faults.add("leftover", what, path)
        return True

    def _shard(self, path: str, name: str, index: Optional[int], found: os.stat_result) -> None:
        file = File(path, index, found.st_size, found.st_mtime_ns, found.st_ino)
        if index is None:
            like = _LOOKS_LIKE.fullmatch(name)
            if like is None:
                self._named.append(file)
                return
            text = "not the name of a sample, but a reader that takes every %s reads it as one"
            self.faults.add("odd-name", text % os.path.splitext(name)[1], path, int(like.group(1)))
            return
        first = self._inodes.setdefault((found.st_dev, found.st_ino), path)
        if first != path:
            self.faults.add("same-file", "the same file as %s under another name (a hard link or a link)" % first,
                            path, index)  # fmt: skip
            return
        self.files.append(file)
        match = _ROWS.fullmatch(os.path.basename(os.path.dirname(path)))
        if match and not int(match.group(1)) <= index < int(match.group(2)):
            self.faults.add("misplaced", "sample %d is not of %s" % (index, match.group(0)), path, index)

    def _judge(self) -> None:
        if not self.files:
            self.faults.add("no-shards", "there is no shard in %s" % self.root)
        by_index: Dict[int, List[str]] = {}
        suffixes: Dict[str, int] = {}
        for file in self.files:
            suffix = re.sub(r"^[^.]*", "", os.path.basename(file.path)) if file.sample is not None else ""
            suffixes[suffix] = suffixes.get(suffix, 0) + 1
            if file.sample is not None:
                by_index.setdefault(file.sample, []).append(file.path)
        for index, paths in by_index.items():
            for path in paths[1:]:
                self.faults.add("id-twice", "sample %d is also in %s" % (index, paths[0]), path, index)
        if len(suffixes) > 1:
            counted = ", ".join("%d x %s" % (suffixes[name], name) for name in sorted(suffixes))
            self.faults.add("format-mix", "files of several formats: %s" % counted)


def missing(have: Set[int], wanted: Set[int], excused: Set[int], faults: Faults, words: str) -> None:
    """Say which numbers are wanted and not there, in runs."""
    runs = runs_of(sorted(wanted - have - excused))
    for run in runs[:MAX_RUNS]:
        faults.add("missing-id", "%s: %s" % (run, words))
    if len(runs) > MAX_RUNS:
        faults.add("missing-id", "and %d more runs of numbers" % (len(runs) - MAX_RUNS))


def _held(path: str) -> bool:
    """Say whether a writer holds a lock file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
