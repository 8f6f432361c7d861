"""What /proc says of a process, read so that no name, title or race can mislead it.

Every function returns None (or an empty value) where the process is gone or may not be read; none raises for that.
"""

from __future__ import annotations

import os
import pwd
from typing import Dict, Iterator, List, NamedTuple, Optional

from backend.wire import printable

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
CHUNK_BYTES = 16384
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel's proc_ns.h."""


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that the agent uses. `start_ticks` counts from boot, CLOCK_TICKS a second."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    start_ticks: int
    flags: int

    @property
    def dead(self) -> bool:
        """Say whether the leader has ended; a zombie leader may still have live threads."""
        return self.state in "ZX"


def read_bytes(path: str, limit: int = 1 << 20) -> Optional[bytes]:
    """Read a small file of /proc, or None where it is gone or forbidden.

    In small chunks: a scan reads thousands of these files, and a buffer of `limit` bytes costs more than the read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.read(fd, min(limit, CHUNK_BYTES))
        chunk = found
        while chunk and len(found) < limit:
            chunk = os.read(fd, min(limit - len(found), CHUNK_BYTES))
            found += chunk
        return found
    except OSError:
        return None
    finally:
        os.close(fd)


def pids() -> Iterator[int]:
    """List every process id that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def stat(pid: int) -> Optional[Stat]:
    """Read /proc/PID/stat. The name in it may hold spaces, newlines and parentheses: it ends at the last ')'."""
    raw = read_bytes("/proc/%d/stat" % pid)
    if not raw or b")" not in raw:
        return None
    head, tail = raw[: raw.rindex(b")")], raw[raw.rindex(b")") + 2 :].split()
    if len(tail) < 20:
        return None
    comm = head[head.index(b"(") + 1 :].decode("utf-8", "replace")
    return Stat(
        pid, comm, tail[0].decode("ascii"), int(tail[1]), int(tail[2]), int(tail[3]), int(tail[19]), int(tail[6])
    )


def alive(pid: int, start_ticks: int) -> bool:
    """Say whether the process that started at `start_ticks` still runs under this pid. A zombie does not run."""
    found = stat(pid)
    return found is not None and found.start_ticks == start_ticks and not found.dead


def status(pid: int) -> Dict[str, str]:
    """Read /proc/PID/status as a dictionary of its raw values."""
    raw = read_bytes("/proc/%d/status" % pid) or b""
    pairs = (line.partition(b":") for line in raw.split(b"\n"))
    return {key.decode("ascii", "replace"): value.strip().decode("utf-8", "replace") for key, _, value in pairs if key}


def ignores(pid: int, number: int) -> bool:
    """Say whether a process has told the kernel to discard a signal: waiting for it to heed one is in vain."""
    mask = status(pid).get("SigIgn", "")
    return bool(mask) and bool(int(mask, 16) >> (number - 1) & 1)


def uid(pid: int) -> Optional[int]:
    """Return the real uid of a process."""
    field = status(pid).get("Uid", "").split()
    return int(field[0]) if field else None


def user_name(number: Optional[int]) -> str:
    """Return a user's name, or the number where the host has no name for it."""
    if number is None:
        return "?"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def kib(fields: Dict[str, str], name: str) -> int:
    """Return a kB field of `status` in bytes; 0 where it is absent."""
    value = fields.get(name, "").split()
    return int(value[0]) * 1024 if value and value[0].isdigit() else 0


def command(pid: int, limit: int = 200) -> str:
    """Return the command line, safe to show; the kernel's name in brackets where a process has none."""
    raw = read_bytes("/proc/%d/cmdline" % pid, 16384) or b""
    text = printable(raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace"), 8192)
    if not text:
        found = stat(pid)
        text = "[%s]" % printable(found.comm) if found else ""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def exe(pid: int) -> str:
    """Return the path of the executable, which a process cannot rewrite; empty where it may not be read."""
    try:
        return os.readlink("/proc/%d/exe" % pid)
    except OSError:
        return ""


def threads(pid: int) -> List[int]:
    """List the threads of a process: a zombie leader's files are only seen through a live thread."""
    try:
        return [int(name) for name in os.listdir("/proc/%d/task" % pid) if name.isdigit()]
    except OSError:
        return []


def uptime_s() -> float:
    """Return the seconds since boot, on the clock that start ticks count on."""
    raw = read_bytes("/proc/uptime")
    return float(raw.split()[0]) if raw else 0.0


def age_s(start_ticks: int) -> float:
    """Return how long ago a process started, in seconds."""
    return max(0.0, uptime_s() - start_ticks / CLOCK_TICKS)


def in_initial_pid_namespace() -> bool:
    """Say whether this process sees pids as the kernel's own lines have them: it is in no container's namespace."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[%d]" % INITIAL_PID_NAMESPACE
    except OSError:
        return False


def boot_id() -> str:
    """Return the id of this boot; empty where the kernel hides it."""
    return (read_bytes("/proc/sys/kernel/random/boot_id") or b"").decode("ascii", "replace").strip()
