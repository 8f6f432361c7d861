"""The writer process as the server sees it: started with the first states, told of pieces, heard of files."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from . import writing

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSE_S = 5.0


class Writer:
    """One writer process and the memory it shares. `heard` takes each answer, `lost` that it ended unasked."""

    def __init__(
        self, about: dict[str, Any], slots: int, slot_bytes: int,
        heard: Callable[[tuple[Any, ...]], None], lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Take the memory. Raises OSError. The process starts with the first piece, and again where it was lost."""
        self._about = {**about, "slot_bytes": slot_bytes}
        self._heard, self._lost = heard, lost
        self._fd = os.memfd_create("eightzeros-slots", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, slots * slot_bytes)
        self.memory = mmap.mmap(self._fd, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, frame: tuple[Any, ...]) -> None:
        """Tell the process of a piece. Raises OSError where it cannot be started or ends meanwhile."""
        with self._lock:
            if self._connection is None:
                self._start()
            connection = self._connection
        assert connection is not None
        writing.send(connection, frame)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        told = {**self._about, "slots_fd": self._fd, "socket_fd": theirs.fileno()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(writing.__file__), json.dumps(told)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(self._fd, theirs.fileno()),
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._listener = threading.Thread(target=self._hear, args=[ours, self._process], daemon=True)
        self._listener.start()

    def _hear(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        try:
            for answer in writing.frames(connection):
                self._heard(answer)
        except OSError:
            pass  # a reset connection is an end like another
        if self._connection is connection:  # nobody closed it: it was lost
            # No other is started before this is settled, or what that one is told would be counted as lost too, and
            # its slot be given to a second piece. Meanwhile whoever sends meets a broken pipe.
            self._lost(f"the process that writes the states ended (status {process.wait()})")
            with self._lock:
                self._connection = None
        connection.close()

    def close(self) -> None:
        """Let the process finish what it was told, and end it."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is None or self._process is None or self._listener is None:
            return
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended already
        self._listener.join(CLOSE_S)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
