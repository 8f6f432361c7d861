"""What a console asks of deletions: a plan, a start, a receipt."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List

from backend.agent import procfs
from backend.agent.retire.main import receipt_of
from backend.agent.retire.place import Place
from backend.agent.retire.plan import make_plan
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import Refused, RunSpec

GRACE_S = 30.0


def plan(store: RunStore, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the plan (`plan.make_plan`)."""
    other_users = bool(args.get("other_users"))
    place = Place(_text(args, "path"), _roots(args), other_users)
    try:
        return make_plan(place, store, other_users)[0]
    finally:
        place.close()


def prepare(machine: Machine, store: RunStore, args: Dict[str, Any]) -> RunSpec:
    """Return the run that deletes what was confirmed. Raises Refused where it is refused, or no longer as it was."""
    found = plan(store, args)
    if found["refused"]:
        raise Refused(found["refused"][0]["code"], found["refused"][0]["text"])
    if found["digest"] != _text(args, "digest"):
        raise Refused("plan-changed", "%s is not as it was confirmed" % found["path"], "ask for a new plan")
    order = {
        "path": _text(args, "path"), "roots": _roots(args), "other_users": bool(args.get("other_users")),
        "digest": found["digest"], "confirmed": procfs.user_name(os.geteuid()),
    }  # fmt: skip
    return RunSpec(
        id=_text(args, "id"), stage="retire", argv=[*machine.relaunch, "retire", json.dumps(order)],
        label="retire %s" % found["path"], grace_s=GRACE_S,
    )  # fmt: skip


def receipt(store: RunStore, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the receipt of a deletion."""
    return receipt_of(store.folder(_text(args, "id")))


def _text(args: Dict[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not value:
        raise Refused("bad-request", "`%s` must be text, not %r" % (name, value))
    return value


def _roots(args: Dict[str, Any]) -> List[str]:
    roots = args.get("roots")
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise Refused("bad-request", "`roots` must be a list of folders")
    return roots
