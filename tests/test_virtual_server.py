"""The loopback SSH server: real keys, a real shell, and commands that outlive their connection."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest

from backend.agent import procfs
from backend.virtual.server import SshServer
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(tmp_path / "ssh", tmp_path / "home") as started:
        yield started


def connect(server: SshServer, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "port": server.port,
        "username": server.user,
        "known_hosts": str(server.keys.known_hosts),
        "client_keys": [str(server.keys.client)],
        "config": [],
        **changes,
    }
    return asyncssh.connect("127.0.0.1", **options)


async def test_bytes_pass_unchanged_and_the_exit_code_comes_back(server: SshServer) -> None:
    data = os.urandom(300_000)
    async with connect(server) as connection:
        done = await connection.run("cat; echo complaint >&2; exit 7", input=data, encoding=None)
        killed = await connection.run("kill -9 $$", encoding=None)
    assert done.stdout == data
    assert done.stderr == b"complaint\n"
    assert done.exit_status == 7
    assert killed.exit_signal[0] == "KILL"


async def test_a_command_finds_the_home_of_the_virtual_host_and_our_python(server: SshServer, tmp_path: Path) -> None:
    async with connect(server) as connection:
        done = await connection.run("pwd; echo $HOME; command -v python3; env | grep -c ^XDG_")
    home = str(tmp_path / "home")
    assert done.stdout.split("\n")[:2] == [home, home]
    assert done.stdout.split("\n")[2].startswith(os.path.dirname(sys.executable))
    assert done.stdout.split("\n")[3] == "0"


async def test_another_key_is_refused_and_so_is_a_password(server: SshServer) -> None:
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    with pytest.raises(asyncssh.PermissionDenied):
        await connect(server, client_keys=[stranger], password="operator")


async def test_each_server_has_a_host_key_of_its_own(server: SshServer, tmp_path: Path) -> None:
    with SshServer(tmp_path / "other", tmp_path / "home2") as other:
        lines = other.keys.known_hosts.read_text().replace(str(other.port), str(server.port))
        (tmp_path / "wrong").write_text(lines)
        with pytest.raises(asyncssh.HostKeyNotVerifiable):
            await connect(server, known_hosts=str(tmp_path / "wrong"))
    assert (server.keys.client.stat().st_mode & 0o777) == 0o600


async def test_a_command_outlives_its_connection_and_finds_its_stdin_closed(server: SshServer, tmp_path: Path) -> None:
    pidfile, ended = tmp_path / "pid", tmp_path / "ended"
    script = f"echo $$ > {pidfile}.new; mv {pidfile}.new {pidfile}; cat > /dev/null; echo > {ended}; exec sleep 60"
    async with connect(server) as connection:
        await connection.create_process(script, encoding=None)
        await connection.run(f"while ! test -e {pidfile}; do sleep 0.02; done")
        assert not ended.exists()
        server.drop_connections()
    pid = int(pidfile.read_text())
    stat = procfs.stat(pid)
    assert stat is not None
    try:
        until(ended.exists)
        assert procfs.alive(pid, stat.start_ticks)
    finally:
        end(pid, stat.start_ticks)
    until(lambda: not procfs.alive(pid, stat.start_ticks))


def end(pid: int, start_ticks: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        if procfs.alive(pid, start_ticks):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


async def test_a_shell_or_a_file_transfer_is_not_offered(server: SshServer) -> None:
    async with connect(server) as connection:
        shell = await connection.run()
        assert shell.exit_status == 1
        assert "only runs commands" in shell.stderr
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.start_sftp_client()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed here")
def test_openssh_understands_it(server: SshServer) -> None:
    done = subprocess.run(
        ["ssh", "-F", "none", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={server.keys.known_hosts}",
         "-o", "IdentitiesOnly=yes", "-i", str(server.keys.client), "-p", str(server.port),
         f"{server.user}@127.0.0.1", "printf hello; exit 3"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (b"hello", 3)
