"""Deletions of old caches: their plan, their start once confirmed, and their receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from backend.fleet.launching import GATES_S, SHORT_S, new_id
from backend.stages import mentions

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

    from backend.config import Config
    from backend.fleet.state import HostState
    from backend.link import Link
    from backend.wire import Run

T = TypeVar("T")


class Retiring:
    """The part of a Fleet that deletes."""

    config: Config
    _links: dict[str, Link]

    if TYPE_CHECKING:

        def _host(self, name: str) -> HostState: ...
        def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]: ...
        async def _once(self, host: HostState, op: str, args: dict[str, Any], run_id: str) -> Run: ...
        def _ask(
            self, name: str, op: str, kind: type[T], timeout_s: float, args: dict[str, Any] | None = None
        ) -> Future[T]: ...

    def retire_plan(self, name: str, path: str) -> Future[dict[str, Any]]:
        """Ask what a deletion would delete (docs/retire.md); the stages of the configuration that name it are added."""
        return self._submit(self._retire_plan(name, path))

    async def _retire_plan(self, name: str, path: str) -> dict[str, Any]:
        link = self._links[self._host(name).name]
        plan: dict[str, Any] = await link.request("retire.plan", self._retire_args(name, path), timeout_s=GATES_S)
        stages = mentions(self.config.stages, name, plan["path"])
        said = [{"kind": "stage", "text": f"the stage `{stage}` names it as `{key}`"} for stage, key in stages]
        return {**plan, "refs": [*said, *plan["refs"]]}

    def retire(self, name: str, path: str, digest: str) -> Future[Run]:
        """Delete what was confirmed, as a detached run; refused where it is not as the digest says any more."""
        args = {**self._retire_args(name, path), "digest": digest, "id": new_id("retire")}
        return self._submit(self._once(self._host(name), "retire.start", args, args["id"]))

    def retire_receipt(self, name: str, run_id: str) -> Future[dict[str, Any]]:
        """Return the receipt of a deletion."""
        return self._ask(name, "retire.get", dict[str, Any], SHORT_S, {"id": run_id})

    def _retire_args(self, name: str, path: str) -> dict[str, Any]:
        host = self._host(name).config
        return {"path": path, "roots": host.retire_roots, "other_users": host.other_users}
