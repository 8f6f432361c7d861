"""A file that is read in few, positioned pieces, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from typing import Iterator, Tuple

from backend.wire import Refused

HEAD_BYTES = 16 * 1024
"""The first read and the last: a hidden-state shard's description lies in them (facts: shards, section 3)."""


class Source:
    """An open regular file. Its bytes come by pread: a file that is cut meanwhile is a SIGBUS under mmap."""

    def __init__(self, path: str) -> None:
        """Open it. Raises Refused where it is absent, forbidden, or no regular file (a FIFO would wait)."""
        self.path = path
        self.read_bytes = 0
        self._refuse(_stat(path))
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise refusal(path, error) from None
        found = os.fstat(self._fd)
        try:
            self._refuse(found)
            self.size_bytes, self.modified_at = found.st_size, found.st_mtime
            self.allocated_bytes = found.st_blocks * 512
            self._tail_at, self._tail = self.size_bytes, b""
            self.head = b""
            self.head = self.read(0, HEAD_BYTES)
        except BaseException:
            self.close()
            raise

    def _refuse(self, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise Refused("is-folder", "%s is a folder" % self.path, "list it instead")
        if not stat.S_ISREG(found.st_mode):
            raise Refused("not-a-file", "%s is %s, not a file" % (self.path, kind_of(found.st_mode)))

    def read(self, at: int, size: int) -> bytes:
        """Return the bytes at an offset: fewer where the file ends. Raises Refused where the disk fails."""
        if at + size <= len(self.head):
            return self.head[at : at + size]
        if at >= self._tail_at:
            return self._tail[at - self._tail_at : at - self._tail_at + size]
        parts = []
        try:
            while size > 0:
                part = os.pread(self._fd, size, at)
                if not part:
                    break
                parts.append(part)
                at, size = at + len(part), size - len(part)
        except OSError as error:
            raise refusal(self.path, error) from None
        data = b"".join(parts)
        self.read_bytes += len(data)
        return data

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset and return how much: less where the file ends.

        Page-aligned buffers are several times faster where the kernel copies by string instructions.
        """
        filled = 0
        try:
            while filled < len(buffer):
                size = os.preadv(self._fd, [buffer[filled:]], at + filled)
                if not size:
                    break
                filled += size
        except OSError as error:
            raise refusal(self.path, error) from None
        self.read_bytes += filled
        return filled

    def tail(self) -> Tuple[int, bytes]:
        """Return the last bytes of the file, and where they begin."""
        if not self._tail:
            begin = max(0, self.size_bytes - HEAD_BYTES)
            self._tail = self.read(begin, self.size_bytes - begin)
            self._tail_at = begin
        return self._tail_at, self._tail

    def holes(self, begin: int, end: int) -> Iterator[Tuple[int, int]]:
        """Yield the (begin, end) of each hole: what was never written, or only reserved, and reads as zeros.

        A filesystem that does not tell has none.
        """
        try:
            while begin < end:
                begin = os.lseek(self._fd, begin, os.SEEK_HOLE)
                if begin >= end:
                    return
                after = self._data_after(begin, end)
                yield begin, after
                begin = after
        except OSError:
            return

    def _data_after(self, at: int, end: int) -> int:
        try:
            return min(end, os.lseek(self._fd, at, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return end

    def changed(self) -> bool:
        """Say whether the file was written to since it was opened."""
        found = os.fstat(self._fd)
        return (found.st_size, found.st_mtime) != (self.size_bytes, self.modified_at)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:
        raise refusal(path, error) from None


def refusal(path: str, error: Exception) -> Refused:
    """Say why a path cannot be read."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOENT, errno.ENOTDIR) or isinstance(error, ValueError):
        if number is not None and os.path.islink(path):
            return Refused("not-found", "%s is a link to nothing" % path)
        return Refused("not-found", "%s does not exist" % path)
    if number in (errno.EACCES, errno.EPERM):
        return Refused("forbidden", "%s may not be read by this user" % path)
    if number == errno.ELOOP:
        return Refused("not-found", "%s is a link that leads to itself" % path)
    return Refused("unreadable", "%s cannot be read: %s" % (path, os.strerror(number) if number else error))


def kind_of(mode: int) -> str:
    """Name what a path is, other than a file or folder."""
    names = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"))
    for test, name in names:
        if test(mode):
            return name
    return "a device" if stat.S_ISBLK(mode) else "neither file nor folder"
