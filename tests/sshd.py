"""A real OpenSSH server on a loopback port, with keys, configuration and a HOME of its own.

OpenSSH takes the home from the password file; `SetEnv HOME=` in sshd_config reaches the session after that,
so bash sources the .bashrc of `home` and nothing touches the operator's.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SSHD = "/usr/sbin/sshd"
needs_sshd = [
    pytest.mark.openssh,
    pytest.mark.skipif(
        not (os.path.exists(SSHD) and shutil.which("ssh")), reason="OpenSSH's server is not installed here"
    ),
]


def free_port() -> int:
    """Return a loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> str:
    """Make a key pair and return the public half as known_hosts would hold it."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def ssh_keygen(*words: str) -> str:
    """Run ssh-keygen on existing files and return what it prints."""
    return subprocess.run(["ssh-keygen", *words], check=True, capture_output=True, text=True).stdout


class Sshd:
    """One server. Its sessions see `home` as HOME, and `environment`; `user_key` is the key that it accepts."""

    def __init__(
        self, folder: Path, extra: str = "", bashrc: bytes = b"", environment: dict[str, str] | None = None
    ) -> None:
        self.folder, self.home, self.port = folder, folder / "home", free_port()
        self.user_key = folder / "user"
        self.home.mkdir()
        (self.home / ".bashrc").write_bytes(bashrc)
        self.host_public = keygen(folder / "host")
        keygen(self.user_key)
        (folder / "authorized_keys").write_text(self.user_key.with_suffix(".pub").read_text())
        self.log_path = folder / "sshd.log"
        variables = " ".join(f"{name}={value}" for name, value in (environment or {}).items())
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"PrintMotd no\nPrintLastLog no\nSetEnv HOME={self.home} {variables}\n{extra}\n"
        )
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        self._start()

    def _start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: self.process.poll() is None and "listening on" in self.log_path.read_text())

    def restart(self, extra: str) -> None:
        """Start again with more lines of configuration."""
        self.stop()
        with (self.folder / "sshd_config").open("a") as file:
            file.write(f"{extra}\n")
        self.log_path.unlink()
        self._start()

    def known_hosts_line(self, key: str | None = None) -> str:
        """Return the line that makes this server known, or known under another key."""
        return f"[127.0.0.1]:{self.port} {key or self.host_public}\n"

    def config(self, alias: str, extra: str = "") -> str:
        """Return a block of ~/.ssh/config for this server."""
        return (
            f"Host {alias}\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {self.user_key}\n"
            f"  IdentitiesOnly yes\n{extra}\n"
        )

    def descendants(self) -> list[int]:
        """List the processes below the server: its connections and what runs in them."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
        found: list[int] = []
        queue = [self.process.pid]
        while queue:
            below = parents.get(queue.pop(), [])
            found += below
            queue += below
        return found

    def connections(self) -> list[int]:
        """List the sshd processes of connections, the oldest first."""
        return sorted(pid for pid in self.descendants() if _name(pid) == "sshd")

    def signal_connections(self, number: signal.Signals) -> None:
        """Send a signal to every connection's sshd."""
        for pid in self.connections():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def stop(self) -> None:
        """End the server and everything below it."""
        below = self.descendants()
        for pid in [self.process.pid, *below]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)


def configure(home: Path, text: str, *known: str) -> None:
    """Write the operator's ~/.ssh."""
    folder = home / ".ssh"
    folder.mkdir(exist_ok=True)
    (folder / "config").write_text(text)
    (folder / "known_hosts").write_text("".join(known))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sshd]]:
    """Start servers; each takes lines for its sshd_config, a .bashrc and variables, and is gone after the test."""
    servers: list[Sshd] = []

    def start(extra: str = "", bashrc: bytes = b"", environment: dict[str, str] | None = None) -> Sshd:
        servers.append(Sshd(tmp_path_factory.mktemp("sshd"), extra, bashrc, environment))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
