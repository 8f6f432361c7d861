"""While a GPU is reset nobody may have the driver open: ours let go of it for as long as a lock is held.

The lock goes with the last process that has it open, so it outlives a reset that is killed while its nvidia-smi works,
and nothing has to be cleaned up after either. Other users' agents do not see it; they stand among those who hold the
GPU, and are named.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import Iterator

from backend.agent.paths import state_dir

WHY = "a GPU of this host is being reset: the driver is left alone until that is over"
LOOK_EVERY_S = 0.5


def _path() -> str:
    return os.path.join(state_dir(), "driver.hold")


@contextmanager
def hold() -> Iterator[int]:
    """Have every process of ours let go of the driver. Yields the open file: whoever inherits it holds on too."""
    fd = os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # a look at it lasts microseconds
        yield fd
    finally:
        os.close(fd)


def held() -> bool:
    """Say whether the driver must be left alone. Takes some microseconds."""
    try:
        fd = os.open(_path(), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
