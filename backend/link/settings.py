"""How to reach a host: what `ssh -G` prints, and the chain of jump hosts that follows from it.

OpenSSH's reading of ~/.ssh/config is what the operator means; asyncssh's differs in corners (facts:
transport, 1.4), so it is used only where ssh is not installed, and the status says so.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
from asyncssh.config import ConfigParseError, SSHClientConfig

from backend.link.homeconfig import config_for, passwd_home
from backend.link.trouble import Trouble
from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.config import Host

SSH_G_S = 10.0
MOST_HOPS = 8
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
DEFAULT_KINDS = ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One hop, resolved. `alias` is the name as it was asked for; paths are expanded; `source` says who
    resolved it.

    `proxy_jump` is the raw list of the configuration, empty for none. `identity_agent` None means
    SSH_AUTH_SOCK, an empty text means no agent.
    """

    alias: str
    hostname: str
    port: int
    user: str
    source: str
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    proxy_jump: str = ""
    proxy_command: str = ""
    host_key_alias: str = ""
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    revoked_host_keys: str = ""
    family: str = "any"  # inet, inet6 or any

    def __str__(self) -> str:
        return f"{self.user}@{self.hostname}:{self.port}"


@dataclass(frozen=True)
class Wanted:
    """What is asked of the configuration: a name as ssh would be given it, and what overrides the
    configuration."""

    name: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None


async def resolve(host: Host) -> list[Settings]:
    """Return the hops to a configured host, the host itself last. Raises Trouble where that is impossible."""
    identity = str(Path(host.identity_file).expanduser()) if host.identity_file else None
    if identity and not os.path.isfile(identity):
        raise Trouble("ssh-config", f"identity_file {identity}: no such file", refused=True)
    return await chain(Wanted(host.address, host.user, host.port, identity))


async def chain(wanted: Wanted, depth: int = 0) -> list[Settings]:
    """Resolve a host and its jump hosts.

    Of `ProxyJump a,b` only `a` is reached by its own configuration: ssh runs `ssh -J a b` for the rest.
    """
    if depth > MOST_HOPS:
        reason = f"ProxyJump leads from {wanted.name} on in a circle, or over more than {MOST_HOPS} hosts"
        raise Trouble("ssh-config", reason, refused=True)
    target = await settings_of(wanted)
    hops: list[Settings] = []
    for spec in [spec.strip() for spec in target.proxy_jump.split(",") if spec.strip()]:
        hop = _jump(_expand(spec, target))
        try:
            if hops:
                hops.append(replace(await settings_of(hop), proxy_jump="", proxy_command=""))
            else:
                hops = await chain(hop, depth + 1)
        except Trouble as trouble:
            reason = f"jump host {hop.name}: {trouble.reason}"
            raise Trouble(trouble.code, reason, trouble.hint, refused=trouble.refused) from None
    return [*hops, target]


def _jump(spec: str) -> Wanted:
    """Read one hop: [user@]host[:port], with brackets around an IPv6 address, or an ssh:// address."""
    found = re.fullmatch(r"(?:ssh://)?(?:([^@]+)@)?(?:\[([^\]]+)\]|([^:/]+))(?::(\d+))?/?", spec)
    if not found:
        reason = f"ProxyJump `{printable(spec, 100)}` is not [user@]host[:port]"
        raise Trouble("ssh-config", reason, refused=True)
    user, bracketed, name, port = found.groups()
    return Wanted(bracketed or name, user, int(port) if port else None)


async def settings_of(wanted: Wanted) -> Settings:
    """Resolve one host by itself. Raises Trouble where its configuration is refused."""
    if wanted.name.startswith("-") or not wanted.name:
        raise Trouble("ssh-config", f"`{wanted.name}` is no host name", refused=True)
    ssh = shutil.which("ssh")
    if ssh is None:
        return await asyncio.to_thread(_from_asyncssh, wanted)
    with tempfile.TemporaryDirectory(prefix="eightzeros-") as folder:
        return _from_ssh(await _ssh_g(ssh, wanted, folder), wanted)


async def _ssh_g(ssh: str, wanted: Wanted, folder: str) -> str:
    words = [ssh, "-G", *config_for(folder, SYSTEM_CONFIG)]
    for option, value in (("-l", wanted.user), ("-p", wanted.port), ("-i", wanted.identity_file)):
        words += [option, str(value)] if value is not None else []
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, "--", wanted.name, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(), SSH_G_S)
    except TimeoutError:
        raise Trouble("ssh-config", f"`ssh -G {wanted.name}` did not end within {SSH_G_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        text = said.decode("utf-8", "replace").replace(os.path.join(folder, "config"), "~/.ssh/config")
        words_said = printable(text, 400) or f"exit status {process.returncode}"
        hint = f"`ssh -G {wanted.name}` shows the same; correct ~/.ssh/config and retry"
        raise Trouble("ssh-config", f"ssh refuses its configuration: {words_said}", hint, refused=True)
    return out.decode("utf-8", "replace")


def _from_ssh(text: str, wanted: Wanted) -> Settings:
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key.lower(), []).append(value)

    def one(key: str) -> str:
        value = said.get(key, [""])[0].strip()
        return "" if value.lower() == "none" else value

    basis = Settings(
        alias=wanted.name, hostname=one("hostname"), port=int(one("port") or 22), user=one("user"),
        source="ssh -G",
    )  # fmt: skip
    agent = said.get("identityagent", [""])[0].strip()
    return replace(
        basis,
        identity_files=_paths(said.get("identityfile", []), basis),
        certificate_files=_paths(said.get("certificatefile", []), basis),
        identities_only=one("identitiesonly") == "yes",
        identity_agent=_agent(agent, basis),
        proxy_jump=one("proxyjump"),
        proxy_command=_expand(one("proxycommand"), basis),
        host_key_alias=one("hostkeyalias"),
        user_known_hosts=_paths(_split(one("userknownhostsfile")), basis),
        global_known_hosts=_paths(_split(one("globalknownhostsfile")), basis),
        revoked_host_keys="".join(_paths([one("revokedhostkeys")], basis)),
        family=one("addressfamily") or "any",
    )


def _from_asyncssh(wanted: Wanted) -> Settings:
    """Read the configuration with asyncssh, for an operator without OpenSSH."""
    local = getpass.getuser()
    user, _, name = wanted.name.rpartition("@")
    paths = [path for path in (Path.home() / ".ssh" / "config", Path(SYSTEM_CONFIG)) if path.is_file()]
    try:
        config = SSHClientConfig.load(
            None, list(paths), False, False, False, local, wanted.user or user or (), name, wanted.port or ()
        )
    except (ConfigParseError, OSError, asyncssh.Error) as error:
        hint = "OpenSSH may accept it: install ssh, or correct the file"
        raise Trouble("ssh-config", f"the SSH configuration: {error}", hint, refused=True) from None

    def many(key: str, default: Sequence[str]) -> list[str]:
        value = config.get(key, default)
        return [str(item) for item in value] if isinstance(value, list | tuple) else []

    basis = Settings(
        alias=wanted.name, hostname=str(config.get("Hostname") or name),
        user=str(config.get("User") or local), port=int(str(config.get("Port") or 22)), source="asyncssh",
    )  # fmt: skip
    identities = [wanted.identity_file] if wanted.identity_file else []
    identities += many("IdentityFile", [f"~/.ssh/id_{kind}" for kind in DEFAULT_KINDS])
    user_files = many("UserKnownHostsFile", ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"])
    agent = config.get("IdentityAgent", "")  # None where it says none
    return replace(
        basis,
        identity_files=_paths(identities, basis),
        certificate_files=_paths(many("CertificateFile", []), basis),
        identities_only=bool(config.get("IdentitiesOnly")),
        identity_agent=_agent("none" if agent is None else str(agent), basis),
        proxy_jump=str(config.get("ProxyJump") or ""),
        proxy_command=str(config.get("ProxyCommand") or ""),
        host_key_alias=str(config.get("HostKeyAlias") or ""),
        user_known_hosts=_paths(user_files, basis),
        global_known_hosts=_paths(many("GlobalKnownHostsFile", SYSTEM_KNOWN_HOSTS), basis),
    )


def _agent(value: str, settings: Settings) -> str | None:
    """Read IdentityAgent: unset or SSH_AUTH_SOCK is the environment's, none is none, $NAME is a
    variable's."""
    if value in ("", "SSH_AUTH_SOCK"):
        return None
    if value.lower() == "none":
        return ""
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}"), "")
    return "".join(_paths([value], settings))


def _split(text: str) -> list[str]:
    """Split a list of files that `ssh -G` prints on one line without quotes, though a name may hold a
    space."""
    return [path for path in re.split(r" (?=[/~%])", text) if path and path.lower() != "none"]


def _paths(values: list[str], settings: Settings) -> tuple[str, ...]:
    """Expand tokens and the home folder: $HOME, where OpenSSH takes the one of the password file."""
    home, real = str(Path.home()), passwd_home()
    result = []
    for value in values:
        value = value.strip()
        if not value or value.lower() == "none":
            continue
        path = os.path.expanduser(_expand(value.strip('"'), settings))
        if home != real and path.startswith(real.rstrip("/") + "/.ssh/"):
            path = home + path[len(real.rstrip("/")) :]
        result.append(path)
    return tuple(dict.fromkeys(result))


def _expand(text: str, settings: Settings) -> str:
    """Expand the percent tokens of ssh_config(5) that the values used here may hold; others stay as they
    are."""
    tokens = {
        "%": "%", "h": settings.hostname, "n": settings.alias.rpartition("@")[2], "p": str(settings.port),
        "r": settings.user, "d": str(Path.home()), "u": getpass.getuser(), "i": str(os.getuid()),
        "l": socket.gethostname(), "L": socket.gethostname().partition(".")[0],
        "k": settings.host_key_alias or settings.hostname,
    }  # fmt: skip
    return re.sub(r"%(.)", lambda found: tokens.get(found.group(1), found.group(0)), text)
