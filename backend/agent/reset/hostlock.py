"""One at a time on a host, whichever of its users asks: two who cannot see each other's files must not reset the same
GPUs at once.

The lock is in several places, and whoever has it holds each of them that can be had here:

- an abstract unix socket: it belongs to a network namespace, cannot be left behind, and the kernel says who listens;
- flock on a file that every user may open, in /dev/shm and in /run/lock: they join containers that share a folder;
- flock on a file of the user's own, which nobody else can take or spoil.

It is of the whole host, not of its GPUs one by one: resets share the driver, persistence mode and at times the links.
A container that has its own network, /dev/shm and /run/lock is not seen from outside, and does not see.

Any user could take the shared places and never let go. So root's lock and one's own always count, but that of another
user counts for LONGEST_S at most, then it is passed over and said. Who lies about the time, or hides in a pid
namespace, is told by name all the same and is root's to end (`ss -xlp` and `lslocks` show the process). What stands in
a shared file is believed only where the kernel names the same process as its holder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import socket
import stat
import struct
import time
from contextlib import contextmanager
from typing import Iterator, List, NamedTuple, Optional, Tuple

from backend.agent import procfs
from backend.agent.paths import state_dir
from backend.wire import Refused, printable

SHARED = ("/dev/shm", "/run/lock")
LONGEST_S = 3600.0
"""No reset takes as long: 90 s of grace, 600 s for a release, in three rounds, 600 s of tests (facts: reset, 4)."""

BACKLOG = 4096
"""Each one that is refused stays in the queue of the socket, which is never served, until the lock ends."""

RECORD_BYTES = 1000


class Held(NamedTuple):
    """The lock: whoever inherits `fds` holds it too. `passed` says what was not heeded or could not be used."""

    fds: Tuple[int, ...]
    passed: List[str]


class Told(NamedTuple):
    """What a holder says of itself: since when (wall clock), and what for."""

    since_s: float
    what: str


class Holder(NamedTuple):
    """Who has a place: ids as seen from here, None where the kernel does not say."""

    pid: Optional[int]
    uid: Optional[int]
    since_s: Optional[float]
    what: str

    def __str__(self) -> str:
        user = "user %s" % procfs.user_name(self.uid) if self.uid is not None else "a user who cannot be seen from here"
        who = "process %d" % self.pid if self.pid else "a process that cannot be seen from here"
        since = time.strftime(", since %Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s)) if self.since_s else ""
        return "%s of %s (%s%s)" % (self.what, user, who, since)

    def counts(self) -> bool:
        """Say whether it must be waited for."""
        if self.uid in (0, os.geteuid()) or self.since_s is None:
            return True
        return time.time() - self.since_s < LONGEST_S


@contextmanager
def one_at_a_time(what: str, scope: str, kind: str = "reset") -> Iterator[Held]:
    """Hold the lock of a kind. `scope` is `DeviceTable.scope()`: the folder of what is a host of its own.

    Raises Refused `KIND-running` that names who has it.
    """
    name = "eightzeros-%s-%s.lock" % (kind, hashlib.sha256(scope.encode("utf-8")).hexdigest()[:12])
    own = os.path.join(state_dir(), "%s-%s" % (socket.gethostname(), name))  # a home may be shared by hosts
    shared = [os.path.join(folder, name) for folder in ((scope,) if scope else SHARED)]
    fds: List[int] = []
    passed: List[str] = []
    try:
        _listen(name, kind, shared, fds, passed)
        for path in (*shared, own):
            _lock(path, kind, fds, passed)
        if len(fds) < 2:
            passed.append("only the resets of this user are kept apart: no place for a lock of all users can be had")
        for fd in fds:
            _record(fd, what)
        yield Held(tuple(fds), passed)
    finally:
        for fd in fds:
            os.close(fd)


def _listen(name: str, kind: str, shared: List[str], fds: List[int], passed: List[str]) -> None:
    """Listen on the socket. One that has no listener whom the kernel names is none of ours: that is not heeded."""
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as place:
            try:
                place.bind("\0" + name)
                place.listen(BACKLOG)
                fds.append(place.detach())
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    passed.append("the lock's socket: %s" % error.strerror)
                    return
        found = _listener(name)
        if found is not None:
            pid, uid = found
            told = next(filter(None, (_told(_read(path), pid) for path in shared)), None)
            _heed(_holder(pid, uid, told, None, kind), kind, "the socket @" + name, passed)
            return
        time.sleep(0.01)  # it ends or begins just now
    passed.append("the socket @%s is somebody's who does not answer: not heeded" % name)


def _listener(name: str) -> Optional[Tuple[Optional[int], int]]:
    """Return pid (None where it cannot be seen from here) and uid of who listens, as the kernel noted them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as place:
        place.setblocking(False)
        try:
            place.connect("\0" + name)
            pid, uid, _ = struct.unpack("iii", place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return pid or None, uid


def _lock(path: str, kind: str, fds: List[int], passed: List[str]) -> None:
    """Lock the file at a path, made where there is none. One that cannot be used is no place of the lock."""
    for _ in range(3):
        try:
            fd = _open(path)
        except OSError as error:
            if os.path.lexists(path):  # else: no such folder here, or none to write in
                passed.append("%s is not used as a lock: %s" % (path, error.strerror or error))
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found, pid = os.fstat(fd), _flocker(fd)
            told = _told(os.pread(fd, RECORD_BYTES, 0), pid)
            os.close(fd)
            uid = procfs.uid(pid) if pid else None
            _heed(_holder(pid, uid, told, found.st_mtime, kind), kind, path, passed)
            return
        except OSError as error:
            os.close(fd)
            passed.append("%s cannot be locked: %s" % (path, error.strerror))
            return
        if _is_at(fd, path):
            fds.append(fd)
            return
        os.close(fd)  # its owner put another file in its place
    passed.append("%s is not used as a lock: it is replaced again and again" % path)


def _open(path: str) -> int:
    """Open a plain file, never what a link or another name of it leads to. Raises OSError.

    O_CREAT comes last and alone: in a sticky folder the kernel refuses it for a file of another user.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, os.O_RDWR | flags)
        except PermissionError:
            fd = os.open(path, os.O_RDONLY | flags)
    except FileNotFoundError:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        except FileExistsError:
            return os.open(path, os.O_RDWR | flags)  # somebody made it just now
        os.fchmod(fd, 0o666)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file with one name")
    return fd


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _flocker(fd: int) -> Optional[int]:
    """Return who holds flock on an open file, by the kernel's list; None where it cannot be seen from here."""
    found = os.fstat(fd)
    identity = b"%02x:%02x:%d" % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
    for line in (procfs.read_bytes("/proc/locks", 1 << 22) or b"").split(b"\n"):
        words = line.split()
        if len(words) > 5 and words[1] == b"FLOCK" and words[5] == identity and int(words[4]) > 0:
            return int(words[4])
    return None


def _holder(
    pid: Optional[int], uid: Optional[int], told: Optional[Told], changed_s: Optional[float], kind: str
) -> Holder:
    """Put together what is known: what it says of itself, when it started, when it wrote the file."""
    if told is not None:
        return Holder(pid, uid, told.since_s, told.what)
    found = procfs.stat(pid) if pid else None
    if found is None:
        return Holder(pid, uid, changed_s, "another " + kind)
    return Holder(pid, uid, time.time() - procfs.age_s(found.start_ticks), "another " + kind)


def _heed(holder: Holder, kind: str, place: str, passed: List[str]) -> None:
    """Refuse because of a holder, or pass it over."""
    if holder.counts():
        fix = "wait for its end"
        if holder.uid not in (0, os.geteuid(), None) and holder.since_s is not None:
            left_s = LONGEST_S - (time.time() - holder.since_s)
            fix += "; it counts for %d minutes more at most" % math.ceil(left_s / 60)
        raise Refused(kind + "-running", "%s is running on this host" % (holder,), fix)
    passed.append("%s is held too long for any %s, by %s: not heeded" % (place, kind, holder))


def _record(fd: int, what: str) -> None:
    """Write into a lock's file what it is held for. A socket takes none, nor does a file that is only readable."""
    came_from = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if came_from:
        what += " from %s" % came_from
    found = procfs.stat(os.getpid())
    record = {"pid": os.getpid(), "ticks": found.start_ticks if found else 0, "since": time.time(), "what": what[:200]}
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(record).encode("ascii"), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, RECORD_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _told(raw: bytes, pid: Optional[int]) -> Optional[Told]:
    """Return what a file says of its holder; None where that is no process that the kernel names as the holder."""
    try:
        record = json.loads(raw)
        found = procfs.stat(pid) if pid else None
        if found is None or (record["pid"], record["ticks"]) != (pid, found.start_ticks):
            return None
        since_s = float(record["since"])
        return Told(since_s, printable(str(record["what"]), 200)) if 0 <= since_s <= time.time() else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
