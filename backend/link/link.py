"""One host's link: connect, become live, stream, and connect again for as long as it is wanted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from backend.link import retry
from backend.link.channel import Channel, LocalChannel
from backend.link.handshakes import Handshakes
from backend.link.start import command_line, new_nonce, remote_command, start
from backend.link.status import LinkState, LinkStatus
from backend.link.trouble import LinkLost, Trouble
from backend.wire import Refused, WireError, decode, encode, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.config import Host
    from backend.link.bootstrap import Archive
    from backend.link.status import HostKey

STALE_S = 3.5
"""Three missed ticks of telemetry, which comes once a second, and half a tick for the road."""

SILENT_S = 30.0
"""After this long without a byte the connection is given up although SSH answers: the agent hangs."""

WOKEN_S = 3.0
"""How long after waking up the connection has to bring something before it is opened anew."""

WATCH_S = 0.5
NOTE_EVERY_S = 10.0
CHUNK_BYTES = 128 * 1024
LIVE = (LinkState.LIVE, LinkState.STALE)


def own_known_hosts() -> Path:
    """Return our own known_hosts, to which keys go that the operator accepts here."""
    return Path(platformdirs.user_data_dir("eightzeros", appauthor=False)) / "known_hosts"


class Link:
    """One host. `run` keeps it connected; requests may be made from the same event loop while it is live.

    `on_message` gets every message of the agent but replies, in order, and notes of the link's own;
    `on_status` every change of state. Both are called in the event loop and must not block. `malformed` counts
    the lines and messages that made no sense.
    """

    def __init__(
        self, name: str, host: Host, archive: Archive, *, on_message: Callable[[dict[str, Any]], None],
        on_status: Callable[[LinkStatus], None], known_hosts: Path | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:  # fmt: skip
        self.name, self.host, self.status = name, host, LinkStatus(LinkState.IDLE)
        self._archive, self._on_message, self._on_status = archive, on_message, on_status
        self._known_hosts = (known_hosts or own_known_hosts()).expanduser()
        self._handshakes = handshakes or Handshakes()
        self._channel: Channel | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self._kick, self._became_live = asyncio.Event(), asyncio.Event()
        self._telemetry_at: float | None = None
        self._heard_at = 0.0
        self.malformed, self._noted_at, self._unnoted = 0, float("-inf"), 0

    # --- the life of a connection ---

    async def run(self) -> None:
        """Stay connected until cancelled. Leaves no agent behind that can still be reached."""
        backoff = retry.Backoff()
        try:
            while True:
                trouble, lived_s = await self._connect_once()
                backoff.ended(lived_s)
                delay_s = None if trouble.refused else backoff.next_s()
                self._set(trouble.status(delay_s))
                await retry.pause(delay_s, self._kick)
        finally:
            self._set(LinkStatus(LinkState.IDLE))

    def retry(self) -> None:
        """Try again at once, where the link is lost or refused."""
        if self.status.state in (LinkState.LOST, LinkState.REFUSED):
            self._handshakes.forget_refusals()
            self._kick.set()

    def trust(self, host_key: HostKey) -> None:
        """Add the key that the operator has compared to our known_hosts, and connect.

        Raises ValueError where it is not the unknown key that the host offered last, OSError where the file
        cannot be written.
        """
        from backend.link.hostkeys import add

        if host_key != self.status.host_key or host_key.verdict != "unknown" or not host_key.key:
            shown = f"{host_key.algorithm} key of {host_key.host}"
            raise ValueError(f"the {shown} is not one that can be accepted here")
        add(self._known_hosts, host_key)
        self.retry()

    async def _connect_once(self) -> tuple[Trouble, float]:
        """Live through one connection. Returns why it ended and how many seconds it was live."""
        began: float | None = None
        try:
            channel, nonce = await self._open()
            self._channel = channel
            self._set(self._with(LinkState.BOOTSTRAPPING))
            hello = await start(channel, self._archive, self.host.python, nonce)
            began = self._heard_at = retry.monotonic()
            self._telemetry_at = None
            self._deliver(hello)
            self._set(self._with(LinkState.LIVE))
            self._became_live.set()
            trouble = await self._stream(channel)
        except Trouble as problem:
            trouble = problem
        except OSError as problem:
            trouble = Trouble("ended", f"the connection ended: {problem}")
        except Exception as problem:  # a fault of ours: shown and tried again, for a dead link would show nothing
            trouble = Trouble("fault", f"a fault of eightzeros: {type(problem).__name__}: {problem}")
        finally:
            await self._hang_up()
        return trouble, 0.0 if began is None else retry.monotonic() - began

    async def _open(self) -> tuple[Channel, str]:
        nonce = new_nonce()
        script = command_line(self._archive, self.host.python, nonce)
        if self.host.local:
            self._set(LinkStatus(LinkState.CONNECTING, settings_from="this machine"))
            return await LocalChannel.open(script), nonce
        from backend.link.settings import resolve  # asyncssh takes 0.2 s to import
        from backend.link.ssh import SshChannel

        self._set(LinkStatus(LinkState.CONNECTING))
        chain = await resolve(self.host)
        self._set(LinkStatus(LinkState.CONNECTING, settings_from=chain[-1].source))
        connection = await self._handshakes.open(chain, self._known_hosts)
        return await SshChannel.open(connection, remote_command(script)), nonce

    async def _hang_up(self) -> None:
        self._became_live.clear()
        channel, self._channel = self._channel, None
        for future in self._replies.values():
            if not future.done():
                future.set_exception(LinkLost(f"the connection to {self.name} ended before the answer came"))
        self._replies.clear()
        if channel is not None:
            await channel.close()

    async def _stream(self, channel: Channel) -> Trouble:
        """Deliver messages until the connection ends; say when telemetry stays away and when it is back."""
        watch = asyncio.create_task(self._watch())
        pump = asyncio.create_task(self._pump(channel))
        try:
            done, _ = await asyncio.wait((watch, pump), return_when=asyncio.FIRST_COMPLETED)
            return (pump if pump in done else watch).result()
        finally:
            for task in (watch, pump):
                task.cancel()
            await asyncio.gather(watch, pump, return_exceptions=True)

    async def _pump(self, channel: Channel) -> Trouble:
        dropped = channel.lines.dropped
        while (line := await channel.lines.next()) is not None:
            self._heard_at = retry.monotonic()
            if channel.lines.dropped != dropped:
                self._note(f"{channel.lines.dropped - dropped} line(s) over the limit were dropped")
                dropped = channel.lines.dropped
            if not line.strip():
                continue
            try:
                message = decode(line)
            except WireError as problem:
                self.malformed += 1
                self._note(f"a line that is no message: {problem}")
                continue
            self._take(message)
        words = channel.last_words()
        return Trouble("ended", f"the agent ended{': ' + words if words else ''}")

    async def _watch(self) -> Trouble:
        sleeper, woke_at = retry.Sleeper(), float("-inf")
        while True:
            await asyncio.sleep(WATCH_S)
            now = retry.monotonic()
            if sleeper.slept():
                woke_at = now
            if self._heard_at < woke_at < now - WOKEN_S:
                return Trouble("ended", "the connection did not survive the sleep of this machine")
            if self._telemetry_at is not None:
                late = now - self._telemetry_at > STALE_S
                if late and self.status.state is LinkState.LIVE:
                    self._set(self._with(LinkState.STALE, "no telemetry for three ticks"))
                elif not late and self.status.state is LinkState.STALE:
                    self._set(self._with(LinkState.LIVE))
            if now - self._heard_at > SILENT_S:
                return Trouble("silent", f"the agent has said nothing for {SILENT_S:.0f} s")

    # --- messages ---

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("t") == "telemetry":
            self._telemetry_at = retry.monotonic()
        if message.get("t") != "reply":
            self._deliver(message)
            return
        future = self._replies.pop(message.get("id", 0), None)
        if future is None or future.done():
            return  # the answer to a request that was given up
        if message.get("ok"):
            future.set_result(message.get("result"))
            return
        error = message.get("error")
        said = error if isinstance(error, dict) else {}
        code, text, hint = (printable(str(said.get(key, ""))) for key in ("code", "message", "hint"))
        future.set_exception(Refused(code or "failed", text or "the host gave no reason", hint))

    def _deliver(self, message: dict[str, Any]) -> None:
        try:
            self._on_message(message)
        except Exception as problem:  # a message that does not fit its record must not end the connection
            self.malformed += 1
            kind = printable(str(message.get("t")), 40)
            self._note(f"a message of kind `{kind}` was not understood: {problem}")

    def _note(self, text: str) -> None:
        """Send a note of our own, at most one in ten seconds; the next one counts those in between."""
        now = retry.monotonic()
        if now - self._noted_at < NOTE_EVERY_S:
            self._unnoted += 1
            return
        more = f" (and {self._unnoted} more)" if self._unnoted else ""
        self._noted_at, self._unnoted = now, 0
        with contextlib.suppress(Exception):  # the listener's own fault is what may be told here
            self._on_message({"t": "note", "level": "warn", "text": printable(text, 400) + more})

    def _set(self, status: LinkStatus) -> None:
        if status != self.status:
            self.status = status
            self._on_status(status)

    def _with(self, state: LinkState, reason: str = "") -> LinkStatus:
        return LinkStatus(state, reason=reason, settings_from=self.status.settings_from)

    # --- requests ---

    async def request(self, op: str, args: dict[str, Any] | None = None, *, timeout_s: float = 30.0) -> Any:
        """Ask the agent and return its answer.

        Raises wire.Refused for a refusal, LinkLost where the link is not live or ends first, TimeoutError,
        and wire.WireError for a request over MAX_LINE_BYTES.
        """
        channel = self._channel
        if channel is None or self.status.state not in LIVE:
            raise LinkLost(f"{self.name} is not connected ({self.status.state})")
        self._last_id += 1
        number = self._last_id
        line = encode({"id": number, "op": op, "args": args or {}})
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    channel.write(line)
                    await channel.drain()
                except (OSError, Trouble) as problem:
                    self._became_live.clear()  # it is not: the reader will see the end too
                    raise LinkLost(f"the connection to {self.name} ended: {problem}") from None
                return await future
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not answer `{op}` within {timeout_s:g} s") from None
        finally:
            self._replies.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # seen, where the write failed first

    async def request_once(
        self, op: str, args: dict[str, Any] | None, *,
        find: tuple[str, dict[str, Any]], timeout_s: float = 30.0,
    ) -> Any:  # fmt: skip
        """Ask for a change that must not happen twice, also when the connection ends before the answer.

        Then the link is awaited and `find` asked first: what it returns is the answer, and only where it is
        refused with `not-found` is the request sent again. Raises what `request` raises; LinkLost only where
        the link was not live to begin with, later TimeoutError.
        """
        if self.status.state not in LIVE:
            raise LinkLost(f"{self.name} is not connected ({self.status.state})")
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self.request(op, args, timeout_s=timeout_s)
                except LinkLost:
                    pass
                while True:
                    await self._became_live.wait()
                    try:
                        return await self.request(*find, timeout_s=timeout_s)
                    except LinkLost:
                        continue
                    except Refused as refusal:
                        if refusal.code != "not-found":
                            raise
                    try:
                        return await self.request(op, args, timeout_s=timeout_s)
                    except LinkLost:
                        continue
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not answer `{op}` within {timeout_s:g} s") from None

    async def ship(self, archive: Archive) -> str:
        """Put an archive on the host, unless it is there, and return its folder's path."""
        place = await self.request("archive.have", {"name": archive.name, "sha256": archive.sha256})
        for offset in range(0, len(archive.data), CHUNK_BYTES):
            if place:
                break
            piece = base64.b64encode(archive.data[offset : offset + CHUNK_BYTES]).decode()
            about = {"name": archive.name, "sha256": archive.sha256, "size": len(archive.data)}
            place = await self.request("archive.put", {**about, "offset": offset, "data": piece})
        if not isinstance(place, dict) or not isinstance(place.get("path"), str):
            raise Refused("bad-answer", f"the host did not say where `{archive.name}` lies")
        return str(place["path"])
