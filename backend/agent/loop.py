"""The agent's one loop: requests in, replies and events out, nothing that blocks in between.

A `select` over stdin, stdout and what each source waits for. What may block (a scan, a shard on a dead network
filesystem) runs in a worker process with a deadline. Ends when stdin does: runs and resets go on without it.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import time
from typing import Any, Dict, List, Protocol, Set

from backend.agent import ours, procfs
from backend.agent.flight.place import RecorderKeeper
from backend.agent.kept import Kept
from backend.agent.ops import TABLE, Context
from backend.agent.paths import homeless
from backend.agent.relay import RunsSource
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.agent.workers import Workers
from backend.agent.xid.source import XidSource
from backend.wire import MAX_LINE_BYTES, PROTOCOL, Hello, Refused, WireError, decode, encode, refusal, reply

BACKLOG_BYTES = 4 << 20
"""Unsent output above which telemetry is left out: a console that does not read gets the newest, not the oldest."""


class Source(Protocol):
    """Something that has messages for the console now and then, and never blocks."""

    def filenos(self) -> List[int]:
        """Return the descriptors that it waits for."""

    def due(self) -> float:
        """Return when `step` must be called at the latest, on the monotonic clock."""

    def step(self, ready: Set[int]) -> List[Dict[str, Any]]:
        """Do what is due and return the messages; `ready` are the descriptors that can be read."""

    def close(self) -> None:
        """Let go of everything."""


class Loop:
    """Serve one console on two file descriptors until the input ends."""

    def __init__(self, machine: Machine, nonce: str = "", stdin: int = 0, stdout: int = 1) -> None:
        self._machine, self._nonce = machine, nonce
        self._in, self._out = stdin, stdout
        self._received, self._unsent = b"", bytearray()
        self._dropping = False
        store = RunStore(machine)
        self._context = Context(machine, store)
        self._workers = Workers()
        telemetry = TelemetrySource(machine)
        self._sources: List[Source] = [telemetry, XidSource(machine, telemetry), RunsSource(store), self._workers]
        self._kept = Kept(lambda op, args: TABLE[op].call(self._context, args))
        self._sources += [RecorderKeeper(machine, store), self._kept]

    def run(self) -> int:
        """Serve. Returns 0 when the input ends, which is how the console, or its connection, says goodbye."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.set_blocking(self._out, False)
        mark = ours.register("agent")
        self._send({"t": "hello", "hello": self._hello()})
        if homeless():
            self._send({"t": "note", "level": "warn", "text": homeless()})
        try:
            while self._turn():
                pass
        except BrokenPipeError:
            pass
        finally:
            for source in self._sources:
                source.close()
            ours.forget(mark)
        return 0

    def _hello(self) -> Hello:
        uid = os.getuid()
        return Hello(
            protocol=PROTOCOL,
            nonce=self._nonce,
            hostname=socket.gethostname(),
            user=procfs.user_name(uid),
            uid=uid,
            boot_id=procfs.boot_id(),
            python=platform.python_version(),
            system="%s %s" % (platform.system(), platform.release()),
            agent_pid=os.getpid(),
            virtual=self._machine.virtual,
        )

    def _turn(self) -> bool:
        readers: List[int] = [self._in]
        for source in self._sources:
            readers += source.filenos()
        due = min(source.due() for source in self._sources)
        writers = [self._out] if self._unsent else []
        ready, writable, _ = select.select(readers, writers, [], max(0.0, min(due - time.monotonic(), 60.0)))
        if writable:
            self._flush()
        if self._in in ready and not self._read():
            return False
        self._step(set(ready))
        return True

    def _step(self, ready: Set[int]) -> None:
        for source in self._sources:
            for message in source.step(ready):
                self._send(message)

    def _read(self) -> bool:
        try:
            data = os.read(self._in, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._received += data
        while b"\n" in self._received:
            line, self._received = self._received.split(b"\n", 1)
            if self._dropping:
                self._dropping = False
            elif line.strip():
                self._request(line)
        if len(self._received) > MAX_LINE_BYTES:
            self._received, self._dropping = b"", True
            self._send({"t": "note", "level": "warn", "text": "a request line was too long and was left out"})
        return True

    def _request(self, line: bytes) -> None:
        number: Any = None
        try:
            message = decode(line)
            number = message.get("id")
            operation = TABLE.get(str(message.get("op")))
            if operation is None:
                raise Refused("no-such-op", "this agent has no operation `%s`" % message.get("op"))
            args = message.get("args") or {}
            if operation.kept and self._kept.ask(number, operation.deadline_s, str(message["op"]), args):
                return
            if operation.deadline_s:
                self._workers.start(number, operation.deadline_s, lambda: operation.call(self._context, args))
            else:
                self._send(reply(number, operation.call(self._context, args)))
        except WireError as error:
            self._send({"t": "note", "level": "warn", "text": "a request could not be read: %s" % error})
        except Exception as error:  # whatever a request does, the next one is served
            self._send(refusal(number, error))

    def _send(self, message: Dict[str, Any]) -> None:
        if message["t"] == "telemetry" and len(self._unsent) > BACKLOG_BYTES:
            return
        try:
            self._unsent += encode(message)
        except WireError as error:
            self._unsent += encode(
                refusal(message["id"], Refused("too-large", str(error), "ask for less at a time"))
                if message["t"] == "reply"
                else {
                    "t": "note",
                    "level": "warn",
                    "text": "a message was too long and was left out: %s" % error,
                }
            )
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self._out, self._unsent[:65536])
            except BlockingIOError:
                return
            del self._unsent[:sent]
