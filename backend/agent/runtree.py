"""The processes of a run, and how they are ended: asked first, then killed, each by identity."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Callable, Dict, List, Set, Tuple

from backend.agent import pidfd, procfs
from backend.wire import Run

Identity = Tuple[int, int]
"""(pid, start ticks since boot)."""

RUN_ENV = "EIGHTZEROS_RUN"
RUN_DIR_ENV = "EIGHTZEROS_RUN_DIR"

GIVE_UP_S = 600.0
"""How long after SIGKILL a process may stay before it is reported instead of awaited: unpinning a large
server's memory takes minutes (0.25 s a GB planned; facts: reset), a dead network filesystem for ever."""


def living() -> Dict[int, procfs.Stat]:
    """Read every process that runs. A zombie leader with live threads runs."""
    found = {}
    for pid in procfs.pids():
        stat = procfs.stat(pid)
        if stat is not None and not (stat.dead and len(procfs.threads(pid)) < 2):
            found[pid] = stat
    return found


def members(run: Run, folder: str, by_environ: bool = True) -> Set[Identity]:
    """Return the run's live processes: its session, its supervisor's descendants, and who carries its folder.

    The supervisor itself is none of them. `by_environ` costs about 0.1 ms a process and finds who left the
    session after the supervisor died; one that also cleared its environment is not found.
    """
    everyone = living()
    known = {pid for pid, it in everyone.items() if it.sid == run.pid and it.start_ticks >= run.pid_start}
    supervisor = everyone.get(run.supervisor_pid)
    if supervisor is not None and supervisor.start_ticks == run.supervisor_start:
        known.add(supervisor.pid)
    if by_environ:
        mark = b"%s=%s" % (RUN_DIR_ENV.encode(), os.fsencode(folder))
        known |= {
            pid
            for pid, stat in everyone.items()
            if pid not in known and stat.start_ticks >= run.pid_start and _carries(pid, mark)
        }
    known = with_descendants(known, everyone)
    known -= {run.supervisor_pid, os.getpid()}
    return {(pid, everyone[pid].start_ticks) for pid in known}


def with_descendants(known: Set[int], everyone: Dict[int, procfs.Stat]) -> Set[int]:
    """Add every descendant of the known processes."""
    children: Dict[int, List[int]] = {}
    for stat in everyone.values():
        children.setdefault(stat.ppid, []).append(stat.pid)
    found, open_ends = set(known), list(known)
    while open_ends:
        for child in children.get(open_ends.pop(), []):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return found


def runs(pid: int, start_ticks: int) -> bool:
    """Say whether this process still runs, be it only in threads of a leader that has ended."""
    stat = procfs.stat(pid)
    if stat is None or stat.start_ticks != start_ticks:
        return False
    return not stat.dead or len(procfs.threads(pid)) > 1


def ancestry(pid: int) -> List[Identity]:
    """Return a process and its parents, up to the first."""
    line: List[Identity] = []
    stat = procfs.stat(pid)
    while stat is not None and (stat.pid, stat.start_ticks) not in line:
        line.append((stat.pid, stat.start_ticks))
        stat = procfs.stat(stat.ppid) if stat.ppid else None
    return line


def signal_process(pid: int, start_ticks: int, number: int) -> bool:
    """Signal the process that started at `start_ticks`; False where it is gone or not ours to signal."""
    try:
        return pidfd.send(pid, start_ticks, number)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False
    if not runs(pid, start_ticks):  # a kernel before 5.3: the check and the signal are two steps there
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def environ_value(pid: int, name: str) -> str:
    """Return a variable of a process's first environment; empty where it has none or may not be read."""
    for pair in (procfs.read_bytes("/proc/%d/environ" % pid) or b"").split(b"\0"):
        key, _, value = pair.partition(b"=")
        if key == name.encode():
            return os.fsdecode(value)
    return ""


def _carries(pid: int, mark: bytes) -> bool:
    return mark in (procfs.read_bytes("/proc/%d/environ" % pid) or b"").split(b"\0")


class Ending:
    """Ends a run: SIGTERM to its session, SIGTERM to the rest once its main process is gone, SIGKILL.

    The SIGKILL comes after the grace. `step` does what is due and says whether it is over; it never waits.
    """

    def __init__(self, run: Run, find: Callable[[], Set[Identity]], grace_s: float) -> None:
        self._run, self._find = run, find
        self._asked: Set[Identity] = set()
        self.kill_at = time.monotonic() + grace_s
        self.killed: Set[Identity] = set()
        self.left: Set[Identity] = set()

    def hasten(self, grace_s: float) -> None:
        """Shorten the grace to `grace_s` from now, where that is earlier."""
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)

    def pause_s(self) -> float:
        """Return how long to wait for news before the next step: a scan of /proc is not free."""
        since_kill_s = time.monotonic() - self.kill_at
        if since_kill_s < 0:
            return min(0.25, -since_kill_s)
        return 0.05 if since_kill_s < 2.0 else 0.5

    def step(self) -> bool:
        """Send the signals that are due. Returns True once nothing is left, or nothing that can be killed."""
        self.left = self._find()
        now = time.monotonic()
        if now >= self.kill_at:
            for pid, start in self.left:
                if signal_process(pid, start, signal.SIGKILL):
                    self.killed.add((pid, start))
        else:
            self._ask(procfs.alive(self._run.pid, self._run.pid_start))
        return not self.left or now >= self.kill_at + GIVE_UP_S

    def _ask(self, main_lives: bool) -> None:
        """Ask the session once, and the rest once the main process is gone.

        What a main process starts in its handler (a clean-up) is left alone while it lives, and so are the
        workers that left its session: a server ends its own.
        """
        if main_lives and self._asked:
            return
        for pid, start in sorted(self.left - self._asked):
            stat = procfs.stat(pid)
            if main_lives and (stat is None or stat.sid != self._run.pid):
                continue
            self._asked.add((pid, start))
            if signal_process(pid, start, signal.SIGTERM):
                signal_process(pid, start, signal.SIGCONT)  # a stopped process would not see it
