"""A tiny agent that does as it is told, and an operator who watches a link to it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from backend.config import Host
from backend.link import Handshakes, Link, LinkState, LinkStatus, pack_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from backend.link import Archive

PROGRAM = b"""
import base64, json, os, sys, time

def say(message):
    os.write(1, json.dumps(message).encode() + b"\\n")

def answer(op, args):
    if op == "echo":
        return args
    if op == "raw":
        data = base64.b64decode(args["data"]) * args.get("times", 1) + b"\\n"
        while data:
            data = data[os.write(1, data):]
    elif op == "die":
        sys.stderr.write(args["words"])
        sys.exit(3)
    elif op == "hang":
        time.sleep(1000)
    elif op == "effect":
        with open(args["path"], "a") as file:
            file.write(args["id"] + "\\n")
        if args.get("die"):
            os._exit(9)
        return {"id": args["id"], "by": "effect"}
    elif op == "find":
        with open(args["path"], "a+") as file:
            file.seek(0)
            if args["id"] not in file.read().split():
                raise KeyError("not-found")
        return {"id": args["id"], "by": "find"}
    else:
        raise KeyError("no-op")

hello = {"nonce": sys.argv[2], "agent_pid": os.getpid(), "home": os.environ["HOME"], "at": sys.argv[0]}
say({"t": "hello", "hello": hello})
for line in iter(sys.stdin.readline, ""):
    asked = json.loads(line)
    try:
        result = {"ok": True, "result": answer(asked["op"], asked["args"])}
    except KeyError as problem:
        result = {"ok": False, "error": {"code": problem.args[0], "message": "no", "hint": "none"}}
    say(dict(result, t="reply", id=asked["id"]))
"""


def fake_archive(name: str = "fake", program: bytes = PROGRAM) -> Archive:
    """Pack the tiny agent."""
    return pack_files(name, {"__main__.py": program, "backend/__init__.py": b""})


async def eventually(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """Return the condition's first true value; the loop runs meanwhile."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"still {value!r} after {timeout_s} s"
        await asyncio.sleep(0.01)
    return value


class Operator:
    """One link, and everything that it said."""

    def __init__(
        self, host: Host, archive: Archive | None = None, *,
        known_hosts: Path | None = None, handshakes: Handshakes | None = None,
    ) -> None:  # fmt: skip
        self.messages: list[dict[str, Any]] = []
        self.statuses: list[LinkStatus] = []
        self.link = Link(
            "gpu", host, archive or fake_archive(), on_message=self.messages.append,
            on_status=self.statuses.append, known_hosts=known_hosts, handshakes=handshakes,
        )  # fmt: skip

    @property
    def states(self) -> list[LinkState]:
        """List the states so far."""
        return [status.state for status in self.statuses]

    def said(self, kind: str) -> list[dict[str, Any]]:
        """List the messages of one kind."""
        return [message for message in self.messages if message.get("t") == kind]

    @property
    def agent_pid(self) -> int:
        """Return the pid of the agent that said the last hello."""
        return int(self.said("hello")[-1]["hello"]["agent_pid"])

    async def reaches(self, state: LinkState, timeout_s: float = 15.0) -> LinkStatus:
        """Wait until the link is in a state, and return its status."""
        await eventually(lambda: self.link.status.state is state, timeout_s)
        return self.link.status

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Operator]:
        """Run the link meanwhile."""
        task = asyncio.create_task(self.link.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def here(**settings: Any) -> Host:
    """Return a host with the interpreter of the tests."""
    return Host(**{"python": sys.executable, **settings})
