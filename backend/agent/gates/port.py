"""Whether a port of loopback is free, and if not, who listens on it."""

from __future__ import annotations

import socket

from backend.agent.listeners import owner
from backend.wire import Gate


def check(number: int) -> Gate:
    """Check that a server could be bound to 127.0.0.1 at this port."""
    name = "port %d" % number
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            return Gate(name, True, "free")
        except OSError as error:
            who = owner(number)
            text = "taken by %s" % who if who else "cannot be bound: %s" % error.strerror
            return Gate(name, False, text, "stop that, or choose another `port`")
