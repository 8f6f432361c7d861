"""A chain that is only shown: every command as it would run on this host, and the gates of the first step, now."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any, Dict, List

from backend.agent import archives, launch, runfiles
from backend.agent.paths import state_dir
from backend.agent.pipeline.driver import new_id
from backend.agent.pipeline.order import StepOrder, parse
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import AGENT, RESET

EXTRACTOR = "{extractor}"
"""Stands in an argv for the folder of the unpacked extractor, as the console writes it."""


def rehearse(machine: Machine, store: RunStore, text: str, archive: List[str]) -> Dict[str, Any]:
    """Return {steps: [{name, kind, argv, command, cwd, env_names, service}], gates: of the first}; starts nothing.

    `archive` is the extractor's [name, sha256], which says where it will lie although it may not be here yet.
    """
    order = parse(text)
    place = archives.folder(str(archive[0]), str(archive[1])) if len(archive) == 2 else EXTRACTOR
    rows = [_row(machine, step, order.policy, place) for step in order.steps[order.start :]]
    first = order.steps[order.start]
    limited = bool(order.policy.get("accept_limited"))
    gates = [] if first.kind == RESET else launch.check(machine, store, first.requirements, limited)
    return {"steps": rows, "gates": gates}


def _row(machine: Machine, step: StepOrder, policy: Dict[str, Any], place: str) -> Dict[str, Any]:
    run_id = new_id(step.name)
    if step.kind == RESET:
        options = dict(policy, id=run_id)
        argv = [*machine.relaunch, RESET, os.path.join(state_dir("runs"), run_id), json.dumps(options)]
        spec_cwd, names = "", []  # type: str, List[str]
    else:
        spec = step.run_spec(run_id, "")
        argv = [place if word == EXTRACTOR else word for word in spec.argv]
        argv = [*machine.relaunch, *argv[1:]] if argv[:1] == [AGENT] else argv
        spec_cwd, names = spec.cwd, sorted(spec.env)
    shown = runfiles.redact(argv)
    command = " ".join(shlex.quote(word) for word in shown)
    return {"name": step.name, "kind": step.kind, "argv": shown, "command": command, "cwd": spec_cwd or "~",
            "env_names": names, "service": step.service}  # fmt: skip
