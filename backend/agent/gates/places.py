"""Whether a path is there, and whether a disk, /dev/shm and the memory have the room."""

from __future__ import annotations

import os

from backend.agent import procfs
from backend.agent.hostload import HostLoad
from backend.agent.progress import free_bytes
from backend.wire import GIB, Gate

SHM = "/dev/shm"
MEMORY = "free RAM"


def path(where: str) -> Gate:
    """Check that a path is there and can be read."""
    whole, name = os.path.expanduser(where), "path %s" % where
    try:
        st = os.stat(whole)
    except OSError as error:
        return Gate(name, False, error.strerror or str(error), "make it, or correct the stage's path")
    need = os.R_OK | (os.X_OK if os.path.isdir(whole) else 0)
    if not os.access(whole, need):
        return Gate(name, False, "there, but not readable for this user", "chmod it, or run as its owner")
    return Gate(name, True, "folder" if os.path.isdir(whole) else "%.2f GiB" % (st.st_size / GIB))


def room(where: str, wanted_bytes: int, why: str = "") -> Gate:
    """Check the room where a path is or would be, and that this user may write there. `why` says how much is meant."""
    whole, name = os.path.abspath(os.path.expanduser(where)), where if where == SHM else "disk %s" % where
    parent = whole
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    free, wanted = free_bytes(parent), int(wanted_bytes)
    detail = "%.1f GiB free, %.1f GiB needed%s" % (free / GIB, wanted / GIB, " (%s)" % why if why else "")
    if not os.path.isdir(parent):
        return Gate(name, False, "%s is no folder" % parent, "correct the stage's path")
    if free < wanted:
        return Gate(name, False, detail, "free %.1f GiB on the disk of %s" % ((wanted - free) / GIB, parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        return Gate(name, False, "%s; but this user may not write in %s" % (detail, parent), "chown or chmod it")
    return Gate(name, True, detail)


def memory(wanted_bytes: int) -> Gate:
    """Check the memory that programs may still have: the host's, or what this cgroup leaves of it."""
    free = HostLoad().sample().memory_available_bytes
    if free is None:
        return Gate(MEMORY, None, "/proc/meminfo does not say what is available", "see free -g")
    left = _cgroup_left()
    bound = "" if left is None or left >= free else " in this cgroup"
    free = free if left is None else min(free, left)
    detail = "%.1f GiB free%s, %.1f GiB needed" % (free / GIB, bound, int(wanted_bytes) / GIB)
    fix = "" if free >= int(wanted_bytes) else "see who has it: ps -eo pid,user,rss,comm --sort=-rss | head"
    return Gate(MEMORY, free >= int(wanted_bytes), detail, fix)


def _cgroup_left() -> "int | None":
    """Return what the limit of our own cgroup (version 2) leaves, or None where it has none."""
    for line in (procfs.read_bytes("/proc/self/cgroup") or b"").decode("utf-8", "replace").split("\n"):
        if line.startswith("0::"):
            folder = "/sys/fs/cgroup" + line[3:]
            limit, used = (procfs.read_bytes(os.path.join(folder, name)) or b"" for name in
                           ("memory.max", "memory.current"))  # fmt: skip
            if limit.strip().isdigit() and used.strip().isdigit():
                return max(0, int(limit) - int(used))
    return None
