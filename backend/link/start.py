"""From a shell on the host to a running agent: the command line, the archive, the first line."""

from __future__ import annotations

import asyncio
import base64
import secrets
import shlex
import zlib
from typing import TYPE_CHECKING, Any

from backend.link.bootstrap import stub_source
from backend.link.trouble import Trouble
from backend.wire import WireError, decode, printable

if TYPE_CHECKING:
    from backend.link.bootstrap import Archive
    from backend.link.channel import Channel

ANSWER_S = 20.0
"""For the first word and for the hello: a start-up file that initialises pyenv takes up to 1.1 s (facts:
transport)."""

UPLOAD_S = 120.0

LOADER = (
    "import os,sys,zlib,binascii;"
    "sys.version_info<(3,8) and (os.write(1,os.linesep.join((str(),"
    "chr(32).join((sys.argv[2],sys.argv[3],sys.version.split()[0])),str())).encode()),os._exit(3));"
    "w=sys.argv.pop(1);sys.argv.pop(2);exec(zlib.decompress(binascii.a2b_base64(w)))"
)
"""Without a quote, a dollar or a newline, so that it is the same word in every login shell, csh and fish
included; and without what Python 2 could not parse, so that an old Python says that it is one."""

PYTHON_HINT = 'install Python 3.8 or newer there, or set `python = "/path/to/python3"` for this host'


def new_nonce() -> str:
    """Make a word that nothing on the host can have printed before."""
    return "ez" + secrets.token_hex(16)


def command_line(archive: Archive, python: str, nonce: str) -> str:
    """Return the script for /bin/sh that starts the stub, which becomes the agent."""
    packed = base64.b64encode(zlib.compress(stub_source().encode(), 9)).decode()
    words = [nonce, "OLD", archive.name, str(len(archive.data)), archive.sha256, archive.tree]
    words += [*archive.argv, "agent", nonce]
    home, rest = ('"$HOME"/', python[2:]) if python.startswith("~/") else ("", python)
    return (
        f'P={home}{shlex.quote(rest)}; command -v "$P" >/dev/null 2>&1 || '
        f"{{ echo; echo {nonce} NONE; exit 127; }}; "
        f'exec "$P" -E -s -S -c "{LOADER}" {packed} {shlex.join(words)}'
    )


def remote_command(script: str) -> str:
    """Wrap a script for whatever login shell the user has there."""
    return f"exec /bin/sh -c {shlex.quote(script)}"


async def start(channel: Channel, archive: Archive, python: str, nonce: str) -> dict[str, Any]:
    """Speak with the stub until the agent has said its hello, and return that message. Raises Trouble."""
    word, rest = await _answer(channel, nonce, python)
    if word == "OLD":
        said = f"`{python}` is Python {printable(rest, 40)} there; the agent needs 3.8 or newer"
        raise Trouble("old-python", said, PYTHON_HINT, refused=True)
    if word == "NONE":
        raise Trouble("no-python", f"there is no `{python}` on the host", PYTHON_HINT, refused=True)
    if word == "NEED":
        await _upload(channel, archive)
    elif word != "HAVE":
        raise Trouble("no-agent", f"the host answered the bootstrap with `{printable(word, 40)}`")
    return await _hello(channel, nonce, python)


async def _upload(channel: Channel, archive: Archive) -> None:
    try:
        async with asyncio.timeout(UPLOAD_S):
            for offset in range(0, len(archive.data), 1 << 15):
                channel.write(archive.data[offset : offset + (1 << 15)])
                await channel.drain()
    except TimeoutError:
        raise Trouble("timeout", f"the agent could not be sent within {UPLOAD_S:.0f} s") from None


async def _answer(channel: Channel, nonce: str, python: str) -> tuple[str, str]:
    """Skip what start-up files print until the stub's line."""
    try:
        async with asyncio.timeout(ANSWER_S):
            while (line := await channel.lines.next()) is not None:
                first, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
                if first == nonce:
                    word, _, rest = rest.partition(" ")
                    return word, rest
    except TimeoutError:
        raise Trouble(
            "no-agent", f"no answer from a shell on the host within {ANSWER_S:.0f} s",
            "does its login shell or a start-up file wait for something?",
        ) from None  # fmt: skip
    raise await _ended(channel, python)


async def _hello(channel: Channel, nonce: str, python: str) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_S):
            while (line := await channel.lines.next()) is not None:
                first, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
                if first == nonce:
                    raise _not_unpacked(rest)
                try:
                    message = decode(line)
                except WireError:
                    continue
                hello = message.get("hello")
                if message.get("t") == "hello" and isinstance(hello, dict) and hello.get("nonce") == nonce:
                    return message
    except TimeoutError:
        raise Trouble("no-agent", f"the agent said nothing within {ANSWER_S:.0f} s of its start") from None
    raise await _ended(channel, python)


def _not_unpacked(said: str) -> Trouble:
    if said.startswith("FAIL"):
        places = printable(said[4:], 400)
        hint = "free some space in the home folder, /tmp or /dev/shm there; about 2 MiB are needed"
        return Trouble("no-room", f"the agent cannot be stored on the host: {places}", hint, refused=True)
    return Trouble("no-agent", "the agent arrived damaged")


async def _ended(channel: Channel, python: str) -> Trouble:
    """Explain an end before the hello by the exit status and the last words."""
    try:
        status = await asyncio.wait_for(channel.exit_status(), 5.0)
    except TimeoutError:
        status = None
    words = channel.last_words()
    if status in (126, 127):
        reason = f"`{python}` cannot be run on the host: {words or f'exit status {status}'}"
        return Trouble("no-python", reason, PYTHON_HINT, refused=True)
    end = "without a status" if status is None else f"with status {status}"
    return Trouble("agent-crashed", f"the agent ended at its start {end}: {words or 'it said nothing'}")
