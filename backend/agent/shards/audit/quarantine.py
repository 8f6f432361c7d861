"""Moving bad files aside, and giving their samples back, so that a resumed extraction does exactly these again.

In this order, so that a crash at any byte leaves what an extraction understands: data_config.json says that the folder
is not complete; the manifest names a file, then it is renamed; the journal is replaced, whole, by one without those
samples. A journal that still names a file which is gone is no harm: a resume extracts it again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import Any, Dict, List, Tuple

from backend.agent.files import read_json, sync_folder, write_atomic
from backend.agent.shards.audit.folder import File
from backend.shardfmt import layout
from backend.wire import Refused

MANIFEST_NAME = "manifest.jsonl"


class Quarantine:
    """A place for bad files: a new folder in `place` for each use, on the filesystem of the shards."""

    def __init__(self, root: str, place: str) -> None:
        """Check that files can be moved there. Raises Refused `bad-path` or `busy`."""
        self._root, self._place = root, os.path.realpath(os.path.expanduser(place))
        if os.path.commonpath([self._place, root]) == root:
            hint = "name a folder beside it: trainers read all that is below"
            raise Refused("bad-path", "%s is inside the folder that is audited" % self._place, hint)
        try:
            os.makedirs(self._place, exist_ok=True)
            same = os.stat(self._place).st_dev == os.stat(root).st_dev
        except OSError as error:
            raise Refused("bad-path", "%s: %s" % (self._place, error.strerror), "name another folder") from None
        if not same:
            hint = "moving it there would copy it; name a folder on the same disk"
            raise Refused("bad-path", "%s is on another filesystem than the shards" % self._place, hint)
        os.close(self._lock())

    def _lock(self) -> int:
        """Hold the folder as an extraction would, and return the descriptor. Raises Refused `busy`."""
        path = os.path.join(self._root, layout.LOCK_NAME)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Refused("bad-path", "%s: %s" % (path, error.strerror), "files can be moved by their owner") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            text = "an extraction (pid %s) writes into %s: nothing was moved" % (holder, self._root)
            raise Refused("busy", text, "stop it first, or quarantine after its end") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def move(self, files: List[File], why: Dict[str, List[str]]) -> Dict[str, Any]:
        """Move files and give their samples back. `why` is the faults by path.

        Returns {folder, manifest, files, given_back, left}: `left` says what was not moved and why. Raises Refused
        `busy` where an extraction has begun meanwhile.
        """
        lock = self._lock()
        try:
            folder = self._folder()
            moved, left = [], []
            if files:
                self._unfinish()
            for file in files:
                problem = self._one(folder, file, why.get(file.path, []))
                if problem:
                    left.append("%s: %s" % (file.path, problem))
                else:
                    moved.append(file)
            given_back = self._give_back({file.path for file in moved})
        finally:
            os.close(lock)
        manifest = os.path.join(folder, MANIFEST_NAME)
        return {"folder": folder, "manifest": manifest, "files": len(moved), "given_back": given_back, "left": left}

    def _folder(self) -> str:
        """Make a folder that is ours alone, so that no rename in it can hit anything."""
        stamp, number = time.strftime("%Y%m%d-%H%M%S"), 0
        while True:
            path = os.path.join(self._place, stamp + ("-%d" % number if number else ""))
            try:
                os.mkdir(path)
                return path
            except FileExistsError:
                number += 1

    def _one(self, folder: str, file: File, why: List[str]) -> str:
        """Move one file, as it was looked at; return why not, or nothing."""
        path, to = os.path.join(self._root, file.path), os.path.join(folder, file.path)
        try:
            found = os.lstat(path)
            if (found.st_size, found.st_mtime_ns, found.st_ino) != (file.size, file.mtime_ns, file.inode):
                return "it has changed since it was looked at, or is a link"
            os.makedirs(os.path.dirname(to), exist_ok=True)
            _add_line(os.path.join(folder, MANIFEST_NAME), {
                "file": file.path, "sample": file.sample, "bytes": file.size, "from": path, "to": to, "why": why,
                "at": time.time(),
            })  # fmt: skip
            os.rename(path, to)
            sync_folder(os.path.dirname(to))
            sync_folder(os.path.dirname(path))
        except OSError as error:
            return os.strerror(error.errno or 0)
        return ""

    def _unfinish(self) -> None:
        """Say in our data_config.json that the folder is not complete any more."""
        path = os.path.join(self._root, layout.CONFIG_NAME)
        if not os.path.exists(os.path.join(self._root, layout.JOURNAL_NAME)):
            return
        try:
            config = read_json(path)
        except ValueError:
            return  # it is a fault of its own; the next extraction writes it anew
        if isinstance(config, dict) and config.get("state") == "complete":
            _write_public(path, dict(config, state="incomplete"))

    def _give_back(self, paths: "set[str]") -> int:
        """Replace our journal by one without the samples of these files; return how many those were."""
        path = os.path.join(self._root, layout.JOURNAL_NAME)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return 0
        lines = data.split(b"\n")[:-1]  # a torn last line is cut off by every reader
        kept, given = _without(lines, paths)
        if given:
            write_atomic(path, b"".join(line + b"\n" for line in kept), 0o644)
            self._recount(kept[1:])
        return given

    def _recount(self, lines: List[bytes]) -> None:
        """Let data_config.json count what the journal holds."""
        path = os.path.join(self._root, layout.CONFIG_NAME)
        try:
            config, last = read_json(path), {}
            for line in lines:
                entry = json.loads(line)
                last[entry["index"]] = entry
        except (ValueError, TypeError, KeyError):
            return
        if isinstance(config, dict):
            counts = {name: sum(entry[name] for entry in last.values()) for name in ("tokens", "bytes")}
            _write_public(path, dict(config, samples=len(last), **counts))


def _without(lines: List[bytes], paths: "set[str]") -> Tuple[List[bytes], int]:
    """Drop every line of these files, earlier ones too, or a resume would believe one of them."""
    kept, given = lines[:1], set()
    for line in lines[1:]:
        try:
            name = json.loads(line).get("file")
        except (ValueError, AttributeError):
            name = None
        if name in paths:
            given.add(name)
        else:
            kept.append(line)
    return kept, len(given)


def _write_public(path: str, record: Any) -> None:
    """Write a record that others may read, as the extraction does."""
    write_atomic(path, json.dumps(record, indent=1).encode("ascii") + b"\n", 0o644)


def _add_line(path: str, record: Dict[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(json.dumps(record).encode("ascii") + b"\n")
        file.flush()
        os.fsync(file.fileno())
