"""Opening SSH connections, each with everything said explicitly, and the channel on them."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncssh

from backend.link import hostkeys
from backend.link.channel import KILL_S, LEAVE_S, Channel
from backend.link.trouble import Trouble
from backend.wire import printable

if TYPE_CHECKING:
    from pathlib import Path

    from backend.link.handshakes import Connection
    from backend.link.settings import Settings
    from backend.link.status import HostKey

FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
CIPHERS = "^aes128-gcm@openssh.com"
"""Preferred, the others stay: one call a packet where chacha20 takes three. 64 hosts at 1 Hz with 3 KB a line took
4.1 and 4.4 % of a core with it, 4.7 and 4.9 % without, in turns on one machine."""

CONNECT_S = 10.0
LOGIN_S = 20.0
KEEPALIVE_S = 5
KEEPALIVES = 2
"""Noticed after (KEEPALIVES + 1) x KEEPALIVE_S = 15 s, measured; asyncssh's default is never (facts:
transport, 1.2)."""


@dataclass
class Identities:
    """The keys to offer, and the files that hold one which needs a passphrase."""

    keys: list[Any] = field(default_factory=list)
    encrypted: list[str] = field(default_factory=list)
    agent: asyncssh.SSHAgentClient | None = None


class _Client(asyncssh.SSHClient):
    """Decides on host keys and hands out client keys, so that asyncssh looks nowhere by itself."""

    def __init__(self, settings: Settings, known: hostkeys.KnownKeys, identities: Identities) -> None:
        self._settings, self._known = settings, known
        self._keys = list(identities.keys)
        self.offered: HostKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Trust a known key; take note of any other."""
        verdict = self._known.verdict(key)
        if verdict != "trusted":
            self.offered = hostkeys.offered(self._settings, key, verdict)
        return verdict == "trusted"

    def public_key_auth_requested(self) -> Any:
        """Return all keys once."""
        keys, self._keys = self._keys, []
        return keys or None


async def connect(settings: Settings, ours: Path, tunnel: asyncssh.SSHClientConnection | None) -> Any:
    """Open one connection, through `tunnel` where one is given. Raises Trouble."""
    known = hostkeys.known_keys(settings, ours)
    identities = await _identities(settings)
    client = _Client(settings, known, identities)
    try:
        async with asyncio.timeout(CONNECT_S + LOGIN_S):
            return await asyncssh.connect(
                settings.hostname, settings.port, username=settings.user, config=None,
                known_hosts=([], known.authorities, known.revoked if known.authorities else []),
                server_host_key_algs=known.algorithms(), client_factory=lambda: client,
                host_key_alias=settings.host_key_alias or None, x509_trusted_certs=None,
                client_keys=None, agent_path=None, preferred_auth=["publickey"], gss_host=None, password=None,
                encryption_algs=CIPHERS,
                agent_forwarding=False, family=FAMILIES.get(settings.family, socket.AF_UNSPEC),
                connect_timeout=CONNECT_S, login_timeout=LOGIN_S,
                keepalive_interval=KEEPALIVE_S, keepalive_count_max=KEEPALIVES, utf8_decode_errors="replace",
                **({"tunnel": tunnel} if tunnel is not None else {}), **_proxy(settings),
            )  # fmt: skip
    except (asyncssh.Error, OSError, ValueError) as error:
        raise _explain(error, settings, client.offered, identities, tunnel is not None) from None
    finally:
        if identities.agent is not None:
            identities.agent.close()


def _proxy(settings: Settings) -> dict[str, list[str]]:
    command = settings.proxy_command
    return {"proxy_command": ["/bin/sh", "-c", f"exec {command}"]} if command else {}


async def _identities(settings: Settings) -> Identities:
    """Load the identity files and what the agent holds, in OpenSSH's order: configured keys of the agent
    first."""
    result = Identities()
    publics: list[bytes] = []
    from_files: list[Any] = []
    for path in settings.identity_files:
        publics += _public(path)
        if not os.path.isfile(path):
            continue
        try:
            certificates = [name for name in settings.certificate_files if os.path.isfile(name)]
            from_files += asyncssh.load_keypairs([path], certlist=certificates)
        except (asyncssh.KeyEncryptionError, asyncssh.KeyImportError, OSError, ValueError) as error:
            if "assphrase" in str(error):
                result.encrypted.append(path)
    where = settings.identity_agent
    if where is None:
        where = os.environ.get("SSH_AUTH_SOCK", "")
    held: list[Any] = []
    if where:
        try:
            result.agent = await asyncssh.connect_agent(where)
            held = list(await result.agent.get_keys())
        except (OSError, ValueError, asyncssh.Error):
            held = []  # a stale socket: the files remain
    named = [key for key in held if key.public_data in publics]
    others = [] if settings.identities_only else [key for key in held if key.public_data not in publics]
    result.keys = [*named, *others, *from_files]
    return result


def _public(path: str) -> list[bytes]:
    """Return the public half beside a key file, or the file itself where it is one: the agent holds the other
    half."""
    for candidate in (path + ".pub", path):
        try:
            return [asyncssh.read_public_key(candidate).public_data]
        except (OSError, ValueError, asyncssh.Error):
            continue
    return []


def _explain(
    error: Exception, settings: Settings, offered: HostKey | None, identities: Identities, tunnelled: bool
) -> Trouble:
    """Turn what asyncssh or the kernel said into words for the operator."""
    where = str(settings)
    said = printable(str(error), 300)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        if offered:
            return hostkeys.refusal(offered)
        return Trouble("host-key", f"the host key of {where} is not trusted: {said}", refused=True)
    if isinstance(error, asyncssh.PermissionDenied):
        hint = _auth_hint(settings, identities)
        return Trouble("auth", f"{where} accepts none of our keys: {said}", hint, refused=True)
    if isinstance(error, socket.gaierror):
        return Trouble("unknown-host", f"the name {settings.hostname} cannot be resolved: {said}")
    if isinstance(error, TimeoutError):
        return Trouble("timeout", f"{where} did not answer within {CONNECT_S:.0f} s")
    if isinstance(error, ConnectionRefusedError):
        hint = "does sshd run there, and on this port?"
        return Trouble("unreachable", f"{where} refused the connection", hint)
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return Trouble("handshake", f"no common ground with {where}: {said}", refused=True)
    if isinstance(error, asyncssh.ChannelOpenError) and tunnelled:
        return Trouble("unreachable", f"the jump host could not reach {where}: {said}")
    return Trouble("unreachable", f"{where}: {said or type(error).__name__}")


def _auth_hint(settings: Settings, identities: Identities) -> str:
    if identities.encrypted:
        path = identities.encrypted[0]
        return f"the key {path} needs a passphrase and no agent holds it: run `ssh-add {path}`, then retry"
    if not identities.keys:
        return "no key was found: ssh-add one, or set identity_file; passwords are not asked for here"
    return f"try `ssh {settings.alias}`; passwords are not asked for here"


class SshChannel(Channel):
    """A program on the host, on the one session channel of its connection."""

    def __init__(self, connection: Connection, process: asyncssh.SSHClientProcess[bytes]) -> None:
        super().__init__()
        self._connection, self._process = connection, process
        self._stderr = asyncio.create_task(self._hear())

    @classmethod
    async def open(cls, connection: Connection, command: str) -> SshChannel:
        """Start a command. Closes the connection and raises Trouble where the host refuses the session."""
        try:
            async with asyncio.timeout(LOGIN_S):
                process = await connection.ssh.create_process(command, encoding=None, stderr=asyncssh.PIPE)
        except BaseException as error:
            await connection.close()
            if isinstance(error, asyncssh.Error | OSError):
                said = printable(str(error), 300) or type(error).__name__
                raise Trouble("unreachable", f"the host opens no session: {said}") from None
            raise
        return cls(connection, process)

    async def read(self) -> bytes:
        """Return what has come. Raises Trouble where the connection was lost."""
        try:
            return await self._process.stdout.read(1 << 16)
        except (asyncssh.Error, OSError) as error:
            raise Trouble("ended", f"the connection was lost: {printable(str(error), 300)}") from None

    def write(self, data: bytes) -> None:
        """Queue bytes. Raises OSError where the channel is closed."""
        self._process.stdin.write(data)

    async def drain(self) -> None:
        """Wait for room. Raises Trouble where the connection was lost."""
        try:
            await self._process.stdin.drain()
        except (asyncssh.Error, OSError) as error:
            raise Trouble("ended", f"the connection was lost: {printable(str(error), 300)}") from None

    async def exit_status(self) -> int | None:
        """Wait for the end; None where the connection ended first or the host did not say."""
        await self._process.wait_closed()
        return self._process.exit_status

    async def _hear(self) -> None:
        try:
            while piece := await self._process.stderr.read(1024):
                self.hear(piece)
        except (asyncssh.Error, OSError):
            return

    async def close(self) -> None:
        """End the agent, then the connection; a connection that does not answer is given up."""
        try:
            if not self._connection.ssh.is_closed():
                await self._end()
        finally:
            self._stderr.cancel()
            await asyncio.gather(self._stderr, return_exceptions=True)
            await self._connection.close()

    async def _end(self) -> None:
        process = self._process
        steps = (process.stdin.write_eof, LEAVE_S), (process.terminate, KILL_S), (process.kill, KILL_S)
        for step, patience_s in steps:
            try:
                step()
                await asyncio.wait_for(process.wait_closed(), patience_s)
                return
            except TimeoutError:
                continue
            except (asyncssh.Error, OSError):
                return
