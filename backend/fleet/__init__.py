"""Fleet: many hosts as one stream of events, and the actions on them."""

from backend.fleet.fleet import Fleet
from backend.fleet.state import Badge, Event, HostState, ResetState, badge
from backend.link.status import HostKey, LinkState, LinkStatus
from backend.stages import ChainError, chain_names

__all__ = [
    "Badge",
    "ChainError",
    "Event",
    "Fleet",
    "HostKey",
    "HostState",
    "LinkState",
    "LinkStatus",
    "ResetState",
    "badge",
    "chain_names",
]
