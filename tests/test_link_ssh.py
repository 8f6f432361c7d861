"""Links over a real OpenSSH server: what streams, what is refused, what comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.link import Handshakes, LinkState, pack_agent, retry, ssh
from backend.link import link as link_module
from backend.wire import MAX_LINE_BYTES
from tests.fakeagent import Operator, eventually, here
from tests.sshd import Sshd, configure, free_port, needs_sshd
from tests.sshd import sshd as sshd_fixture

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = needs_sshd
sshd = sshd_fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lost links try again soon."""
    monkeypatch.setattr(retry, "FIRST_S", 0.2)


def listening() -> set[str]:
    """Return the inodes of every listening TCP socket."""
    text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return {fields[9] for fields in map(str.split, text.splitlines()) if fields[3] == "0A"}


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


async def test_telemetry_streams_from_the_real_agent_over_one_session_without_a_listener(
    home: Path, sshd: Callable[..., Sshd]
) -> None:
    server = sshd("MaxSessions 1\nAllowTcpForwarding no\nAllowStreamLocalForwarding no")
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"), pack_agent())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        assert operator.link.status.settings_from == "ssh -G"
        await eventually(lambda: len(operator.said("telemetry")) >= 2)
        assert await operator.link.request("runs.list") == []
        ours = [pid for pid in server.descendants() if pid not in server.connections()]
        assert operator.agent_pid in ours
        assert not set().union(*(sockets(pid) for pid in ours)) & listening()
        assert list(server.home.glob(".cache/eightzeros/agent-*")), "unpacked in the host's own cache"
    await eventually(lambda: not server.descendants())


NOISE = rb"""
echo '{"t": "hello", "hello": {"nonce": "x", "protocol": 1}}'
echo 'ez00000000000000000000000000000000 HAVE'
printf '\377\376 not UTF-8 \303\n'
head -c 5000000 /dev/zero | tr '\0' 'x'
printf '{"t": "telemetry", "telemetry": '
echo 'to stderr' >&2
"""


async def test_a_start_up_file_that_prints_is_not_the_agent(home: Path, sshd: Callable[..., Sshd]) -> None:
    server = sshd(bashrc=NOISE)
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        assert [message["t"] for message in operator.messages] == ["hello"]
        assert operator.messages[0]["hello"]["home"] == str(server.home)
        assert await operator.link.request("echo", {"a": "x" * (MAX_LINE_BYTES - 100)})


async def test_unreachable_hosts_say_how_and_are_retried(home: Path) -> None:
    closed = free_port()
    block = f"Host closed\n HostName 127.0.0.1\n Port {closed}\n"
    configure(home, block + "Host lost\n HostName no-host.invalid\n")
    for address, code in (("closed", "unreachable"), ("lost", "unknown-host")):
        operator = Operator(here(address=address))
        async with operator.watching():
            status = await operator.reaches(LinkState.LOST)
            assert status.code == code
            assert status.retry_in_s is not None
            attempts = operator.states.count(LinkState.CONNECTING)
            await eventually(lambda o=operator, n=attempts: o.states.count(LinkState.CONNECTING) > n)


async def test_a_mute_server_times_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_S", 0.3)
    monkeypatch.setattr(ssh, "LOGIN_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        configure(home, f"Host mute\n HostName 127.0.0.1\n Port {mute.getsockname()[1]}\n")
        operator = Operator(here(address="mute"))
        async with operator.watching():
            status = await operator.reaches(LinkState.LOST)
            assert status.code == "timeout"


async def test_a_frozen_server_makes_the_host_stale_then_lost_and_it_comes_back(
    home: Path, sshd: Callable[..., Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "KEEPALIVE_S", 1)
    monkeypatch.setattr(link_module, "STALE_S", 1.6)
    server = sshd()
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"), pack_agent())
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        await eventually(lambda: operator.said("telemetry"))
        frozen = server.connections()
        server.signal_connections(signal.SIGSTOP)
        await operator.reaches(LinkState.STALE)
        await eventually(lambda: LinkState.LOST in operator.states)
        assert operator.states.index(LinkState.STALE) < operator.states.index(LinkState.LOST)
        await operator.reaches(LinkState.LIVE)
        assert set(server.connections()) - set(frozen)


async def test_a_killed_connection_reconnects(home: Path, sshd: Callable[..., Sshd]) -> None:
    server = sshd()
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        first = operator.agent_pid
        server.signal_connections(signal.SIGKILL)
        await eventually(lambda: LinkState.LOST in operator.states)
        await operator.reaches(LinkState.LIVE)
        assert operator.agent_pid != first
        await eventually(lambda: not Path(f"/proc/{first}").exists())


class Relay:
    """Carries connections to a server; `deaf` keeps the answers back, `cut` ends what is open."""

    def __init__(self, port: int) -> None:
        self._to, self.deaf, self._open = port, False, []  # type: ignore[var-annotated]

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._open, return_exceptions=True)

    def cut(self) -> None:
        for task in self._open:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open.append(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            there = self._carry(reader, there_writer, answers=False)
            await asyncio.gather(there, self._carry(there_reader, writer, answers=True))
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            for one in (writer, there_writer):
                one.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(65536):
            if not (answers and self.deaf):
                writer.write(data)
                await writer.drain()
        raise ConnectionError


@pytest.fixture
async def relay(sshd: Callable[..., Sshd], home: Path) -> AsyncIterator[Relay]:
    server = sshd()
    async with Relay(server.port) as relay:
        configure(
            home,
            server.config("gpu-1", "  HostKeyAlias real\n").replace(str(server.port), str(relay.port)),
            f"real {server.host_public}\n",
        )
        yield relay


async def test_a_change_whose_answer_was_cut_off_happens_once(relay: Relay, tmp_path: Path) -> None:
    operator = Operator(here(address="gpu-1"))
    effects = tmp_path / "effects"
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        args = {"path": str(effects), "id": "run-1"}
        relay.deaf = True
        asked = asyncio.create_task(operator.link.request_once("effect", args, find=("find", args)))
        await eventually(effects.exists)
        relay.deaf = False
        relay.cut()
        assert (await asked)["by"] == "find"
    assert effects.read_text().split() == ["run-1"]


async def test_hosts_behind_a_bastion_share_one_connection_to_it(home: Path, sshd: Callable[..., Sshd]) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.config("bastion") + "".join(
        server.config(f"gpu-{number}", "  ProxyJump bastion\n") for number in range(6)
    )
    configure(home, text, bastion.known_hosts_line(), server.known_hosts_line())
    handshakes = Handshakes()
    operators = [Operator(here(address=f"gpu-{number}"), handshakes=handshakes) for number in range(6)]
    tasks = [asyncio.create_task(operator.link.run()) for operator in operators]
    try:
        for operator in operators:
            await operator.reaches(LinkState.LIVE)
        assert bastion.log_path.read_text().count("Accepted publickey") == 1
        assert server.log_path.read_text().count("Accepted publickey") == 6
        bastion.signal_connections(signal.SIGKILL)
        for operator in operators:
            await eventually(lambda o=operator: LinkState.LOST in o.states)
        for operator in operators:
            await operator.reaches(LinkState.LIVE)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: not bastion.connections())
    await eventually(lambda: not server.connections())


async def test_a_proxy_command_carries_the_connection(home: Path, sshd: Callable[..., Sshd]) -> None:
    server = sshd()
    carry = home / "carry.py"
    carry.write_text(
        "import os, select, socket, sys\nto = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "while True:\n    for one in select.select([0, to], [], [])[0]:\n"
        "        data = os.read(0, 65536) if one == 0 else to.recv(65536)\n"
        "        if not data:\n            sys.exit()\n"
        "        to.sendall(data) if one == 0 else os.write(1, data)\n"
    )
    command = f"  ProxyCommand {sys.executable} {carry} %h %p\n"
    configure(home, server.config("gpu-1", command), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
    # The carrier ends with the connection; the loop must hear of that before it is closed.
    await eventually(lambda: not any("waitpid" in thread.name for thread in threading.enumerate()))


async def test_a_server_without_sessions_says_so(home: Path, sshd: Callable[..., Sshd]) -> None:
    server = sshd("MaxSessions 0")
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        status = await operator.reaches(LinkState.LOST)
        assert "opens no session" in status.reason
    await eventually(lambda: not server.connections())
