"""Writes that survive: short writes, passing errors of network disks, and a crash at any moment."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR)
"""Errors that NFS and Lustre give for a moment (facts: shards, section 5.3)."""

FULL = (errno.ENOSPC, errno.EDQUOT)
TRIES = 3
STEP_BYTES = 16 << 20


class DiskFull(Exception):
    """There is no room, or the quota is used up. Nothing half-written was left behind."""


def retried(action: Callable[[], T], pause_s: float = 0.2) -> T:
    """Do something with a file, again where the error may pass. Raises DiskFull for a full disk or quota."""
    for attempt in range(1, TRIES + 1):
        try:
            return action()
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(os.strerror(error.errno or 0)) from error
            if error.errno not in PASSING or attempt == TRIES:
                raise
        time.sleep(pause_s * attempt)
    raise AssertionError("unreachable")


def pwrite_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at an offset, in pieces; a full disk gives a short count before an error."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        piece, offset = view[done : done + STEP_BYTES], at + done
        written = retried(lambda piece=piece, offset=offset: os.pwrite(fd, piece, offset))  # type: ignore[misc]
        if written <= 0:
            raise DiskFull(f"a write of {piece.nbytes} bytes wrote none")
        done += written


def reserve(fd: int, size_bytes: int) -> None:
    """Ask for the room of the whole file, where the filesystem can: a full disk then says so at once."""
    try:
        retried(lambda: os.posix_fallocate(fd, 0, size_bytes))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def sync_folder(folder: str) -> None:
    """Make the renames in a folder durable; a filesystem that cannot sync a folder is left alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        retried(lambda: os.fsync(fd))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes, durable: bool = True) -> None:
    """Write a file so that a reader sees the old or the new one; `durable` also syncs it and its folder."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            pwrite_all(fd, data, 0)
            if durable:
                retried(lambda: os.fsync(fd))
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        discard(temporary)
        raise
    if durable:
        sync_folder(folder or ".")


def discard(path: str) -> None:
    """Remove a file, if it is there and can be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass
