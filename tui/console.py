"""What the console asks of a fleet. `backend.fleet.Fleet` is one; the tests and the pictures bring another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from backend.config import Config, Stage
    from backend.fleet import Event, HostKey, HostState
    from backend.fleet.flights import Flights
    from backend.wire import Gate, Plan, Receipt, Run


class FleetLike(Protocol):
    """Hosts to look at and actions on them. Another thread replaces the values in `hosts`; they are only read here.

    Every action returns a Future at once and fails with a message for the operator.
    """

    config: Config
    flights: Flights
    listener: Callable[[Event], None] | None

    @property
    def hosts(self) -> dict[str, HostState]:
        """Return what is known of each host, by its name in the configuration."""

    def start(self) -> None:
        """Begin to connect."""

    def stop(self) -> None:
        """Close every connection; runs on the hosts go on."""

    def plan_reset(self, host: str) -> Future[Plan]:
        """Ask whom a reset would kill."""

    def start_reset(self, host: str, plan: Plan) -> Future[Run]:
        """Begin the confirmed reset; its events then appear in the host's state."""

    def verify(self, host: str) -> Future[Receipt]:
        """Verify the GPUs without a kill."""

    def record_baseline(self, host: str) -> Future[dict[str, Any]]:
        """Record what the idle GPUs hold as the host's baseline."""

    def gates(self, host: str, stage: str) -> Future[list[Gate]]:
        """Check what a launch needs."""

    def launch(self, host: str, stage: str, force: str = "") -> Future[Run]:
        """Launch a stage; `force` is the reason for a launch past a shut gate."""

    def stop_run(self, host: str, run_id: str) -> Future[Run]:
        """Stop a run."""

    def log(self, host: str, run_id: str, offset: int, limit: int = 65536) -> Future[dict[str, Any]]:
        """Read a piece of a run's log."""

    def list_shards(self, host: str, path: str, offset: int = 0, since: float = 0.0) -> Future[dict[str, Any]]:
        """List a page of a folder, or what was modified since a wall time."""

    def show_shard(self, host: str, path: str, values: bool = False) -> Future[dict[str, Any]]:
        """Read a shard's header; with `values` also a sample of its values."""

    def shard_lengths(self, host: str, path: str) -> Future[dict[str, Any]]:
        """Read how long a folder's sequences are."""

    def audit(self, host: str, stage: Stage) -> Future[Run]:
        """Audit a folder of shards."""

    def audit_result(self, host: str, run_id: str) -> Future[dict[str, Any]]:
        """Return the summary of an audit that has ended."""

    def audit_faults(self, host: str, run_id: str, offset: int = 0, code: str = "") -> Future[dict[str, Any]]:
        """Return a page of an audit's findings."""

    def retire_plan(self, host: str, path: str) -> Future[dict[str, Any]]:
        """Ask what a deletion would delete."""

    def retire(self, host: str, path: str, digest: str) -> Future[Run]:
        """Begin the confirmed deletion."""

    def retire_receipt(self, host: str, run_id: str) -> Future[dict[str, Any]]:
        """Return what a deletion has come to."""

    def trust(self, host: str, host_key: HostKey) -> Future[None]:
        """Accept an unknown host key and connect."""

    def retry(self, host: str) -> Future[None]:
        """Connect again now."""
