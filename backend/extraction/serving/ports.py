"""Who listens on a TCP port of this host, as /proc says."""

from __future__ import annotations

import os
from typing import NamedTuple

LISTEN = "0A"


class Owner(NamedTuple):
    """A process that listens; pid 0 where it may not be seen."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.pid else "a process of another user"


def owner(port: int) -> Owner | None:
    """Return who listens on a port, or None where nobody does."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    if not sockets:
        return None
    for name in os.listdir("/proc"):
        if name.isdigit() and _holds(int(name), sockets):
            return Owner(int(name), command(int(name)))
    return Owner(0, "")


def command(pid: int) -> str:
    """Return the beginning of a process's command line, safe to show."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(400).replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return "gone"
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()[:120]


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port, of either IP version."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        found |= {row[9] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    return found


def _holds(pid: int, sockets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(_target(f"{folder}/{name}") in sockets for name in os.listdir(folder))
    except OSError:
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
