"""The processes of the server: its descendants and whoever shares our session."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple


class Seen(NamedTuple):
    """A live process. `start` counts ticks from boot, so that a pid that was given again is not taken for it."""

    pid: int
    ppid: int
    session: int
    start: int


def look(pid: int) -> Seen | None:
    """Read a process, or None where it is gone or a zombie. Its name may hold anything: it ends at the last ')'."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except OSError:
        return None
    words = raw[raw.rindex(b")") + 2 :].split()
    return None if words[0] in (b"Z", b"X") else Seen(pid, int(words[1]), int(words[3]), int(words[19]))


def family(root: int) -> list[Seen]:
    """Return who descends from `root`; with us as the subreaper that holds for orphans as well."""
    looked = [look(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    everyone = {seen.pid: seen for seen in looked if seen is not None}
    found: list[Seen] = []
    parents = {root}
    while parents:
        children = [seen for seen in everyone.values() if seen.ppid in parents and seen not in found]
        found += children
        parents = {seen.pid for seen in children}
    return found


def kill(seen: Seen) -> None:
    """Kill a process by its identity."""
    again = look(seen.pid)
    if again is not None and again.start == seen.start:
        try:
            os.kill(seen.pid, signal.SIGKILL)
        except OSError:
            pass  # gone at this moment


def reap() -> None:
    """Take note of every child that has ended, so that none stays a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
