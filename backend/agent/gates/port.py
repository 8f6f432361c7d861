"""Whether a port of loopback is free, and if not, who listens on it."""

from __future__ import annotations

import os
import socket
from typing import Iterable, Set

from backend.agent import procfs
from backend.wire import Gate

LISTEN = b"0A"


def check(number: int) -> Gate:
    """Check that a server could be bound to 127.0.0.1 at this port."""
    name = "port %d" % number
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            return Gate(name, True, "free")
        except OSError as error:
            who = owner(number)
            text = "taken by %s" % who if who else "cannot be bound: %s" % error.strerror
            return Gate(name, False, text, "stop that, or choose another `port`")


def owner(number: int) -> str:
    """Say who listens on a port: `process 4711 (python3 ...)`; empty where nobody does."""
    inodes = _listening(number)
    if not inodes:
        return ""
    wanted = {"socket:[%d]" % inode for inode in inodes}
    for pid in procfs.pids():
        if _holds(pid, wanted):
            return "process %d (%s)" % (pid, procfs.command(pid)[:80])
    return "a process of another user"


def listens(number: int, pids: Iterable[int]) -> bool:
    """Say whether one of these processes listens on a port."""
    wanted = {"socket:[%d]" % inode for inode in _listening(number)}
    return bool(wanted) and any(_holds(pid, wanted) for pid in pids)


def _listening(number: int) -> Set[int]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (procfs.read_bytes(table) or b"").split(b"\n")[1:]:
            row = line.split()
            if len(row) > 9 and row[3] == LISTEN and int(row[1].rpartition(b":")[2], 16) == number:
                found.add(int(row[9]))
    return found


def _holds(pid: int, wanted: Set[str]) -> bool:
    folder = "/proc/%d/fd" % pid
    try:
        return any(_target(os.path.join(folder, name)) in wanted for name in os.listdir(folder))
    except OSError:
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
