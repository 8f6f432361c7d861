"""Who listens on a port of this host, by the kernel's table of sockets and who has them open."""

from __future__ import annotations

import os
from typing import Iterable, Set

from backend.agent import procfs

LISTEN = b"0A"


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
