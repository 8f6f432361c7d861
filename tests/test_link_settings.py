"""How a host is reached: against `ssh -G` as the oracle, and without ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.config import Host
from backend.link import Trouble, settings
from backend.link.settings import Wanted, chain, resolve, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

CASES = Path(__file__).parent / "cases"
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed here")


def use(home: Path, case: str) -> None:
    """Make a case the operator's ~/.ssh."""
    shutil.copytree(CASES / case, home / ".ssh")


def oracle(config: Path, host: str) -> dict[str, str]:
    """Ask ssh itself, with every relative Include written out by hand for it."""
    for path in [config, *config.parent.glob("conf.d/*")]:
        text = path.read_text().replace('"conf.d/', f'"{config.parent}/conf.d/')
        path.write_text(text.replace(" conf.d/", f" {config.parent}/conf.d/"))
    said = subprocess.run(["ssh", "-G", "-F", str(config), host], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in said.stdout.splitlines() if " " in line)


def names(hops: Iterable[Any]) -> list[str]:
    return [str(hop) for hop in hops]


@needs_ssh
@pytest.mark.parametrize("host", ["node-a", "node-b", "node-c", "node-d", "farm-7", "elsewhere"])
def test_includes_are_read_as_ssh_reads_them(home: Path, tmp_path: Path, host: str) -> None:
    import asyncio

    use(home, "ssh_include")
    got = asyncio.run(settings_of(Wanted(host)))
    shutil.copytree(CASES / "ssh_include", tmp_path / "copy")
    want = oracle(tmp_path / "copy" / "config", host)
    assert (got.hostname, str(got.port), got.user) == (want["hostname"], want["port"], want["user"])
    assert got.proxy_jump == want.get("proxyjump", "")
    assert got.source == "ssh -G"


@needs_ssh
@pytest.mark.parametrize(
    ("host", "hostname", "port", "user", "jump"),
    [
        ("node-a", "127.0.0.21", 2121, "after", "gate"),
        ("node-b", "127.0.0.22", 2222, "within", ""),
        ("node-c", "127.0.0.23", 2323, "late", ""),
        ("node-d", "node-d", 2323, "late", ""),
        ("farm-7", "farm-7", 22, "farmer", "gate"),
    ],
)
async def test_an_include_that_ends_inside_a_block_does_not_leak(
    home: Path, host: str, hostname: str, port: int, user: str, jump: str
) -> None:
    use(home, "ssh_include")
    got = await settings_of(Wanted(host))
    assert (got.hostname, got.port, got.user, got.proxy_jump) == (hostname, port, user, jump)


CHAINS = {
    "rig-1": ["boss@127.0.0.31:2201", "driver@127.0.0.32:22", "driver@rig-1.rack.example:2244"],
    "rig-2": ["porter@127.0.0.31:2299", "fallback@rig-2.rack.example:2244"],
    "x.away": ["porter@127.0.0.31:2299", "keeper@127.0.0.32:22", "fallback@x.away:22"],
    "rig-old3": ["porter@127.0.0.31:2299", "fallback@127.0.0.33:22"],
    "gate-a": ["porter@127.0.0.31:2299"],
}


@needs_ssh
@pytest.mark.parametrize("host", list(CHAINS))
async def test_the_chain_of_jump_hosts_is_the_one_that_ssh_would_take(home: Path, host: str) -> None:
    use(home, "ssh_jumps")
    assert names(await chain(Wanted(host))) == CHAINS[host]


@needs_ssh
async def test_a_quoted_identity_and_an_ipv6_jump_are_read(home: Path) -> None:
    use(home, "ssh_jumps")
    got = await settings_of(Wanted("rig-1"))
    assert got.identity_files == (f"{home}/.ssh/keys/rig key",)
    assert got.user_known_hosts[0] == f"{home}/.ssh/known_hosts"
    hops = await chain(Wanted("six"))
    assert names(hops)[-2:] == ["boss@::1:2206", "fallback@six:22"]


@pytest.mark.parametrize("with_ssh", [pytest.param(True, marks=needs_ssh), False])
async def test_jump_hosts_in_a_circle_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch, with_ssh: bool) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host one\n ProxyJump two\nHost two\n ProxyJump one\n")
    if not with_ssh:
        monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    with pytest.raises(Trouble, match="circle") as trouble:
        await chain(Wanted("one"))
    assert trouble.value.refused


@pytest.mark.parametrize("host", ["x.away", "rig-old3", "gate-a"])
async def test_without_ssh_the_chain_is_the_same(home: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    use(home, "ssh_jumps")
    config = home / ".ssh" / "config"  # asyncssh reads no comment after a value
    config.write_text(config.read_text().replace("\t# the rack", ""))
    got = await chain(Wanted(host))
    assert names(got) == CHAINS[host]
    assert got[-1].source == "asyncssh"
    assert got[-1].user_known_hosts == (f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2")
    assert f"{home}/.ssh/id_ed25519" in got[-1].identity_files


@pytest.mark.parametrize("with_ssh", [pytest.param(True, marks=needs_ssh), False])
async def test_files_that_are_switched_off_are_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, with_ssh: bool
) -> None:
    if not with_ssh:
        monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text(
        "Host off\n UserKnownHostsFile none\n GlobalKnownHostsFile none\n IdentityAgent none\n"
        "Host on\n UserKnownHostsFile ~/.ssh/one ~/.ssh/two\n IdentityAgent ~/agent.sock\n"
    )
    off, on = await settings_of(Wanted("off")), await settings_of(Wanted("on"))
    assert (off.user_known_hosts, off.global_known_hosts, off.identity_agent) == ((), (), "")
    assert on.user_known_hosts == (f"{home}/.ssh/one", f"{home}/.ssh/two")
    assert on.identity_agent is not None
    assert on.identity_agent.endswith("/agent.sock")


@pytest.mark.parametrize("with_ssh", [pytest.param(True, marks=needs_ssh), False])
async def test_what_our_file_says_wins(home: Path, monkeypatch: pytest.MonkeyPatch, with_ssh: bool) -> None:
    if not with_ssh:
        monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host gpu\n HostName 127.0.0.9\n User them\n Port 2200\n")
    key = home / "key file"
    key.touch()
    (target,) = await resolve(Host(address="gpu", user="me", port=2201, identity_file=str(key)))
    assert str(target) == "me@127.0.0.9:2201"
    assert target.identity_files[0] == str(key)
    (target,) = await resolve(Host(address="me@gpu"))
    assert str(target) == "me@127.0.0.9:2200"


@needs_ssh
async def test_a_configuration_that_ssh_refuses_is_shown_in_its_words(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host gpu\n  Prot 22\n")
    with pytest.raises(Trouble, match=r"~/\.ssh/config: line 2: .*prot") as trouble:
        await chain(Wanted("gpu"))
    assert (trouble.value.code, trouble.value.refused) == ("ssh-config", True)


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "", "-F/dev/null"])
async def test_a_name_is_never_an_option(home: Path, name: str) -> None:
    with pytest.raises(Trouble, match="no host name"):
        await chain(Wanted(name))


@needs_ssh
async def test_the_configuration_of_another_home_is_not_read(home: Path) -> None:
    got = await settings_of(Wanted("gpu"))
    assert got.hostname == "gpu"
    assert all(path.startswith(str(home)) for path in got.identity_files)
    assert os.listdir(home) == []
