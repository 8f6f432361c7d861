"""A launch: the gates of a stage, and its run, which keeps what was found and why it was forced."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List

from backend.agent import runfiles
from backend.agent.files import read_json, write_json
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import AGENT, SCHEMA, Gate, Receipt, Refused, Run, RunSpec


def check(machine: Machine, store: RunStore, requirements: Dict[str, Any], accept_limited: bool) -> List[Gate]:
    """Look at everything that a stage needs, at this moment (docs/architecture.md, `requirements`)."""
    from backend.agent import gates

    def verify() -> Receipt:
        from backend.agent.reset.cycle import verify

        return verify(machine, accept_limited=accept_limited, keep=False)

    return gates.check(machine, dict(requirements, accept_limited=accept_limited), verify, store)


def shut(gates: List[Gate]) -> List[Gate]:
    """Return the gates that are not open; one that could not be read is none that is open."""
    return [gate for gate in gates if gate.ok is not True]


def reasons(closed: List[Gate]) -> str:
    """Say why gates are shut."""
    return "; ".join("%s: %s" % (gate.name, gate.detail) for gate in closed)


def start(machine: Machine, store: RunStore, spec: RunSpec, gates: List[Gate]) -> Run:
    """Start a stage. Raises Refused `gate` where one is shut and no reason was given to go on all the same."""
    closed = shut(gates)
    if closed and not spec.forced:
        raise Refused("gate", reasons(closed), closed[0].fix)
    if spec.argv[:1] == [AGENT]:
        spec.argv = [*machine.relaunch, *spec.argv[1:]]
    run = begin(machine, store, spec)
    try:
        record = {"schema": SCHEMA, "at": time.time(), "forced": spec.forced, "gates": gates}
        write_json(os.path.join(store.folder(run.id), runfiles.GATES), record)
    except OSError:
        pass  # a full disk: the run is worth more than what was found before it
    return run


def begin(machine: Machine, store: RunStore, spec: RunSpec) -> Run:
    """Start a run, and the recorder that keeps its flight."""
    from backend.agent.flight.place import start_recorder

    run = store.start(spec)
    start_recorder(machine)
    return run


def gates_of(run_dir: str) -> Dict[str, Any]:
    """Return {at, forced, gates} of a run's launch. Raises Refused `not-found` where it left none."""
    try:
        found = read_json(os.path.join(run_dir, runfiles.GATES))
    except (OSError, ValueError) as error:
        raise Refused("bad-record", str(error)) from None
    if not isinstance(found, dict):
        raise Refused("not-found", "this run was launched without a record of its gates")
    return {name: found.get(name) for name in ("at", "forced", "gates")}
