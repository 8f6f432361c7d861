"""A filesystem that never answers: whoever asks it for a file waits in the kernel, and a kill does not end the wait."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

INIT_REPLY = struct.Struct("<IIIIHHIIHHI7I")
HEADER = struct.Struct("<IIQQIIII")
DETACH = 2


class DeadFilesystem:
    """FUSE whose server answers INIT and nothing else. Skips the test where it may not be mounted."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            pytest.skip("needs root and /dev/fuse to mount a filesystem that never answers")
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"eightzeros-test", os.fsencode(folder), b"fuse", 0, options):
            os.close(self._fd)
            pytest.skip(f"needs to mount FUSE: {os.strerror(ctypes.get_errno())}")
        unique = HEADER.unpack_from(os.read(self._fd, 1 << 18))[2]
        reply = INIT_REPLY.pack(7, 31, 4096, 0, 12, 9, 4096, 1, 0, 0, 0, *[0] * 7)
        os.write(self._fd, struct.pack("<IiQ", 16 + len(reply), 0, unique) + reply)

    def take(self) -> None:
        """Wait for the next request and read it: from then on a kill does not end its wait."""
        os.read(self._fd, 1 << 18)

    def close(self) -> None:
        """Take the server away, which ends every wait, and the filesystem."""
        os.close(self._fd)
        self._libc.umount2(os.fsencode(self.folder), DETACH)
