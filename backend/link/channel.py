"""A program on a host, as lines in both directions: over SSH or on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from backend.link.trouble import Trouble
from backend.wire import MAX_LINE_BYTES, printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STDERR_KEPT_BYTES = 4096
LEAVE_S = 2.0
"""How long the agent has to leave by itself after its input ended, before it is told to."""

KILL_S = 0.5


class Lines:
    """Cut a stream of bytes into lines. A line over MAX_LINE_BYTES is dropped whole and counted, never
    torn."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        self.dropped = 0
        self._read, self._buffer, self._dropping, self._looked = read, bytearray(), False, 0

    async def next(self) -> bytes | None:
        """Return the next line without its end, or None at the end of the stream; a torn last line is
        none."""
        while True:
            end = self._buffer.find(b"\n", self._looked)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._looked = 0
                if self._dropping or len(line) >= MAX_LINE_BYTES:
                    self._dropping, self.dropped = False, self.dropped + 1
                    continue
                return line
            self._looked = len(self._buffer)
            if self._looked >= MAX_LINE_BYTES:
                self._buffer.clear()
                self._dropping, self._looked = True, 0
            piece = await self._read()
            if not piece:
                return None
            self._buffer += piece


class Channel:
    """One running program. Raises Trouble or OSError where the connection ended."""

    def __init__(self) -> None:
        self.lines = Lines(self.read)
        self.said = bytearray()  # the end of its standard error

    async def read(self) -> bytes:
        """Return what has come, at least a byte, or nothing at the end."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Queue bytes for the program's standard input."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Wait until there is room for more."""
        raise NotImplementedError

    async def exit_status(self) -> int | None:
        """Wait for the program's end and return its exit status, None where that is unknown."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the program: its input ends, then it is told to, then it is killed. Never raises."""
        raise NotImplementedError

    def hear(self, piece: bytes) -> None:
        """Keep the end of what the program says on standard error."""
        self.said += piece
        del self.said[:-STDERR_KEPT_BYTES]

    def last_words(self, lines: int = 3) -> str:
        """Return the last lines of standard error, safe to show."""
        said = [printable(line, 400) for line in self.said.decode("utf-8", "replace").splitlines()]
        return "; ".join([line for line in said if line][-lines:])


class LocalChannel(Channel):
    """A program on this machine, in a session of its own: the terminal's Ctrl-C is not for it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process
        self._stderr = asyncio.create_task(self._hear())

    @classmethod
    async def open(cls, command: str) -> LocalChannel:
        """Start /bin/sh with a command."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise Trouble("unreachable", f"/bin/sh did not start: {error}") from None
        return cls(process)

    async def read(self) -> bytes:
        """Return what has come."""
        assert self._process.stdout
        return await self._process.stdout.read(1 << 16)

    def write(self, data: bytes) -> None:
        """Queue bytes."""
        assert self._process.stdin
        self._process.stdin.write(data)

    async def drain(self) -> None:
        """Wait for room. Raises ConnectionError where the program is gone."""
        assert self._process.stdin
        await self._process.stdin.drain()

    async def exit_status(self) -> int | None:
        """Wait for the end."""
        return await self._process.wait()

    async def _hear(self) -> None:
        assert self._process.stderr
        while piece := await self._process.stderr.read(1024):
            self.hear(piece)

    async def close(self) -> None:
        """End the program and wait until it is gone."""
        process = self._process
        assert process.stdin
        process.stdin.close()
        for kill, patience_s in ((signal.SIGTERM, LEAVE_S), (signal.SIGKILL, KILL_S)):
            try:
                await asyncio.wait_for(process.wait(), patience_s)
                break
            except TimeoutError:
                try:
                    os.killpg(process.pid, kill)
                except ProcessLookupError:
                    break
        self._stderr.cancel()
        await asyncio.gather(self._stderr, return_exceptions=True)
        await process.wait()
        # A child that it left behind may hold its output open; the transport is closed for us only at their
        # end.
        process._transport.close()  # type: ignore[attr-defined]
