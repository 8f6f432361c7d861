"""A console that may look but not touch: the fleet behind it refuses what would change a host."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from backend.wire import Refused

if TYPE_CHECKING:
    from tui.console import FleetLike

READS = frozenset({
    "config", "flights", "listener", "hosts", "start", "stop", "plan_reset", "verify", "gates", "log", "list_shards",
    "show_shard", "shard_lengths", "audit_result", "audit_faults", "retire_plan", "retire_receipt",
})  # fmt: skip
"""What a console that may only look asks of a fleet. What is not named here is refused, also what is added later."""

WHY = "this console may only look"
HINT = "start it with --allow-actions, or use a terminal"


class ReadOnlyFleet:
    """A fleet of which only `READS` are passed on; every other action fails before it reaches a host."""

    def __init__(self, fleet: FleetLike) -> None:
        object.__setattr__(self, "_fleet", fleet)

    def __getattr__(self, name: str) -> Any:
        found = getattr(object.__getattribute__(self, "_fleet"), name)
        if name in READS:
            return found
        if callable(found):
            return _refuse
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "listener":
            raise AttributeError(f"{name}: {WHY}")
        setattr(object.__getattribute__(self, "_fleet"), name, value)


def _refuse(*args: object, **named: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(Refused("read-only", WHY, HINT))
    return future
