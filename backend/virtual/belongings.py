"""Processes that belong to a virtual host: known by what the kernel says of them, ended through pidfds."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from backend.agent import procfs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GONE_S = 10.0


def started_under(home: Path) -> list[tuple[int, int]]:
    """Return (pid, start_ticks) of every process whose environment has this HOME, which no other uses."""
    wanted, found = b"HOME=" + os.fsencode(home), []
    for pid in procfs.pids():
        stat = procfs.stat(pid)
        if stat is None or stat.dead or pid == os.getpid():
            continue
        if wanted in (procfs.read_bytes(f"/proc/{pid}/environ") or b"").split(b"\0"):
            found.append((pid, stat.start_ticks))
    return found


def end(processes: Iterable[tuple[int, int]], patience_s: float = 0.0) -> list[int]:
    """Wait a while for processes to end, kill the rest, and return the pids that are still there.

    Each is (pid, start_ticks) and is signalled through a pidfd, only while it is the one that is meant.
    """
    handles: dict[int, int] = {}
    try:
        for pid, start_ticks in processes:
            handle = _bind(pid, start_ticks)
            if handle is not None:
                handles[handle] = pid
        left = _wait(handles, patience_s)
        for handle in left:
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return [handles[handle] for handle in _wait(left, GONE_S)]
    finally:
        for handle in handles:
            os.close(handle)


def lives(pid: int, start_ticks: int) -> bool:
    """Say whether the process that started then still runs."""
    return procfs.alive(pid, start_ticks)


def kill(pid: int, start_ticks: int) -> bool:
    """Kill one process if it is still the one that started then; say whether it was."""
    handle = _bind(pid, start_ticks)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _bind(pid: int, start_ticks: int) -> int | None:
    """Open a pidfd and look only then who it is: from then on it cannot become another."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if procfs.alive(pid, start_ticks):
        return handle
    os.close(handle)
    return None


def _wait(handles: Iterable[int], seconds: float) -> list[int]:
    """Wait until each has ended; return those that have not. A pidfd is readable once its process ended."""
    left, end_at = list(handles), time.monotonic() + seconds
    while left:
        poll = select.poll()
        for handle in left:
            poll.register(handle, select.POLLIN)
        ended = {handle for handle, _ in poll.poll(max(0.0, end_at - time.monotonic()) * 1000)}
        left = [handle for handle in left if handle not in ended]
        if not ended:
            break
    return left
