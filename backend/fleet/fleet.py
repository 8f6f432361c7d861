"""The Fleet: its own thread and loop, one link a host, the newest state of each, and every action as a future."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from backend.config import Config, ConfigError, Stage
from backend.fleet.evidence import Evidence
from backend.fleet.feed import Feed
from backend.fleet.flights import Flights
from backend.fleet.gpuresetting import GpuResetting
from backend.fleet.launching import SHORT_S, Launching, new_id
from backend.fleet.retiring import Retiring
from backend.fleet.state import Event, HostState, ResetState, ShardListing, host_event
from backend.link import Archive, Handshakes, HostKey, Link, LinkState, LinkStatus, pack_agent
from backend.wire import RUN_LIVE, Gate, Plan, Receipt, Refused, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

VERIFY_S = 130.0
SCAN_S = 910.0
RESET_S = 900.0
"""How long an answer is waited for, in seconds: a little over the agent's own deadlines, which say more."""


class Fleet(Launching, Retiring, GpuResetting, Evidence):
    """Many hosts as one stream. Start it, read `hosts`, call actions; every method is safe from any thread.

    Actions return a concurrent.futures.Future. It raises `wire.Refused` where the host declined with a reason,
    `link.LinkLost` where the connection ended first, and ConfigError for a host or stage that is not configured.
    What changes something is done at most once. `archives` gives the agent that a host is sent: the real one, except
    in the demo. `listener` is called from the Fleet's thread for each Event.
    """

    def __init__(
        self,
        config: Config,
        *,
        archives: Callable[[str], Archive] | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> None:
        self.config = config
        self.hosts = {name: HostState(name, host) for name, host in config.hosts.items()}
        self.listener = listener
        self._archives = archives
        self._links: dict[str, Link] = {}
        self._changed = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="eightzeros-fleet", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self.flights = Flights(self._request, self._submit)

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and connect to every host."""
        self._thread.start()
        self._submit(self._connect()).result(30)

    def stop(self) -> None:
        """Close every link and end the thread. Runs and resets on the hosts go on."""
        if not self._thread.is_alive():
            self._loop.close()
            return
        self._submit(self._disconnect()).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _connect(self) -> None:
        handshakes = Handshakes()
        real = pack_agent() if self._archives is None else None
        for name, host in self.hosts.items():
            feed = Feed(host, self._told, partial(self._follow_reset, host))
            archive = self._archives(name) if self._archives else real
            assert archive is not None
            link = Link(
                name, host.config, archive, on_message=feed.message, on_status=self._status(host, feed),
                known_hosts=Path(self.config.console.known_hosts) if self.config.console.known_hosts else None,
                handshakes=handshakes,
            )  # fmt: skip
            self._links[name] = link
            self._tasks.append(self._loop.create_task(link.run(), name=f"link {name}"))

    async def _disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _status(self, host: HostState, feed: Feed) -> Callable[[LinkStatus], None]:
        def changed(status: LinkStatus) -> None:
            was_live = host.link.state is LinkState.LIVE
            feed.status(status)
            if status.state is LinkState.LIVE and not was_live:
                self._tasks.append(self._loop.create_task(self._catch_up(host), name=f"catch up {host.name}"))

        return changed

    def _follow_reset(self, host: HostState, run_id: str) -> None:
        """Fetch the receipt of a reset at its end, although nobody waits for it: the console shows the verdict."""

        async def follow() -> None:
            try:
                await self._reset_result(host, run_id, RESET_S)
            except (Refused, ConnectionError, TimeoutError) as error:
                self._told(host_event(host, "bad", str(error)))

        self._tasks.append(self._loop.create_task(follow(), name=f"reset {run_id}"))

    async def _catch_up(self, host: HostState) -> None:
        """Ask a host that has just come (back) for the runs it holds: the console missed what happened."""
        try:
            runs = msgspec.convert(await self._links[host.name].request("runs.list"), list[Run])
        except (Refused, ConnectionError, TimeoutError, msgspec.ValidationError):
            return  # it is asked again when the link is live again
        host.runs = {run.id: run for run in runs}
        for run in runs:
            if run.stage == "reset" and run.state in RUN_LIVE:
                self._follow_reset(host, run.id)
        host.caught_up = True
        host.revision += 1
        self._told(None)

    def _told(self, event: Event | None) -> None:
        """Take note that a host changed: waiters look again, and the listener hears of an event."""
        self._loop.create_task(self._wake())
        if event is not None and self.listener is not None:
            self.listener(event)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], T | None], timeout_s: float) -> Future[T]:
        """Wait until `condition` returns something true, looking whenever a host changes. Raises TimeoutError."""
        return self._submit(self._wait(condition, timeout_s))

    async def _wait(self, condition: Callable[[], T | None], timeout_s: float) -> T:
        async with asyncio.timeout(timeout_s), self._changed:
            while not (value := condition()):
                await self._changed.wait()
            return value

    def ready(self, name: str, timeout_s: float = 30.0) -> Future[HostState]:
        """Wait until a host has told what GPUs it has and how they are, or is refused. Raises TimeoutError."""
        host = self._host(name)

        def told() -> HostState | None:
            if host.link.state is LinkState.REFUSED:
                return host
            if host.inventory is None or not host.inventory.gpus:
                return host if host.inventory else None
            sampled = {gpu.index for gpu in host.telemetry.gpus} if host.telemetry else set()
            return host if sampled.issuperset(host.gpu_indices) else None

        return self.wait(told, timeout_s)

    # --- actions ---------------------------------------------------------------------------------------------------

    def plan_reset(self, name: str) -> Future[Plan]:
        """Ask who would be killed and who spared."""
        return self._ask(name, "reset.plan", Plan, SHORT_S, self._policy(name))

    def start_reset(self, name: str, plan: Plan) -> Future[Run]:
        """Start the reset that the operator confirmed; refused where the plan no longer holds."""
        return self._submit(self._start_reset(self._host(name), plan))

    async def _start_reset(self, host: HostState, plan: Plan) -> Run:
        args = {"digest": plan.digest, **self._policy(host.name)}
        return await self._begin_reset(host, "reset.start", args, new_id("reset"), SHORT_S, plan)

    async def _begin_reset(
        self, host: HostState, op: str, args: dict[str, Any], run_id: str, timeout_s: float, plan: Plan | None = None
    ) -> Run:
        host.reset = ResetState(plan=plan, running=True, started_at=time.time(), run_id=run_id)
        args = {"id": run_id, **args}
        try:
            answer = await self._links[host.name].request_once(
                op, args, find=("runs.get", {"id": run_id}), timeout_s=timeout_s
            )
        except BaseException:
            host.reset.running = False
            raise
        run = msgspec.convert(answer, Run)
        host.runs[run.id] = run
        # The run is known from here on, so its first message is no news and would start nobody who waits for the end.
        self._follow_reset(host, run.id)
        return run

    def reset_result(self, name: str, run_id: str, timeout_s: float = RESET_S) -> Future[Receipt]:
        """Wait for the end of a reset, across lost connections, and return its receipt."""
        return self._submit(self._reset_result(self._host(name), run_id, timeout_s))

    async def _reset_result(self, host: HostState, run_id: str, timeout_s: float) -> Receipt:
        def ended() -> Run | None:
            run = host.runs.get(run_id)
            return run if run and run.state not in RUN_LIVE and host.link.state is LinkState.LIVE else None

        run = await self._wait(ended, timeout_s)
        try:
            receipt = msgspec.convert(await self._links[host.name].request("receipts.get", {"id": run_id}), Receipt)
        except Refused as error:
            host.reset.running = False
            reason = run.reason or f"it ended with {run.exit_code}"
            raise Refused(error.code, f"the reset left no receipt: {reason}", f"eightzeros logs {run_id}") from None
        self._settle(host, receipt)
        return receipt

    def verify(self, name: str, cuda_test: bool = False) -> Future[Receipt]:
        """Judge every GPU without killing anything; with `cuda_test` a small CUDA program runs on each free one."""
        return self._submit(self._verify(self._host(name), cuda_test))

    async def _verify(self, host: HostState, cuda_test: bool) -> Receipt:
        args = {**self._policy(host.name), "cuda_test": cuda_test}
        answer = await self._links[host.name].request("reset.verify", args, timeout_s=VERIFY_S)
        receipt = msgspec.convert(answer, Receipt)
        self._settle(host, receipt)
        return receipt

    def _settle(self, host: HostState, receipt: Receipt) -> None:
        host.reset.receipt, host.reset.running = receipt, False
        host.verdicts = {gpu.index: gpu for gpu in receipt.after}
        host.revision += 1
        self._told(None)

    def doctor(self, name: str) -> Future[list[Gate]]:
        """Ask what works on a host, what does not, and what to do about it; nothing is changed there."""
        return self._ask(name, "host.doctor", list[Gate], VERIFY_S)

    def record_baseline(self, name: str) -> Future[dict[str, Any]]:
        """Record what each GPU shows when nothing holds it; refused where something does."""
        return self._ask(name, "baseline.record", dict[str, Any], SHORT_S)

    def baseline(self, name: str) -> Future[dict[str, Any]]:
        """Return the recorded baseline."""
        return self._ask(name, "baseline.show", dict[str, Any], SHORT_S)

    def audit_result(self, name: str, run_id: str) -> Future[dict[str, Any]]:
        """Return the summary of an audit that has ended (docs/audit.md); refused `not-found` where it left none."""
        return self._ask(name, "audits.get", dict[str, Any], SHORT_S, {"id": run_id})

    def audit_faults(self, name: str, run_id: str, offset: int = 0, code: str = "") -> Future[dict[str, Any]]:
        """Return {faults, next}: a page of an audit's findings, of one kind or of all."""
        args = {"id": run_id, "offset": offset, "code": code}
        return self._ask(name, "audits.faults", dict[str, Any], SHORT_S, args)

    def stop_run(self, name: str, run_id: str) -> Future[Run]:
        """Ask a run to finish what is in flight and end; what is left after its grace is killed."""
        return self._ask(name, "runs.stop", Run, SHORT_S, {"id": run_id})

    def run_ended(self, name: str, run_id: str, timeout_s: float) -> Future[Run]:
        """Wait until a run has ended."""
        host = self._host(name)

        def ended() -> Run | None:
            run = host.runs.get(run_id)
            return run if run and run.state not in RUN_LIVE else None

        return self.wait(ended, timeout_s)

    def log(self, name: str, run_id: str, offset: int = -1, limit: int = 65536) -> Future[dict[str, Any]]:
        """Read a piece of a run's log: {offset, next, size, text}; offset -1 reads the end."""
        return self._ask(name, "runs.log", dict[str, Any], SHORT_S, {"id": run_id, "offset": offset, "limit": limit})

    def list_shards(self, name: str, path: str, offset: int = 0, since: float = 0.0) -> Future[ShardListing]:
        """List a page of a folder of shards on the host: from an entry on, or those modified since a wall time."""
        args = {**self._path(name, path), "offset": offset, "since": since}
        return self._ask(name, "shards.list", ShardListing, SHORT_S, args)

    def shard_lengths(self, name: str, path: str) -> Future[dict[str, Any]]:
        """Return how long the sequences of a folder of shards are (docs/architecture.md, `shards.lengths`)."""
        return self._ask(name, "shards.lengths", dict[str, Any], SHORT_S, self._path(name, path))

    def show_shard(self, name: str, path: str, values: bool = False, only: str = "") -> Future[dict[str, Any]]:
        """Show a shard's tensors; with `values` also statistics over a sample of those whose key matches `only`."""
        args = {**self._path(name, path), "values": values, "only": only}
        return self._ask(name, "shards.show", dict[str, Any], SHORT_S, args)

    def scan_shard(
        self, name: str, path: str, deep: bool = True, values: bool = False, only: str = "", all_values: bool = False
    ) -> Future[dict[str, Any]]:
        """Show a shard after reading all of it: checksums and lost pages, or statistics over every value."""
        args = {**self._path(name, path), "deep": deep, "values": values, "only": only, "all_values": all_values}
        return self._ask(name, "shards.scan", dict[str, Any], SCAN_S, args)

    def repair_shard(self, name: str, path: str, out: str) -> Future[dict[str, Any]]:
        """Write a mended copy of a cut torch file on the host; refused where a tensor is not whole."""
        return self._ask(name, "shards.repair", dict[str, Any], SCAN_S, {**self._path(name, path), "out": out})

    def trust(self, name: str, key: HostKey) -> Future[None]:
        """Trust the key that a new host offered, and connect."""
        return self._submit(self._soon(lambda: self._links[self._host(name).name].trust(key)))

    def retry(self, name: str) -> Future[None]:
        """Try a lost or refused host again at once."""
        return self._submit(self._soon(lambda: self._links[self._host(name).name].retry()))

    # --- parts -----------------------------------------------------------------------------------------------------

    def _host(self, name: str) -> HostState:
        if name not in self.hosts:
            raise ConfigError(f"there is no host `{name}` in the configuration; hosts: {', '.join(self.hosts)}")
        return self.hosts[name]

    def _stage(self, name: str) -> Stage:
        if name not in self.config.stages:
            known = ", ".join(self.config.stages) or "none"
            raise ConfigError(f"there is no stage `{name}` in the configuration; stages: {known}")
        return self.config.stages[name]

    def _policy(self, name: str) -> dict[str, Any]:
        host = self._host(name).config
        return {"other_users": host.other_users, "accept_limited": host.accept_limited, "cuda_test": host.cuda_test}

    def _path(self, name: str, path: str) -> dict[str, Any]:
        return {"path": path, "roots": self._host(name).config.roots}

    def _ask(
        self, name: str, op: str, kind: type[T], timeout_s: float, args: dict[str, Any] | None = None
    ) -> Future[T]:
        async def ask() -> T:
            return msgspec.convert(await self._request(name, op, args or {}, timeout_s), kind)

        self._host(name)
        return self._submit(ask())

    async def _request(self, name: str, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        return await self._links[self._host(name).name].request(op, args, timeout_s=timeout_s)

    async def _soon(self, act: Callable[[], None]) -> None:
        act()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
