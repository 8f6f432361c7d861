"""What was seen of files that have not changed since, so that a second audit, or the rest of one, costs a stat a file.

One file a folder, JSON lines that are only added: one that a kill tore is not there. The first line names the program
that looked; another program's looks are looked at again. The file also keeps two audits of one folder apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from backend.agent.files import write_atomic
from backend.agent.paths import state_dir
from backend.agent.shards.audit.folder import File
from backend.wire import SCHEMA, Refused

RACY_S = 2.0
"""A file that was written this lately may change again under the same time; it is not kept."""

FLUSH_S = 0.2
LET_GO_S = 2.0
"""How long the processes of an audit that was killed may take to be gone, and with them its lock."""

Stamp = Tuple[int, int, int]
_compact = json.JSONEncoder(separators=(",", ":")).encode


class Cache:
    """The looks at one folder. Raises Refused `busy` where another audit of the folder is under way."""

    def __init__(self, root: str, fresh: bool = False) -> None:
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        self.folder = os.path.join(state_dir("audits"), name)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(self.folder, "looks.jsonl")
        self._lock = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(self._lock):
            os.close(self._lock)
            raise Refused("busy", "an audit of %s is under way" % root, "wait for it, or stop it")
        self._known: Dict[str, Tuple[Stamp, Dict[str, Any]]] = {}
        self._new: List[bytes] = []
        self._flushed_at = time.monotonic()
        self._head = json.dumps({"schema": SCHEMA, "program": program_id(), "root": root}).encode("ascii") + b"\n"
        if not self._load() or fresh:
            self._known = {}
            write_atomic(self._path, self._head)

    def get(self, file: File, deep: bool) -> Optional[Dict[str, Any]]:
        """Return the look at a file that is as it was, or None. A deep look is also a shallow one."""
        known = self._known.get(file.path)
        if known is None or known[0] != _stamp(file) or (deep and not known[1].get("deep")):
            return None
        return known[1]

    def put(self, file: File, look: Dict[str, Any]) -> None:
        """Keep a look. A kill costs what was looked at since the last flush."""
        if time.time() - file.mtime_ns / 1e9 < RACY_S:
            return
        self._known[file.path] = (_stamp(file), look)
        self._new.append(_line(file.path, _stamp(file), look))
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is new. A full disk costs the cache and nothing else."""
        data, self._new = b"".join(self._new), []
        self._flushed_at = time.monotonic()
        try:
            with open(self._path, "ab") as file:
                file.write(data)
        except OSError:
            pass

    def close(self, files: List[File]) -> None:
        """Write the rest, drop what is no longer there where that is worth it, and let the folder go."""
        self.flush()
        there = {file.path for file in files}
        gone = [path for path in self._known if path not in there and not path.startswith("/")]
        if len(gone) > len(there):
            for path in gone:
                del self._known[path]
            lines = [_line(path, stamp, look) for path, (stamp, look) in self._known.items()]
            try:
                write_atomic(self._path, self._head + b"".join(lines))
            except OSError:
                pass
        os.close(self._lock)

    def _load(self) -> bool:
        """Read what is kept, and say whether it is of this program."""
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except OSError:
            return False
        if not data.startswith(self._head):
            return False
        whole = data.rfind(b"\n") + 1
        for line in data[len(self._head) : whole].split(b"\n"):
            try:
                path, stamp, look = json.loads(line)
                self._known[path] = (tuple(stamp), look)
            except (ValueError, TypeError):
                continue
        if whole < len(data):
            os.truncate(self._path, whole)
        return True


def _locked(fd: int) -> bool:
    """Take the lock, or say that somebody holds it."""
    end = time.monotonic() + LET_GO_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        time.sleep(0.05)


def _stamp(file: File) -> Stamp:
    return file.size, file.mtime_ns, file.inode


def _line(path: str, stamp: Stamp, look: Dict[str, Any]) -> bytes:
    return _compact([path, stamp, look]).encode("ascii") + b"\n"


def program_id() -> str:
    """Return what stands for the code that looks: its sources, as they are here."""
    here = os.path.dirname(os.path.abspath(__file__))
    shards, formats = os.path.dirname(here), os.path.join(here, "..", "..", "..", "shardfmt")
    digest = hashlib.blake2b(digest_size=12)
    for top in (shards, formats):
        for folder, _, names in sorted(os.walk(top)):
            for name in sorted(name for name in names if name.endswith(".py")):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()
