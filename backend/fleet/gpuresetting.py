"""Resets of GPUs by their driver: what one needs, and its start once confirmed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from backend.fleet.launching import GATES_S, new_id
from backend.wire import GpuResetPlan, Run

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from concurrent.futures import Future

    from backend.fleet.state import HostState
    from backend.wire import Plan

T = TypeVar("T")


class GpuResetting:
    """The part of a Fleet that resets GPUs. `because` is the operator's own reason where nothing asks for a reset;
    `in_vm` the operator's word that this virtual machine may reset the GPUs that it was given."""

    if TYPE_CHECKING:

        def _host(self, name: str) -> HostState: ...
        def _policy(self, name: str) -> dict[str, Any]: ...
        def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]: ...
        def _ask(
            self, name: str, op: str, kind: type[T], timeout_s: float, args: dict[str, Any] | None = None
        ) -> Future[T]: ...
        async def _begin_reset(
            self,
            host: HostState,
            op: str,
            args: dict[str, Any],
            run_id: str,
            timeout_s: float,
            plan: Plan | None = None,
        ) -> Run: ...

    def plan_gpu_reset(
        self, name: str, gpus: Sequence[str], because: str = "", in_vm: bool = False
    ) -> Future[GpuResetPlan]:
        """Ask what a reset of GPUs (indices or UUIDs) needs, and what of it is met; nothing is changed."""
        args = {"gpus": list(gpus), "because": because, "in_vm": in_vm}
        return self._ask(name, "gpureset.plan", GpuResetPlan, GATES_S, args)

    def start_gpu_reset(self, name: str, gpus: Sequence[str], because: str = "", in_vm: bool = False) -> Future[Run]:
        """Reset GPUs as a detached run; refused `precondition` where a need is not met. `reset_result` has its end."""
        args = {"gpus": list(gpus), "because": because, "in_vm": in_vm, **self._policy(name)}
        return self._submit(self._begin_reset(self._host(name), "gpureset.start", args, new_id("gpu-reset"), GATES_S))
