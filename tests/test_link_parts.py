"""The parts of a link by themselves: lines, delays, wake-up, known_hosts, the limit on handshakes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest

from backend.link import Handshakes, HostKey, Trouble, hostkeys, retry
from backend.link.channel import Lines
from backend.link.settings import Settings
from backend.wire import MAX_LINE_BYTES

if TYPE_CHECKING:
    from pathlib import Path


def lines(*pieces: bytes) -> Lines:
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return Lines(read)


async def drained(source: Lines) -> list[bytes]:
    found = []
    while (line := await source.next()) is not None:
        found.append(line)
    return found


async def test_lines_are_cut_whatever_the_pieces() -> None:
    text = b"one\n\ntwo\nthree\ntorn"
    for size in range(1, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert await drained(lines(*pieces)) == [b"one", b"", b"two", b"three"]


async def test_a_line_over_the_limit_is_dropped_whole() -> None:
    long = b"x" * (MAX_LINE_BYTES * 3)
    for size in (1 << 16, MAX_LINE_BYTES, len(long)):
        pieces = [long[at : at + size] for at in range(0, len(long), size)]
        source = lines(b"a\n", *pieces, b"yyy\nb\n", b"c\n")
        assert await drained(source) == [b"a", b"b", b"c"]
        assert source.dropped == 1
    exact = b"x" * (MAX_LINE_BYTES - 1)
    assert await drained(lines(exact + b"\n")) == [exact]
    source = lines(exact + b"x\n", b"b\n")
    assert await drained(source) == [b"b"]


def test_delays_double_to_a_minute_and_start_anew_after_a_minute_of_life() -> None:
    backoff = retry.Backoff()
    caps = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    for cap in caps:
        assert cap * 0.1 <= backoff.next_s() <= cap
    backoff.ended(59.0)
    assert max(backoff.next_s() for _ in range(50)) > 1.0
    backoff.ended(60.0)
    assert backoff.next_s() <= 1.0


async def test_waking_up_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 1000.0}
    monkeypatch.setattr(retry, "wall", lambda: clock["wall"])
    waiting = asyncio.create_task(retry.pause(3600.0, asyncio.Event()))
    await asyncio.sleep(0)
    clock["wall"] += 600.0  # the wall clock went on while the machine slept, the monotonic one did not
    async with asyncio.timeout(5):
        await waiting


async def test_a_refused_link_waits_for_the_operator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 1000.0}
    monkeypatch.setattr(retry, "wall", lambda: clock["wall"])
    kick = asyncio.Event()
    waiting = asyncio.create_task(retry.pause(None, kick))
    await asyncio.sleep(0)
    clock["wall"] += 600.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 1.2)
    kick.set()
    async with asyncio.timeout(5):
        await waiting
    assert not kick.is_set()


KEYS = [asyncssh.generate_private_key("ssh-ed25519") for _ in range(3)]


def public(number: int) -> str:
    return " ".join(KEYS[number].export_public_key("openssh").decode().split()[:2])


def verdict(folder: Path, text: str, host: str = "gpu.example", port: int = 22, **more: Any) -> str:
    """Return what a known_hosts file says of key 0."""
    path = folder / "known_hosts"
    path.write_text(text)
    basis = {"alias": "gpu", "user": "me", "source": "test", "user_known_hosts": (str(path),)}
    target = Settings(hostname=host, port=port, **{**basis, **more})
    key = asyncssh.import_public_key(public(0))
    return hostkeys.known_keys(target, folder / "own").verdict(key)


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))


def test_known_hosts_is_read_as_openssh_reads_it(tmp_path: Path) -> None:
    zero, one = public(0), public(1)
    at = {"port": 2222}
    assert verdict(tmp_path, "") == "unknown"
    assert verdict(tmp_path, f"gpu.example,10.0.0.1 {zero} a comment\n") == "trusted"
    assert verdict(tmp_path, f"GPU.example {zero}\n", "gpu.EXAMPLE") == "trusted"
    assert verdict(tmp_path, f"*.example,!gpu.example {zero}\n") == "unknown"
    assert verdict(tmp_path, f"*.example {zero}\n") == "trusted"
    assert verdict(tmp_path, f"gpu.example {one}\n") == "changed"
    assert verdict(tmp_path, f"gpu.example {one}\ngpu.example {zero}\n") == "trusted"
    assert verdict(tmp_path, f"[gpu.example]:2222 {zero}\n", **at) == "trusted"
    assert verdict(tmp_path, f"[gpu.example]:2222 {zero}\n") == "unknown"
    assert verdict(tmp_path, f"gpu.example {zero}\n", **at) == "trusted", "the name alone may vouch"
    assert verdict(tmp_path, f"gpu.example {one}\n", **at) == "unknown", "but not against"
    assert verdict(tmp_path, f"{hashed('gpu.example')} {zero}\n") == "trusted"
    assert verdict(tmp_path, f"{hashed('[gpu.example]:2222')} {zero}\n", **at) == "trusted"
    assert verdict(tmp_path, f"|1|x|y {zero}\n|1|one {zero}\n") == "unknown"
    assert verdict(tmp_path, "gpu.example ssh-ed25519 broken\n# a comment\n\n@odd x\n") == "unknown"
    assert verdict(tmp_path, f"@cert-authority * {zero}\n") == "unknown"
    assert verdict(tmp_path, f"rack {zero}\n", host_key_alias="rack", **at) == "trusted"


@pytest.mark.parametrize(
    ("name", "port"),
    [("gpu.example", 22), ("*", 22), ("gpu.example", 2222), ("*", 2222), ("[gpu.example]:2222", 2222)],
)
def test_a_revoked_key_is_revoked_wherever_it_is_named(tmp_path: Path, name: str, port: int) -> None:
    zero = public(0)
    assert verdict(tmp_path, f"@revoked {name} {zero}\n", port=port) == "revoked"
    assert verdict(tmp_path, f"* {zero}\n@revoked {name} {zero}\n", port=port) == "revoked"


def test_a_list_of_revoked_keys_counts_and_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text(f"# these\n{public(1)}\n{public(0)}\n")
    known = f"gpu.example {public(0)}\n"
    assert verdict(tmp_path, known, revoked_host_keys=str(tmp_path / "revoked")) == "revoked"
    with pytest.raises(Trouble, match="absent"):
        verdict(tmp_path, known, revoked_host_keys=str(tmp_path / "absent"))
    (tmp_path / "krl").write_bytes(b"SSHKRL\n\0binary")
    with pytest.raises(Trouble, match="binary list"):
        verdict(tmp_path, known, revoked_host_keys=str(tmp_path / "krl"))


def test_an_accepted_key_is_appended_to_our_own_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "known_hosts"
    key = HostKey("gpu.example", 2222, "ssh-ed25519", "SHA256:x", "unknown", public(0))
    path.parent.mkdir()
    path.write_text("other ssh-ed25519 AAAA")
    hostkeys.add(path, key)
    assert path.read_text() == f"other ssh-ed25519 AAAA\n[gpu.example]:2222 {public(0)}\n"


async def test_few_handshakes_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running, most = 0, 0

    async def connect(settings: Settings, ours: Path, tunnel: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        raise Trouble("unreachable", "not today")

    monkeypatch.setattr("backend.link.ssh.connect", connect)
    handshakes = Handshakes()
    hops = [Settings(alias=str(n), hostname=str(n), port=22, user="me", source="test") for n in range(30)]
    outcomes = await asyncio.gather(
        *(handshakes.open([hop], tmp_path / "known") for hop in hops), return_exceptions=True
    )
    assert all(isinstance(outcome, Trouble) for outcome in outcomes)
    assert most == 8


async def test_a_refusal_of_a_bastion_is_not_repeated_for_every_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []

    async def connect(settings: Settings, ours: Path, tunnel: object) -> object:
        tried.append(settings.alias)
        await asyncio.sleep(0)
        raise Trouble("auth", "no", refused=True)

    monkeypatch.setattr("backend.link.ssh.connect", connect)
    handshakes = Handshakes()
    made = {n: Settings(alias=n, hostname=n, port=22, user="me", source="test") for n in ("gate", *"abcdef")}

    async def open_all() -> None:
        opening = [handshakes.open([made["gate"], made[name]], tmp_path) for name in "abcdef"]
        outcomes = await asyncio.gather(*opening, return_exceptions=True)
        assert all(isinstance(outcome, Trouble) and outcome.code == "auth" for outcome in outcomes)

    await open_all()
    await open_all()
    assert tried == ["gate"]
    handshakes.forget_refusals()
    await open_all()
    assert tried == ["gate", "gate"]
