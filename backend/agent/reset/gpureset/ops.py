"""What a console may ask about a reset of GPUs: what it needs, and its start."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List

from backend.agent.launch import reasons, shut
from backend.agent.paths import state_dir
from backend.agent.reset.gpureset import smi
from backend.agent.reset.gpureset.examine import examine
from backend.agent.reset.gpureset.needs import needs
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.interrupted import recover
from backend.agent.reset.receipt import plan_path
from backend.agent.seam import Machine
from backend.wire import GpuResetPlan, Refused, RunSpec

LONGEST_S = 600.0


def op_plan(machine: Machine, args: Dict[str, Any]) -> GpuResetPlan:
    """Say what a reset of GPUs needs, and what of it is met. Reads only."""
    recover(machine)
    return _look(machine, args)


def prepare_start(machine: Machine, args: Dict[str, Any]) -> RunSpec:
    """Turn a confirmed reset of GPUs into its run. Raises Refused `precondition` where a need is not met."""
    reset_id = str(args.get("id") or "")
    plan_path(reset_id)
    recover(machine)  # one that was killed counts too
    with one_at_a_time("the start of GPU reset %s" % reset_id, machine.devices().scope()):
        closed = shut(_look(machine, args).needs)
    if closed:
        raise Refused("precondition", reasons(closed), closed[0].fix)
    options = {
        "id": reset_id, "gpus": _gpus(args), "because": str(args.get("because") or ""),
        "in_vm": bool(args.get("in_vm")), "accept_limited": bool(args.get("accept_limited")),
        "cuda_test": bool(args.get("cuda_test", True)),
    }  # fmt: skip
    argv = [*machine.relaunch, "gpureset", os.path.join(state_dir("runs"), reset_id), json.dumps(options)]
    return RunSpec(reset_id, "reset", argv, label="GPU reset", grace_s=LONGEST_S)


def _gpus(args: Dict[str, Any]) -> List[str]:
    wanted = args.get("gpus")
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        raise Refused("bad-request", "`gpus` must be a list of GPU numbers or UUIDs as text, not %r" % (wanted,))
    return wanted


def _look(machine: Machine, args: Dict[str, Any]) -> GpuResetPlan:
    seen = examine(machine, _gpus(args), str(args.get("because") or ""))
    addresses = ",".join(one.address for one in seen.targets)
    return GpuResetPlan(
        gpus=[one.facts.index for one in seen.targets], uuids=[one.facts.uuid for one in seen.targets],
        needs=needs(machine, seen, bool(args.get("in_vm"))),
        faults={str(one.facts.index): one.faults for one in seen.targets},
        command=" ".join([*(smi.find(machine.smi) or ["nvidia-smi"]), "--gpu-reset", "-i", addresses]),
    )  # fmt: skip
