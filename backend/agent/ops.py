"""The operations that a console may ask for, by name. docs/architecture.md lists their arguments and results."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, NamedTuple, Type, TypeVar

from backend.agent import archives, launch
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import Refused, RunSpec, from_dict

T = TypeVar("T")


class Context(NamedTuple):
    """What operations work on."""

    machine: Machine
    store: RunStore


class Operation(NamedTuple):
    """How an operation is called. With a deadline (seconds) it runs in a worker; without, in the loop, at once.

    `kept` ones are asked again and again, and run in the worker that is kept; they must not use the context.
    """

    call: Callable[[Context, Dict[str, Any]], Any]
    deadline_s: float = 0.0
    kept: bool = False


def want(args: Dict[str, Any], name: str, kind: Type[T]) -> T:
    """Return an argument of the right type, or refuse naming it."""
    value = args.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused("bad-request", "`%s` must be %s, not %r" % (name, kind.__name__, value))
    return value


def inspectable(args: Dict[str, Any]) -> str:
    """Return the path that may be looked at: absolute, and inside the roots that the configuration allows."""
    path = os.path.expanduser(want(args, "path", str))
    if not os.path.isabs(path):
        raise Refused("bad-path", "`%s` is no absolute path" % path, "name the whole path on the host")
    roots = [os.path.realpath(os.path.expanduser(root)) for root in args.get("roots") or []]
    real = os.path.realpath(path)
    if roots and not any(os.path.commonpath([real, root]) == root for root in roots):
        raise Refused("outside-roots", "%s is outside the configured roots" % path, "roots: " + ", ".join(roots))
    return path


def _runs_list(context: Context, args: Dict[str, Any]) -> Any:
    return context.store.list()


def _runs_get(context: Context, args: Dict[str, Any]) -> Any:
    run = context.store.get(want(args, "id", str))
    if run is None:
        raise Refused("not-found", "there is no run `%s` on this host" % args["id"])
    return run


def _runs_start(context: Context, args: Dict[str, Any]) -> Any:
    spec = from_dict(RunSpec, want(args, "spec", dict))
    known = context.store.get(spec.id)
    if known is not None:
        return known
    return launch.start(context.machine, context.store, spec, _check(context, args))


def _runs_gates(context: Context, args: Dict[str, Any]) -> Any:
    return launch.gates_of(context.store.folder(want(args, "id", str)))


def _runs_adopt(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.adopt.start import prepare_adopt

    inspectable({"path": args.get("out"), "roots": args.get("roots")})
    known = context.store.get(want(args, "id", str))
    if known is not None:
        return known
    return launch.begin(context.machine, context.store, prepare_adopt(context.machine, args))


def _runs_stop(context: Context, args: Dict[str, Any]) -> Any:
    run = _runs_get(context, args)
    return context.store.stop(run.id, float(args.get("grace_s") or run.grace_s))


def _runs_log(context: Context, args: Dict[str, Any]) -> Any:
    limit = min(int(args.get("limit") or 65536), 65536)
    return context.store.log(_runs_get(context, args).id, int(args.get("offset", -1)), limit)


def _check(context: Context, args: Dict[str, Any]) -> List[Any]:
    limited = bool(args.get("accept_limited"))
    return launch.check(context.machine, context.store, args.get("requirements") or {}, limited)


def _doctor(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent import doctor

    return doctor.check(context.machine)


def _reset(name: str) -> Callable[[Context, Dict[str, Any]], Any]:
    def call(context: Context, args: Dict[str, Any]) -> Any:
        from backend.agent.reset import ops

        return getattr(ops, name)(context.machine, args)

    return call


def _flight(name: str) -> Callable[[Context, Dict[str, Any]], Any]:
    def call(context: Context, args: Dict[str, Any]) -> Any:
        from backend.agent.flight import ops

        return getattr(ops, name)(context.machine, args)

    return call


def _reset_start(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.reset.ops import prepare_start

    known = context.store.get(want(args, "id", str))
    if known is not None:
        return known
    return launch.begin(context.machine, context.store, prepare_start(context.machine, args))


def _gpu_reset_plan(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.reset.gpureset.ops import op_plan

    return op_plan(context.machine, args)


def _gpu_reset_start(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.reset.gpureset.ops import prepare_start

    known = context.store.get(want(args, "id", str))
    if known is not None:
        return known
    return launch.begin(context.machine, context.store, prepare_start(context.machine, args))


def _shards_list(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.listing import list_shards

    return list_shards(inspectable(args), int(args.get("offset") or 0), float(args.get("since") or 0.0))


def _shards_lengths(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.lengths import lengths

    return lengths(inspectable(args))


def _shards_show(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.show import show

    return show(inspectable(args), values=bool(args.get("values")), only=str(args.get("only") or ""))


def _shards_scan(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.show import show

    return show(
        inspectable(args), bool(args.get("deep")), bool(args.get("values")), str(args.get("only") or ""),
        bool(args.get("all_values")),
    )  # fmt: skip


def _shards_repair(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.repair import repair

    return repair(inspectable(args), inspectable({"path": args.get("out"), "roots": args.get("roots")}))


def _audits_get(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.audit.results import summary_of

    return summary_of(context.store.folder(want(args, "id", str)))


def _audits_faults(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.shards.audit.results import page

    return page(context.store.folder(want(args, "id", str)), int(args.get("offset") or 0), str(args.get("code") or ""))


def _pipelines_get(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.pipeline.standing import standing

    return standing(context.store, want(args, "id", str))


def _pipelines_plan(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.pipeline.rehearse import rehearse

    return rehearse(context.machine, context.store, want(args, "order", str), args.get("archive") or [])


def _retire_plan(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.retire import ops

    return ops.plan(context.store, args)


def _retire_start(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.retire import ops

    known = context.store.get(want(args, "id", str))
    if known is not None:
        return known
    return launch.begin(context.machine, context.store, ops.prepare(context.machine, context.store, args))


def _retire_get(context: Context, args: Dict[str, Any]) -> Any:
    from backend.agent.retire import ops

    return ops.receipt(context.store, args)


def _train(name: str) -> Callable[[Context, Dict[str, Any]], Any]:
    def call(context: Context, args: Dict[str, Any]) -> Any:
        from backend.agent.train import ops

        return getattr(ops, name)(context.store, args)

    return call


def _archive_have(context: Context, args: Dict[str, Any]) -> Any:
    return archives.have(want(args, "name", str), want(args, "sha256", str))


def _archive_put(context: Context, args: Dict[str, Any]) -> Any:
    return archives.put(
        want(args, "name", str), want(args, "sha256", str), want(args, "size", int), want(args, "offset", int),
        want(args, "data", str),
    )  # fmt: skip


TABLE: Dict[str, Operation] = {
    "runs.list": Operation(_runs_list),
    "runs.get": Operation(_runs_get),
    "runs.start": Operation(_runs_start, 120.0),
    "runs.adopt": Operation(_runs_adopt, 60.0),
    "runs.stop": Operation(_runs_stop, 30.0),
    "runs.log": Operation(_runs_log, 20.0),
    "runs.gates": Operation(_runs_gates),
    "gates.check": Operation(_check, 120.0),
    "host.doctor": Operation(_doctor, 120.0),
    "pipelines.get": Operation(_pipelines_get, 20.0),
    "pipelines.plan": Operation(_pipelines_plan, 60.0),
    "reset.plan": Operation(_reset("op_plan"), 60.0),
    "reset.start": Operation(_reset_start, 60.0),
    "reset.verify": Operation(_reset("op_verify"), 120.0),
    "gpureset.plan": Operation(_gpu_reset_plan, 120.0),
    "gpureset.start": Operation(_gpu_reset_start, 120.0),
    "baseline.record": Operation(_reset("op_baseline_record"), 60.0),
    "baseline.show": Operation(_reset("op_baseline_show"), 20.0),
    "receipts.list": Operation(_reset("op_receipts_list"), 20.0),
    "receipts.get": Operation(_reset("op_receipts_get"), 20.0),
    "leftovers.find": Operation(_reset("op_leftovers"), 30.0),
    "shards.list": Operation(_shards_list, 20.0, kept=True),
    "shards.lengths": Operation(_shards_lengths, 60.0, kept=True),
    "shards.show": Operation(_shards_show, 60.0, kept=True),
    "shards.scan": Operation(_shards_scan, 900.0),
    "shards.repair": Operation(_shards_repair, 900.0),
    "audits.get": Operation(_audits_get, 20.0),
    "audits.faults": Operation(_audits_faults, 20.0),
    "flight.start": Operation(_flight("op_start"), 20.0),
    "flight.info": Operation(_flight("op_info"), 20.0),
    "flight.blocks": Operation(_flight("op_blocks"), 60.0),
    "flight.events": Operation(_flight("op_events"), 20.0),
    "retire.plan": Operation(_retire_plan, 120.0),
    "retire.start": Operation(_retire_start, 120.0),
    "retire.get": Operation(_retire_get, 20.0),
    "train.metrics": Operation(_train("op_metrics"), 20.0),
    "train.checkpoints": Operation(_train("op_checkpoints"), 60.0),
    "archive.have": Operation(_archive_have, 20.0),
    "archive.put": Operation(_archive_put, 20.0),
}
