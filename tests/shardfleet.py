"""A made-up fleet whose host has real shards: the agent's own operations on real files, each answer a message."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from backend.agent.nvml import NvmlDriver
from backend.agent.ops import TABLE, Context
from backend.agent.seam import DeviceTable, Machine
from backend.wire import MAX_LINE_BYTES, RUN_LIVE, decode, encode, reply
from tests.fakefleet import FakeFleet, config, make_run

if TYPE_CHECKING:
    from concurrent.futures import Future

    from backend.agent.runs import RunStore
    from backend.config import Stage
    from backend.wire import Run


class ShardFleet(FakeFleet):
    """Answers about shards and audits as a host would; `lines` are the sizes of its messages in bytes."""

    def __init__(self, out: str, store: RunStore | None = None) -> None:
        super().__init__(config(1))
        self.root = out
        self.lines: list[int] = []
        self.results: dict[str, Any] = {}
        self.hosts["gpu-01"].runs = {"extract-1": make_run("extract-1", "extract", "exited", out_dir=out, exit_code=0)}
        machine = Machine(NvmlDriver, DeviceTable, [sys.executable, "-m", "backend.agent.main"])
        self._context = Context(machine, store)  # type: ignore[arg-type]  # only a deletion asks for runs

    def _op(self, name: str, op: str, **args: Any) -> Future[Any]:
        def call() -> Any:
            line = encode(reply(1, TABLE[op].call(self._context, args)))
            self.lines.append(len(line))
            assert len(line) <= MAX_LINE_BYTES
            return decode(line)["result"]

        return self._answer(name, *args.values(), value=call)

    def list_shards(self, host: str, path: str, offset: int = 0, since: float = 0.0) -> Future[dict[str, Any]]:
        """List a page of a real folder."""
        return self._op("list_shards", "shards.list", path=path, offset=offset, since=since)

    def show_shard(self, host: str, path: str, values: bool = False) -> Future[dict[str, Any]]:
        """Show a real file."""
        return self._op("show_shard", "shards.show", path=path, values=values)

    def shard_lengths(self, host: str, path: str) -> Future[dict[str, Any]]:
        """Read the lengths of a real folder."""
        return self._op("shard_lengths", "shards.lengths", path=path)

    def audit(self, host: str, stage: Stage) -> Future[Run]:
        """Start an audit, which the test lets progress."""

        def begin() -> Run:
            run = make_run("audit-1", "audit", argv=["agent", "audit", stage.folder])
            self.hosts[host].runs[run.id] = run
            return run

        return self._answer("audit", host, stage.folder, value=begin)

    def audit_result(self, host: str, run_id: str) -> Future[dict[str, Any]]:
        """Answer with the summary that the test set."""
        return self._answer("audit_result", host, run_id, value=lambda: self.results[run_id]["summary"])

    def audit_faults(self, host: str, run_id: str, offset: int = 0, code: str = "") -> Future[dict[str, Any]]:
        """Answer with a page of a hundred of the findings that the test set: `found` while it runs, then `list`."""

        def page() -> dict[str, Any]:
            live = self.hosts[host].runs[run_id].state in RUN_LIVE
            known = self.results.get(run_id, {}).get("found" if live else "list", [])
            found = [fault for fault in known if not code or fault["code"] == code]
            end = offset + 100
            at = min(end, len(found))
            return {"faults": found[offset:end], "next": end if end < len(found) else None, "at": at, "live": live}

        return self._answer("audit_faults", host, run_id, offset, value=page)

    def retire_plan(self, host: str, path: str) -> Future[dict[str, Any]]:
        """Plan the deletion of a real folder below `root`."""
        return self._op("retire_plan", "retire.plan", path=path, roots=[self.root], other_users=False)

    def retire(self, host: str, path: str, digest: str) -> Future[Run]:
        """Delete a real folder, by a real run."""

        def begin() -> Run:
            args = {"path": path, "roots": [self.root], "other_users": False, "digest": digest, "id": "retire-1"}
            run: Run = TABLE["retire.start"].call(self._context, args)
            self.hosts[host].runs[run.id] = run
            return run

        return self._answer("retire", host, path, value=begin)

    def retire_receipt(self, host: str, run_id: str) -> Future[dict[str, Any]]:
        """Read the receipt of a deletion."""
        return self._op("retire_receipt", "retire.get", id=run_id)
