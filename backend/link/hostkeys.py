"""Which host keys are trusted: known_hosts as OpenSSH reads it, and our own file beside it.

Always computed here and passed on explicitly. asyncssh alone takes `UserKnownHostsFile none` for "check
nothing", and overlooks a revoked key at a port other than 22 (facts: transport, sections 1.4 and 1.5).
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from backend.link.status import HostKey
from backend.link.trouble import Trouble

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from backend.link.settings import Settings

SSH_PORT = 22


@dataclass
class KnownKeys:
    """What the files say of one host. `elsewhere` are keys for its name without the port: they may only
    trust."""

    trusted: list[asyncssh.SSHKey] = field(default_factory=list)
    elsewhere: list[asyncssh.SSHKey] = field(default_factory=list)
    authorities: list[asyncssh.SSHKey] = field(default_factory=list)
    revoked: list[asyncssh.SSHKey] = field(default_factory=list)

    def verdict(self, key: asyncssh.SSHKey) -> str:
        """Return trusted, revoked, changed or unknown. A key of another type than the known one counts as
        changed."""
        if key in self.revoked:
            return "revoked"
        if key in self.trusted or key in self.elsewhere:
            return "trusted"
        return "changed" if self.trusted else "unknown"

    def algorithms(self) -> list[str]:
        """List the key algorithms to offer: certificates where an authority is known, the known types, all
        others."""
        wanted = list(get_default_certificate_algs()) if self.authorities else []
        for key in [*self.trusted, *self.elsewhere]:
            wanted += key.sig_algorithms
        wanted += get_default_public_key_algs()
        return list(dict.fromkeys(name.decode("ascii") for name in wanted))


def lookup_name(settings: Settings) -> tuple[str, int]:
    """Return the name and port to look up; HostKeyAlias stands for both, as in OpenSSH."""
    if settings.host_key_alias:
        return settings.host_key_alias.lower(), SSH_PORT
    return settings.hostname.lower(), settings.port


def known_keys(settings: Settings, ours: Path) -> KnownKeys:
    """Read every file that counts for a host. Raises Trouble where a list of revoked keys cannot be read."""
    host, port = lookup_name(settings)
    exact = host if port == SSH_PORT else f"[{host}]:{port}"
    found = KnownKeys()
    files = [*map(Path, (*settings.user_known_hosts, *settings.global_known_hosts)), ours]
    for path in files:
        for marker, patterns, key in _entries(path):
            at_port, by_name = _matches(patterns, exact), port != SSH_PORT and _matches(patterns, host)
            if not (at_port or by_name):
                continue
            if marker == "@revoked":
                found.revoked.append(key)
            elif marker == "@cert-authority":
                found.authorities.append(key)
            elif not marker:
                (found.trusted if at_port else found.elsewhere).append(key)
    if settings.revoked_host_keys:
        found.revoked += _revoked_list(Path(settings.revoked_host_keys))
    found.authorities = [key for key in found.authorities if key not in found.revoked]
    return found


def offered(settings: Settings, key: asyncssh.SSHKey, verdict: str) -> HostKey:
    """Describe a key that a host offered and that is not trusted."""
    host, port = lookup_name(settings)
    algorithm, data = key.export_public_key("openssh").decode("ascii").split()[:2]
    return HostKey(host, port, algorithm, key.get_fingerprint(), verdict, f"{algorithm} {data}")


def refusal(host_key: HostKey) -> Trouble:
    """Explain a key that is not trusted and what to do about it."""
    where = host_key.host if host_key.port == SSH_PORT else f"[{host_key.host}]:{host_key.port}"
    shown = f"{host_key.algorithm} {host_key.fingerprint}"
    if host_key.verdict == "unknown":
        reason = f"the host key of {where} is not known: {shown}"
        hint = "compare it with what the host itself prints (ssh-keygen -lf on its key file), then accept it"
    elif host_key.verdict == "revoked":
        reason = f"the host key of {where} is revoked: {shown}"
        hint = "somebody may be impersonating the host"
    else:
        reason = f"the host key of {where} has CHANGED: {shown}"
        hint = f"if the host was installed anew, remove the old key: ssh-keygen -R '{where}'"
    return Trouble("host-key", reason, hint, refused=True, host_key=host_key)


def add(path: Path, host_key: HostKey) -> None:
    """Append a key to our known_hosts, which is made private to the user."""
    where = host_key.host if host_key.port == SSH_PORT else f"[{host_key.host}]:{host_key.port}"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "a+b") as file:
        file.seek(0)
        before = file.read()
        gap = b"\n" if before and not before.endswith(b"\n") else b""
        file.write(gap + f"{where} {host_key.key}\n".encode())
        file.flush()
        os.fsync(fd)


def _entries(path: Path) -> Iterator[tuple[str, str, asyncssh.SSHKey]]:
    """Yield (marker, patterns, key) of each line that can be read, as OpenSSH skips those that cannot."""
    try:
        text = path.expanduser().read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) >= 3 and (key := _key(" ".join(words[1:3]))):
            yield marker, words[0], key


def _key(text: str) -> asyncssh.SSHKey | None:
    try:
        return asyncssh.import_public_key(text)
    except ValueError:
        return None


def _matches(patterns: str, name: str) -> bool:
    """Match a host against the first field of a line: hashed, or patterns of which none that is negated may
    match."""
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in patterns[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    split = patterns.lower().split(",")
    if any(_like(pattern[1:], name) for pattern in split if pattern.startswith("!")):
        return False
    return any(_like(pattern, name) for pattern in split if not pattern.startswith("!"))


def _like(pattern: str, name: str) -> bool:
    """Match with `*` and `?` only: a bracket is part of `[host]:port`."""
    return re.fullmatch(fnmatch.translate(pattern.replace("[", "[[]")), name) is not None


def _revoked_list(path: Path) -> Iterable[asyncssh.SSHKey]:
    """Read RevokedHostKeys: one public key a line. OpenSSH refuses every host where it cannot be read; so do
    we."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise Trouble("ssh-config", f"RevokedHostKeys {path}: {error.strerror}", refused=True) from None
    if data.startswith(b"SSHKRL\n"):
        hint = "list the keys in a text file, one a line, for the hosts that are opened from here"
        reason = f"RevokedHostKeys {path} is a binary list, which is not read here"
        raise Trouble("ssh-config", reason, hint, refused=True)
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return [key for line in lines if line and not line.startswith("#") and (key := _key(line))]
