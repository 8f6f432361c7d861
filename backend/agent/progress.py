"""How far a run is, as the run itself says, and the room that its disk has left."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import select
import signal
import struct
import time
from typing import Any, Dict, Optional, Tuple

from backend.agent import runfiles
from backend.agent.workers import PR_SET_PDEATHSIG
from backend.wire import Progress, from_dict, printable

LARGEST_BYTES = 64 * 1024
PROBE_EVERY_S = 5.0
PROBE_PATIENCE_S = 0.2


class ProgressReader:
    """Reads progress.json of runs, again only when it changed; a torn one leaves the last good one."""

    def __init__(self) -> None:
        self._seen: Dict[str, Tuple[Tuple[int, int, int], Optional[Progress], str]] = {}
        self._room: Dict[str, "DiskRoom"] = {}

    def read(self, folder: str, out_dir: str, live: bool) -> Tuple[Optional[Progress], str]:
        """Return (progress, what is wrong with the file). `disk_free_bytes` is filled for a live run."""
        path = os.path.join(folder, runfiles.PROGRESS)
        try:
            st = os.stat(path)
        except OSError:
            return None, ""
        stamp = (st.st_ino, st.st_mtime_ns, st.st_size)
        _, last, note = self._seen.get(folder, (None, None, ""))
        if folder not in self._seen or self._seen[folder][0] != stamp:
            fresh, note = _parse(path)
            last = fresh or last
            self._seen[folder] = (stamp, last, note)
        if last is None:
            return None, note
        free = self._free(out_dir) if live and out_dir else None
        return dataclasses.replace(last, disk_free_bytes=last.disk_free_bytes if free is None else free), note

    def _free(self, out_dir: str) -> Optional[int]:
        if out_dir not in self._room:
            self._room[out_dir] = DiskRoom(out_dir)
        return self._room[out_dir].free_bytes()


class DiskRoom:
    """Free bytes where a folder is or would be, asked in a child: a dead network filesystem never answers."""

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)
        self._free: Optional[int] = None
        self._asked = -PROBE_EVERY_S
        self._child, self._pipe = 0, -1
        self._owner = os.getpid()

    def free_bytes(self) -> Optional[int]:
        """Return the newest answer, None before the first, for which it waits at most PROBE_PATIENCE_S."""
        if os.getpid() != self._owner:
            return self._free  # a worker forked from the loop: the child that may be out asking is not its own
        now = time.monotonic()
        if not self._child and now - self._asked >= PROBE_EVERY_S:
            self._ask()
            self._asked = now
            self._take(PROBE_PATIENCE_S if self._free is None else 0.0)
        elif self._child:
            self._take(0.0)
        return self._free

    def _ask(self) -> None:
        reader, writer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                os.write(writer, struct.pack("q", free_bytes(self._path)))
            finally:
                os._exit(0)
        os.close(writer)
        self._pipe = reader

    def _take(self, patience_s: float) -> None:
        if not select.select([self._pipe], [], [], patience_s)[0]:
            return
        data = os.read(self._pipe, 8)
        os.close(self._pipe)
        os.waitpid(self._child, 0)
        self._child = 0
        self._free = struct.unpack("q", data)[0] if len(data) == 8 else None


def free_bytes(path: str) -> int:
    """Return the bytes that a user may still write at `path`, or at its nearest existing parent."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def write_progress(run_dir: str, progress: Progress) -> str:
    """Write progress.json, for a run of the agent's own; return what kept it from that, or nothing.

    It is no evidence: it is not synced, and a failure here stops nothing.
    """
    path = os.path.join(run_dir, runfiles.PROGRESS)
    try:
        with open(path + ".tmp", "w", encoding="ascii") as file:
            json.dump(vars(progress), file)
        os.replace(path + ".tmp", path)
    except OSError as error:
        return "progress.json could not be written: %s" % error
    return ""


def _parse(path: str) -> Tuple[Optional[Progress], str]:
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(LARGEST_BYTES))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return _checked(content), ""
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return None, "progress.json cannot be read: %s" % printable(str(error), 200)


def _checked(content: Dict[str, Any]) -> Progress:
    """Build a Progress of the right types, or raise ValueError naming the field."""
    progress = from_dict(Progress, content)
    for field in dataclasses.fields(Progress):
        value = getattr(progress, field.name)
        if field.name in ("state", "shard", "message"):
            if not isinstance(value, str):
                raise ValueError("`%s` is no text" % field.name)
            setattr(progress, field.name, printable(value, 1000))
        elif value is None and field.default is None:
            continue
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("`%s` is no number" % field.name)
        elif value != value or abs(value) == float("inf"):
            raise ValueError("`%s` is not finite" % field.name)
        elif field.type in ("int", "Optional[int]"):
            setattr(progress, field.name, int(value))
    return progress
