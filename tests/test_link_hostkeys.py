"""Keys of hosts and of operators, over a real OpenSSH server: who is let in, and who is not."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from backend.link import Handshakes, LinkState
from tests.fakeagent import Operator, eventually, here
from tests.sshd import Sshd, configure, keygen, needs_sshd, ssh_keygen
from tests.sshd import sshd as sshd_fixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = needs_sshd
sshd = sshd_fixture


async def test_an_unknown_key_is_shown_and_only_trust_lets_it_in(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd]
) -> None:
    server = sshd()
    configure(home, server.config("gpu-1", "  StrictHostKeyChecking no\n"))
    ours = tmp_path / "own" / "known_hosts"
    operator = Operator(here(address="gpu-1"), known_hosts=ours)
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        key = status.host_key
        assert status.code == "host-key"
        assert key is not None
        assert (key.host, key.port, key.verdict) == ("127.0.0.1", server.port, "unknown")
        assert key.fingerprint in ssh_keygen("-lf", f"{server.folder}/host.pub")
        assert key.fingerprint in status.reason
        with pytest.raises(ValueError, match="not one that can be accepted"):
            operator.link.trust(replace(key, fingerprint="SHA256:other"))
        operator.link.trust(key)
        await operator.reaches(LinkState.LIVE)
    assert ours.read_text() == server.known_hosts_line()
    assert ours.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("verdict", ["changed", "changed type", "revoked", "revoked by list", "revoked and known"])
async def test_a_changed_or_revoked_key_is_never_accepted(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd], verdict: str
) -> None:
    server = sshd()
    other = keygen(tmp_path / "other", "ecdsa" if verdict == "changed type" else "ed25519")
    revoked = "@revoked " + server.known_hosts_line()
    (tmp_path / "revoked-keys").write_text(server.host_public + "\n")
    known, extra = {
        "changed": (server.known_hosts_line(other), ""),
        "changed type": (server.known_hosts_line(other), ""),
        "revoked": (revoked, ""),
        "revoked and known": (server.known_hosts_line() + revoked, ""),
        "revoked by list": (server.known_hosts_line(), f"  RevokedHostKeys {tmp_path}/revoked-keys\n"),
    }[verdict]
    configure(home, server.config("gpu-1", extra), known)
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        key = status.host_key
        assert key is not None
        assert key.verdict == verdict.split()[0]
        assert key.fingerprint.startswith("SHA256:")
        with pytest.raises(ValueError, match="not one that can be accepted"):
            operator.link.trust(key)


@pytest.mark.parametrize("value", ["none", "/dev/null", "~/.ssh/absent"])
async def test_no_known_hosts_file_is_no_permission(home: Path, sshd: Callable[..., Sshd], value: str) -> None:
    server = sshd()
    text = server.config("gpu-1", f"  UserKnownHostsFile {value}\n  GlobalKnownHostsFile none\n")
    configure(home, text, server.known_hosts_line())
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert status.host_key is not None
        assert status.host_key.verdict == "unknown"


async def test_a_hashed_line_and_an_alias_are_found(home: Path, sshd: Callable[..., Sshd]) -> None:
    server = sshd()
    configure(home, server.config("gpu-1"), server.known_hosts_line())
    ssh_keygen("-q", "-H", "-f", f"{home}/.ssh/known_hosts")
    assert "|1|" in (home / ".ssh" / "known_hosts").read_text()
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
    configure(home, server.config("gpu-1", "  HostKeyAlias rack-7\n"), f"rack-? {server.host_public}\n")
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)


async def test_an_unknown_key_of_the_bastion_is_the_bastions(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd]
) -> None:
    bastion, server = sshd(), sshd()
    jump = "  ProxyJump bastion\n"
    text = server.config("gpu-1", jump) + server.config("gpu-2", jump) + bastion.config("bastion")
    configure(home, text, server.known_hosts_line())
    handshakes = Handshakes()
    one = Operator(here(address="gpu-1"), known_hosts=tmp_path / "own", handshakes=handshakes)
    two = Operator(here(address="gpu-2"), known_hosts=tmp_path / "own", handshakes=handshakes)
    async with one.watching(), two.watching():
        key = (await one.reaches(LinkState.REFUSED)).host_key
        await two.reaches(LinkState.REFUSED)
        assert key is not None
        assert key.port == bastion.port
        one.link.trust(key)
        await one.reaches(LinkState.LIVE)
        two.link.retry()
        await two.reaches(LinkState.LIVE)
    assert bastion.known_hosts_line() == (tmp_path / "own").read_text()


@pytest.mark.parametrize("case", ["authority", "plain key", "neither", "authority revoked", "key revoked"])
async def test_a_host_certificate_counts_where_its_authority_is_known(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd], case: str
) -> None:
    server = sshd()
    authority = keygen(tmp_path / "authority")
    public = f"{server.folder}/host.pub"
    ssh_keygen("-q", "-s", f"{tmp_path}/authority", "-h", "-I", "gpu", "-n", "rack-7", public)
    server.restart(f"HostCertificate {server.folder}/host-cert.pub")
    known = {
        "authority": f"@cert-authority rack-* {authority}\n",
        "plain key": f"rack-7 {server.host_public}\n",
        "neither": f"@cert-authority other {authority}\n",
        "authority revoked": f"@cert-authority rack-* {authority}\n@revoked * {authority}\n",
        "key revoked": f"@cert-authority rack-* {authority}\n@revoked * {server.host_public}\n",
    }[case]
    configure(home, server.config("gpu-1", "  HostKeyAlias rack-7\n"), known)
    operator = Operator(here(address="gpu-1"))
    async with operator.watching():
        if case in ("authority", "plain key"):
            await operator.reaches(LinkState.LIVE)
            return
        status = await operator.reaches(LinkState.REFUSED)
        assert status.code == "host-key"
        if case == "key revoked":
            assert "revoked" in status.reason
            assert status.host_key is None, "there is nothing to accept"
        else:
            assert status.host_key is not None
            assert status.host_key.verdict == "unknown"


async def test_a_refused_key_is_not_tried_again_by_itself(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd]
) -> None:
    server = sshd()
    keygen(tmp_path / "stranger")
    keygen(tmp_path / "locked", passphrase="secret")
    configure(home, "Host gpu-1\n  IdentitiesOnly yes\n", server.known_hosts_line())
    basis = {"address": "127.0.0.1", "port": server.port, "user": "root"}
    operator = Operator(here(**basis, identity_file=str(tmp_path / "stranger")))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert (status.code, status.retry_in_s) == ("auth", None)
        assert "Accepted" not in server.log_path.read_text()
    operator = Operator(here(**basis, identity_file=str(tmp_path / "locked")))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert f"ssh-add {tmp_path}/locked" in status.hint
    operator = Operator(here(**basis, identity_file=str(tmp_path / "absent")))
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert "absent: no such file" in status.reason
    operator = Operator(here(**basis, identity_file=str(server.user_key)))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)


def accepts(path: Path) -> bool:
    """Say whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


async def test_a_key_that_only_the_agent_holds_is_used(
    home: Path, tmp_path: Path, sshd: Callable[..., Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sshd()
    auth = tmp_path / "agent.sock"
    quiet = asyncio.subprocess.DEVNULL
    words = ["ssh-agent", "-D", "-a", str(auth)]
    agent = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
    try:
        await eventually(lambda: accepts(auth))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(auth))
        adding = await asyncio.create_subprocess_exec("ssh-add", "-q", str(server.user_key))
        assert await adding.wait() == 0
        server.user_key.unlink()
        configure(home, server.config("gpu-1"), server.known_hosts_line())
        operator = Operator(here(address="gpu-1"))
        async with operator.watching():
            await operator.reaches(LinkState.LIVE)
    finally:
        agent.terminate()
        await agent.wait()
