"""The operations of reset that a console may ask for. Each runs in a worker of the agent and may block."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from typing import Any, Dict, List, Tuple

from backend.agent.paths import state_dir
from backend.agent.reset import baseline, health, leftovers, receipt
from backend.agent.reset.clearance import states
from backend.agent.reset.cycle import verify
from backend.agent.reset.exercise import LONGEST_S
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.interrupted import recover
from backend.agent.reset.look import Look, look
from backend.agent.reset.plan import difference, make_plan
from backend.agent.reset.watch import Watch
from backend.agent.reset.xids.gathering import newest_seq
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import Leftovers, Plan, Process, Reading, Receipt, Refused, RunSpec


def op_plan(machine: Machine, args: Dict[str, Any]) -> Plan:
    """Say who would be ended and what would be lost, and keep it for `prepare_start` to compare with."""
    plan = _plan(machine, bool(args.get("other_users")))[1]
    try:
        receipt.keep_plan(plan.digest, plan.victims)
    except OSError:
        pass  # a full disk: then the start holds only where the very same plan comes out again
    return plan


def op_verify(machine: Machine, args: Dict[str, Any]) -> Receipt:
    """Check every GPU without killing anything. Raises Refused where a CUDA test is asked for while a reset runs."""
    asked = bool(args.get("cuda_test"))
    scope = machine.devices().scope()
    with one_at_a_time("a verification with a CUDA test", scope) if asked else nullcontext():
        return verify(machine, accept_limited=bool(args.get("accept_limited")), receipt_id=str(args.get("id") or ""),
                      cuda_test=asked)  # fmt: skip


def op_baseline_record(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Record what each GPU reads while nobody holds it. Raises Refused naming who does."""
    watch = Watch(machine.driver)
    try:
        watch.open()
        if not watch.inventory.gpus:
            raise Refused("no-gpu", watch.inventory.problem or "the driver lists no GPU")
        _refuse_holders(look(machine.devices(), watch.inventory, watch.occupancy()))
        samples: Dict[int, List[Reading]] = {}
        began = time.monotonic()
        for number in range(baseline.SAMPLES):
            due = began + number * baseline.SPAN_S / (baseline.SAMPLES - 1)
            while time.monotonic() < due:
                watch.step(due, [])
            for index, (used, _) in watch.occupancy().items():
                samples.setdefault(index, []).append(used)
        _refuse_holders(look(machine.devices(), watch.inventory, watch.occupancy()))
        return baseline.store(watch.inventory, samples, health.read_surely(watch).gpus, newest_seq(machine.kernel_log))
    finally:
        watch.close()


def _refuse_holders(seen: Look) -> None:
    """Refuse to call memory idle that somebody may hold: only what reads as used is no reason here."""
    held = []
    for state in states(seen, {}, {"gpus": {}}).values():
        held += ["GPU %d is held by process %d" % (state.index, pid) for pid in sorted(state.pids | state.held_by)]
    if held:
        raise Refused("held", "; ".join(held), "reset the host first, then record the baseline")


def op_baseline_show(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return what was recorded."""
    return baseline.load()


def op_receipts_list(machine: Machine, args: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Return the receipts of this host, the newest first."""
    recover(machine)
    return receipt.list_receipts()


def op_receipts_get(machine: Machine, args: Dict[str, Any]) -> Receipt:
    """Return one receipt."""
    recover(machine)
    return receipt.load(str(args.get("id") or ""))


def op_leftovers(machine: Machine, args: Dict[str, Any]) -> Leftovers:
    """Return what processes that are gone left behind; with `remove` this user's segments are removed."""
    return leftovers.of_host(machine.host_root, RunStore(machine).list(), [], bool(args.get("remove")))


def prepare_start(machine: Machine, args: Dict[str, Any]) -> RunSpec:
    """Turn a confirmed plan into the run that carries it out.

    Plans again first: raises Refused `plan-changed` where somebody else would be killed than the operator saw, and
    `reset-running` where another reset is under way.
    """
    reset_id, digest = str(args.get("id") or ""), str(args.get("digest") or "")
    receipt.plan_path(reset_id)
    recover(machine)
    other_users = bool(args.get("other_users"))
    with one_at_a_time("the start of reset %s" % reset_id, machine.devices().scope()):
        seen, plan = _plan(machine, other_users)
    planned = _shown(digest, plan)
    changed = difference(planned, plan, seen.family)
    if changed:
        raise Refused("plan-changed", "the plan changed since it was shown: " + changed,
                      "look at the new plan and confirm it")  # fmt: skip
    try:
        path = receipt.keep_plan(reset_id, planned)
    except OSError:
        path = ""  # a full disk: the reset then holds itself to the plan that was just compared
    options = {
        "id": reset_id, "digest": plan.digest, "plan": path, "other_users": other_users,
        "accept_limited": bool(args.get("accept_limited")), "cuda_test": bool(args.get("cuda_test", True)),
    }  # fmt: skip
    for name in ("grace_s", "deadline_s"):
        if args.get(name) is not None:
            options[name] = float(args[name])
    argv = [*machine.relaunch, "reset", os.path.join(state_dir("runs"), reset_id), json.dumps(options)]
    return RunSpec(reset_id, "reset", argv, label="kill and verify",
                   grace_s=plan.grace_s + plan.deadline_s + LONGEST_S)  # fmt: skip


def _shown(digest: str, plan: Plan) -> List[Process]:
    """Return whom the operator was shown under this digest."""
    if plan.digest == digest:
        return plan.victims
    try:
        return receipt.confirmed(receipt.plan_path(digest))
    except (OSError, ValueError, Refused):
        text = "a reset would now kill %d processes, not those that were shown" % len(plan.victims)
        raise Refused("plan-changed", text, "look at the new plan and confirm it") from None


def _plan(machine: Machine, other_users: bool) -> Tuple[Look, Plan]:
    watch = Watch(machine.driver)
    try:
        watch.open()
        seen = look(machine.devices(), watch.inventory, watch.occupancy())
        return seen, make_plan(seen, RunStore(machine), other_users)
    finally:
        watch.close()
