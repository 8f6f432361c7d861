"""A real SSH server on loopback: a host key, a client key, and commands run by a real shell.

It behaves as OpenSSH's does for commands without a terminal: a command that runs on after its connection is
gone is left running and only finds its pipes closed. It needs no root, no account and no sshd.
"""

from __future__ import annotations

import asyncio
import os
import signal
import site
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh

if TYPE_CHECKING:
    from collections.abc import Coroutine

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 1 << 16
START_S = 20.0
LEFT_ALONE = ("LANG", "LC_ALL", "PATH", "TMPDIR", "TZ")
"""What a session's environment takes over from ours; everything else starts anew, as after a login."""


@dataclass(frozen=True)
class Keys:
    """The files of a server's folder: private keys, and the known_hosts line that names its port."""

    host: Path
    client: Path
    known_hosts: Path


class SshServer:
    """One server with one authorised key, in a thread and an event loop of its own. Close it after use."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.keys = Keys(folder / "host_key", folder / "client_key", folder / "known_hosts")
        self.user = "operator"
        self.port = 0
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="virtual-sshd", daemon=True)
        self._server: asyncssh.SSHAcceptor | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._connections: set[asyncssh.SSHServerConnection] = set()

    def __enter__(self) -> SshServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Make fresh keys, listen on a free port of loopback and write known_hosts for it."""
        folder = self.keys.host.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        host_key, client_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        for path, key in ((self.keys.host, host_key), (self.keys.client, client_key)):
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(key.export_private_key())
        self._thread.start()
        self._call(self._listen(host_key, client_key))
        public = host_key.export_public_key().decode().strip()
        self.keys.known_hosts.write_text(f"[{LOOPBACK}]:{self.port} {public}\n")

    def close(self) -> None:
        """Stop listening, drop every connection and end the thread. Commands find their stdin closed."""
        if self._thread.is_alive():
            self._call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def drop_connections(self) -> None:
        """Cut every connection without a goodbye, as a network does; the server goes on listening."""

        async def drop() -> None:
            for connection in list(self._connections):
                connection.abort()

        self._call(drop())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _listen(self, host_key: asyncssh.SSHKey, client_key: asyncssh.SSHKey) -> None:
        self._server = await asyncssh.listen(
            LOOPBACK,
            0,
            server_factory=lambda: _Gate(self._connections),
            server_host_keys=[host_key],
            authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
            process_factory=self._accept,
            encoding=None,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
        )
        self.port = self._server.get_port()

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._sessions):
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    def _accept(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        task = self._loop.create_task(_serve(process, self._home, self.user))
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)


class _Gate(asyncssh.SSHServer):
    """Public keys only, and a list of who is connected."""

    def __init__(self, connections: set[asyncssh.SSHServerConnection]) -> None:
        self._connections = connections
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connections.discard(self._connection)

    def password_auth_supported(self) -> bool:
        return False

    def kbdint_auth_supported(self) -> bool:
        return False


def environment(home: Path, user: str) -> dict[str, str]:
    """Return what a command of the virtual host finds: its own HOME, and our Python's packages."""
    kept = {name: os.environ[name] for name in LEFT_ALONE if name in os.environ}
    here = str(Path(sys.executable).parent)
    kept["PATH"] = os.pathsep.join(filter(None, [here, kept.get("PATH", os.defpath)]))
    own = {"HOME": str(home), "USER": user, "LOGNAME": user, "SHELL": "/bin/sh"}
    return {**kept, **own, "PYTHONUSERBASE": site.getuserbase()}


def _spawn(command: str, home: Path, user: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=home, env=environment(home, user), start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def _serve(process: asyncssh.SSHServerProcess[bytes], home: Path, user: str) -> None:
    if process.command is None:
        process.stderr.write(b"this host only runs commands\n")
        process.exit(1)
        return
    child = _spawn(process.command, home, user)
    feeding = asyncio.ensure_future(_feed(process.stdin, child.stdin))
    draining = [
        asyncio.ensure_future(_drain(child.stdout, process.stdout)),
        asyncio.ensure_future(_drain(child.stderr, process.stderr)),
    ]
    try:
        await asyncio.gather(*draining)
        status = await _ended(child)
        if status < 0:
            process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
        else:
            process.exit(status)
    finally:
        for task in (feeding, *draining):
            task.cancel()
        await asyncio.gather(feeding, *draining, return_exceptions=True)
        if child.poll() is None:
            threading.Thread(target=child.wait, name=f"reap-{child.pid}", daemon=True).start()


async def _feed(source: asyncssh.SSHReader[bytes], pipe: Any) -> None:
    """Give a command what the client sends, and the end of it when the client is gone."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(lambda: _Paused(loop), pipe)
    try:
        while data := await source.read(CHUNK_BYTES):
            transport.write(data)
            await protocol.room()
    except (asyncssh.Error, BrokenPipeError, ConnectionError):
        pass
    finally:
        transport.close()


async def _drain(pipe: Any, sink: asyncssh.SSHWriter[bytes]) -> None:
    """Send what a command writes; when nobody listens any more, close its pipe."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while data := await reader.read(CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
    except (asyncssh.Error, BrokenPipeError, ConnectionError):
        pass
    finally:
        transport.close()


class _Paused(asyncio.BaseProtocol):
    """Waits while a pipe is full."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = asyncio.Event()
        self._free.set()

    def pause_writing(self) -> None:
        self._free.clear()

    def resume_writing(self) -> None:
        self._free.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._free.set()

    async def room(self) -> None:
        await self._free.wait()


async def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command without a thread: a pidfd is readable once the process has ended."""
    pidfd, ended = os.pidfd_open(child.pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return child.wait()
