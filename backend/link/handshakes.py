"""Opening many connections without being turned away: few handshakes at once, one connection to each bastion.

sshd drops new connections at random from ten unauthenticated ones on (MaxStartups 10:30:100): of 64 opened at
once 21 to 27 failed; over one shared bastion connection, five at a time, none did (facts: transport, 1.3 and
1.4).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from backend.link.trouble import Trouble

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import asyncssh

    from backend.link.settings import Settings

AT_ONCE = 8
PER_BASTION = 5
GOODBYE_S = 1.0


class Connection:
    """An open connection, and the bastion that it goes through."""

    def __init__(self, ssh: asyncssh.SSHClientConnection, bastion: _Bastion | None) -> None:
        self.ssh, self._bastion = ssh, bastion

    async def close(self) -> None:
        """Close it, abruptly where the other side does not answer, and let the bastion go."""
        self.ssh.close()
        try:
            await asyncio.wait_for(self.ssh.wait_closed(), GOODBYE_S)
        except TimeoutError:
            self.ssh.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ssh.wait_closed(), GOODBYE_S)
        finally:
            bastion, self._bastion = self._bastion, None
            if bastion is not None:
                await bastion.release()


class Handshakes:
    """Shared by the links of one event loop."""

    def __init__(self, at_once: int = AT_ONCE, per_bastion: int = PER_BASTION) -> None:
        self._slots, self._per_bastion = asyncio.Semaphore(at_once), per_bastion
        self._bastions: dict[tuple[Settings, ...], _Bastion] = {}

    async def open(self, chain: Sequence[Settings], known_hosts: Path) -> Connection:
        """Open a connection to the last of a chain through the others. Raises Trouble."""
        from backend.link.ssh import connect

        *hops, target = chain
        if not hops:
            async with self._slots:
                return Connection(await connect(target, known_hosts, None), None)
        # The bastion first, and only then a slot: else eight hosts could hold every slot while waiting for
        # it.
        bastion = self._bastions.setdefault(tuple(hops), _Bastion(self, hops, known_hosts))
        tunnel = await bastion.acquire()
        try:
            async with bastion.slots, self._slots:
                return Connection(await connect(target, known_hosts, tunnel), bastion)
        except BaseException:
            await bastion.release()
            raise

    def bastion_slots(self) -> asyncio.Semaphore:
        """Make the limit of one bastion."""
        return asyncio.Semaphore(self._per_bastion)

    def forget_refusals(self) -> None:
        """Let bastions that refused us be tried again: the operator has done something about it."""
        for bastion in self._bastions.values():
            bastion.refusal = None


class _Bastion:
    """One shared connection, open while somebody uses it. A refusal is remembered: 64 hosts must not repeat
    it."""

    def __init__(self, handshakes: Handshakes, hops: Sequence[Settings], known_hosts: Path) -> None:
        self.slots = handshakes.bastion_slots()
        self.refusal: Trouble | None = None
        self._handshakes, self._hops, self._known_hosts = handshakes, hops, known_hosts
        self._opening: asyncio.Task[Connection] | None = None
        self._users = 0

    async def acquire(self) -> asyncssh.SSHClientConnection:
        """Return the connection, opening it where needed; all who wait for one attempt share its outcome."""
        if self.refusal is not None:
            raise self.refusal
        self._users += 1
        try:
            if self._opening is None or self._is_over(self._opening):
                self._opening = asyncio.create_task(self._handshakes.open(self._hops, self._known_hosts))
            return (await asyncio.shield(self._opening)).ssh
        except BaseException as error:
            if isinstance(error, Trouble) and error.refused:
                self.refusal = error
            await self.release()
            raise

    @staticmethod
    def _is_over(opening: asyncio.Task[Connection]) -> bool:
        if not opening.done():
            return False
        return opening.cancelled() or opening.exception() is not None or opening.result().ssh.is_closed()

    async def release(self) -> None:
        """Let it go; the last user closes it."""
        self._users -= 1
        opening = self._opening
        if self._users or opening is None:
            return
        self._opening = None
        opening.cancel()
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(outcome, Connection):
            await outcome.close()
