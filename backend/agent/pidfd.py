"""A process held by a pidfd: a handle that never means another process, whatever happens to its pid.

Python has calls for it from 3.9; the agent also runs on 3.8, so the system calls are made by number there. A
pid and its start tick are no identity: 178 of 200 forced reuses of a pid got the same tick (facts: reset,
section 3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time
from typing import Iterable, List, NamedTuple, Optional

from backend.agent import procfs
from backend.wire import printable

NR_PIDFD_SEND_SIGNAL = 424
NR_PIDFD_OPEN = 434
"""The same numbers on every architecture: both came after the kernel's tables were unified."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int) -> int:
    words = [ctypes.c_long(word) for word in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def pidfd_open(pid: int) -> int:
    """Open a handle on a process; the file closes on exec. Raises ProcessLookupError where it is gone."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)  # type: ignore[no-any-return,unused-ignore]
    return _call(NR_PIDFD_OPEN, pid, 0)  # the kernel sets close-on-exec itself


def pidfd_send(fd: int, number: int) -> None:
    """Send a signal through the handle. Raises OSError (ESRCH: reaped, EPERM: another user's)."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(fd, number)
    else:
        _call(NR_PIDFD_SEND_SIGNAL, fd, number, 0, 0)


class Identity(NamedTuple):
    """What binds a process: all of it must agree. `exe` is safe to show, and empty where it may not be
    read."""

    pid: int
    start_ticks: int
    uid: int
    exe: str
    inode: int


def same(planned: Identity, found: Identity) -> bool:
    """Say whether two identities are of one process that runs the same program as the same user."""
    return found == (planned if planned.inode else planned._replace(inode=found.inode))


def identify(pid: int) -> Optional[Identity]:
    """Read a process's identity, or None where it is gone."""
    bound = Bound.open(pid)
    if bound is None:
        return None
    with bound:
        return bound.identity


class Bound:
    """A process bound by its pidfd. Its identity was read while the handle was open and the process was
    there."""

    def __init__(self, fd: int, identity: Identity) -> None:
        self.fd, self.identity = fd, identity
        self.pid = identity.pid

    @classmethod
    def open(cls, pid: int) -> Optional["Bound"]:
        """Bind a process, or return None where it is gone or dead. Raises OSError where the kernel has no
        pidfd.

        The identity is read after the handle was opened, and the handle says afterwards that the process
        still lives: so what was read cannot be of a later process under the same pid.
        """
        try:
            fd = pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL):  # EINVAL: the pid is a thread's, not a process's
                return None
            raise
        stat, uid, exe = procfs.stat(pid), procfs.uid(pid), printable(procfs.exe(pid))
        if stat is None or uid is None or _readable([fd], 0.0):
            os.close(fd)
            return None
        return cls(fd, Identity(pid, stat.start_ticks, uid, exe, os.fstat(fd).st_ino))

    def send(self, number: int) -> int:
        """Send a signal and return its errno, 0 where it was sent."""
        try:
            pidfd_send(self.fd, number)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def gone(self) -> bool:
        """Say whether the whole thread group is dead: a zombie is, a zombie leader with a live thread is
        not."""
        return bool(_readable([self.fd], 0.0))

    def close(self) -> None:
        """Give the handle back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "Bound":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to the process that started at `start_ticks`, through a handle. Returns whether it was
    sent."""
    bound = Bound.open(pid)
    if bound is None:
        return False
    with bound:
        return bound.identity.start_ticks == start_ticks and bound.send(number) == 0


def _readable(fds: List[int], timeout_s: float) -> List[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0, int(timeout_s * 1000)))]


def wait(bound: Iterable[Bound], deadline: float) -> List[Bound]:
    """Wait until all are dead or the monotonic `deadline` is past. Returns those that still live."""
    living = [one for one in bound if not one.gone()]
    while living:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        _readable([one.fd for one in living], min(left + 0.001, 1.0))
        living = [one for one in living if not one.gone()]
    return living
