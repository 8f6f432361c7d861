"""Whether another run is in the way: of the same stage, of the same folder, or of a chain that goes on by itself."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List

from backend.agent.reset.losses import hours
from backend.agent.runs import RunStore
from backend.wire import PIPELINE, RUN_LIVE, Gate, Run

NAME = "no other run"


def check(store: RunStore, others: Dict[str, Any]) -> Gate:
    """Look at every live run of this host.

    `others` is {stage: its name, or empty where several may run at once; out: the folder that it writes; chain: the
    id of the chain that launches it, or empty}.
    """
    live = [run for run in store.list() if run.state in RUN_LIVE]
    chain = str(others.get("chain") or "")
    blocking = [text for text in (_why(run, others, chain) for run in live) if text]
    if blocking:
        first = next(run for run in live if _why(run, others, chain))
        return Gate(NAME, False, "; ".join(blocking), "let it finish, or stop it: eightzeros stop %s" % first.id)
    beside: List[str] = [run.id for run in live if run.id != chain]
    return Gate(NAME, True, "beside it: %s" % ", ".join(beside) if beside else "none is active")


def _why(run: Run, others: Dict[str, Any], chain: str) -> str:
    if run.id == chain or run.adopted:
        return ""
    what = "%s has been running for %s" % (run.id, hours(max(0.0, time.time() - run.started_at)))
    if run.stage == PIPELINE:
        return "the chain %s, which launches its stages by itself" % what
    if others.get("stage") and run.stage == others["stage"]:
        return what
    if others.get("out") and run.out_dir and _same(run.out_dir, str(others["out"])):
        return "%s and writes to %s" % (what, run.out_dir)
    return ""


def _same(one: str, other: str) -> bool:
    """Say whether two folders are one, or one lies in the other."""
    a, b = (os.path.realpath(os.path.expanduser(path)) for path in (one, other))
    return os.path.commonpath([a, b]) in (a, b)
