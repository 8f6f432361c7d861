"""Launches: stages, audits, watches and chains, each a detached run that is started at most once."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from backend.link import pack_extractor
from backend.stages import EXTRACTOR, build_spec, chain_order, chain_spec, requirements
from backend.wire import CHAIN_ENV, Gate, Pipeline, Run, RunSpec, plain

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

    from backend.config import Config, Stage
    from backend.fleet.state import HostState
    from backend.link import Link

T = TypeVar("T")

SHORT_S = 70.0
"""How long an answer is waited for, in seconds: a little over the agent's own deadline, which says more."""

GATES_S = 130.0


class Launching:
    """The part of a Fleet that starts things."""

    config: Config
    _links: dict[str, Link]

    if TYPE_CHECKING:

        def _host(self, name: str) -> HostState: ...
        def _stage(self, name: str) -> Stage: ...
        def _policy(self, name: str) -> dict[str, Any]: ...
        def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]: ...
        def _ask(
            self, name: str, op: str, kind: type[T], timeout_s: float, args: dict[str, Any] | None = None
        ) -> Future[T]: ...

    def gates(self, name: str, stage: str) -> Future[list[Gate]]:
        """Check on the host what a stage needs, before anything is started."""
        args = {"requirements": requirements(self._stage(stage), stage), **self._policy(name)}
        return self._ask(name, "gates.check", list[Gate], GATES_S, args)

    def launch(self, name: str, stage: str, force: str = "") -> Future[Run]:
        """Launch a stage as a detached run; refused by a closed gate unless `force` gives a reason, which is kept."""
        spec = build_spec(stage, self._stage(stage), new_id(stage), force, self._host(name).config.roots)
        return self.start_run(name, spec, requirements(self._stage(stage), stage))

    def audit(self, name: str, stage: Stage) -> Future[Run]:
        """Audit a folder of shards as a detached run; the stage says which, and how."""
        roots = self._host(name).config.roots
        return self.start_run(name, build_spec("audit", stage, new_id("audit"), roots=roots), requirements(stage))

    def run_chain(self, name: str, start: str = "", force: str = "") -> Future[Run]:
        """Start the chain of a host, from a step on; it goes on there by itself. Raises ChainError for no such step."""
        order = chain_order(self.config, name, start, self._policy(name), force)
        return self._submit(self._run_chain(self._host(name), order))

    async def _run_chain(self, host: HostState, order: dict[str, Any]) -> Run:
        place = ""
        for step in order["steps"][order["start"] :]:
            argv = step.get("spec", {}).get("argv", [])
            if EXTRACTOR in argv:
                place = place or await self._links[host.name].ship(pack_extractor())
                step["spec"]["argv"] = [place if word == EXTRACTOR else word for word in argv]
        return await self._start_run(host, chain_spec(order, new_id("pipeline")), {"others": {"stage": ""}})

    def plan_chain(self, name: str, start: str = "") -> Future[dict[str, Any]]:
        """Return {steps, gates}: every command of a chain as it would run on the host. Starts and ships nothing."""
        order = chain_order(self.config, name, start, self._policy(name))
        spec, archive = chain_spec(order, new_id("pipeline")), pack_extractor()
        args = {"order": spec.env[CHAIN_ENV], "archive": [archive.name, archive.sha256]}
        return self._ask(name, "pipelines.plan", dict[str, Any], SHORT_S, args)

    def chain(self, name: str, run_id: str) -> Future[Pipeline]:
        """Return how a chain stands on its host, whatever became of its driver."""
        return self._ask(name, "pipelines.get", Pipeline, SHORT_S, {"id": run_id})

    def start_run(self, name: str, spec: RunSpec, needs: dict[str, Any] | None = None) -> Future[Run]:
        """Start a detached run, at most once for its id."""
        return self._submit(self._start_run(self._host(name), spec, needs or {}))

    async def _start_run(self, host: HostState, spec: RunSpec, needs: dict[str, Any]) -> Run:
        link = self._links[host.name]
        if EXTRACTOR in spec.argv:
            folder = await link.ship(pack_extractor())
            spec.argv = [folder if word == EXTRACTOR else word for word in spec.argv]
        args = {"spec": plain(spec), "requirements": needs, **self._policy(host.name)}
        return await self._once(host, "runs.start", args, spec.id)

    def adopt(self, name: str, **what: Any) -> Future[Run]:
        """Watch a run that was not started here (docs/architecture.md, `runs.adopt`) by a run that only looks."""
        host = self._host(name)
        args = {**what, "id": new_id("adopt"), "roots": host.config.roots}
        return self._submit(self._once(host, "runs.adopt", args, args["id"]))

    async def _once(self, host: HostState, op: str, args: dict[str, Any], run_id: str) -> Run:
        find = ("runs.get", {"id": run_id})
        answer = await self._links[host.name].request_once(op, args, find=find, timeout_s=GATES_S)
        run = msgspec.convert(answer, Run)
        host.runs.setdefault(run.id, run)
        host.revision += 1
        return run


def new_id(stage: str) -> str:
    """Make a run's id: its stage, the time to the second, and enough chance to never repeat."""
    return f"{stage[:32]}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
