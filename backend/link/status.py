"""What a link says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LinkState(StrEnum):
    """The states of a connection. Lost is retried; refused waits for the operator (DESIGN section 4)."""

    IDLE = "idle"
    CONNECTING = "connecting"
    BOOTSTRAPPING = "bootstrapping"
    LIVE = "live"
    STALE = "stale"  # connected, but three ticks of telemetry did not come
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True)
class HostKey:
    """The key that a host offered and that is not trusted. A changed or revoked key is never accepted from
    here.

    `host` and `port` are what a line of known_hosts would name (an alias has port 22); `key` is the key as it
    stands in such a line.
    """

    host: str
    port: int
    algorithm: str
    fingerprint: str  # as ssh prints it: SHA256:...
    verdict: str  # unknown, changed, revoked
    key: str = ""


@dataclass(frozen=True)
class LinkStatus:
    """A state with its reason; `code` is for programs.

    Refused: host-key, auth, no-python, old-python, ssh-config, no-room. Lost: unknown-host, unreachable,
    timeout, silent, ended, agent-crashed, no-agent, fault. `retry_in_s` is set while a lost host waits for its next
    attempt.
    """

    state: LinkState
    reason: str = ""
    code: str = ""
    hint: str = ""
    retry_in_s: float | None = None
    host_key: HostKey | None = None
    settings_from: str = ""  # "ssh -G", "asyncssh" or "this machine"
