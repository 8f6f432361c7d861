"""Turning what the operator names into the run that watches it."""

from __future__ import annotations

import json
import os
from typing import Any, Dict

from backend.agent import procfs
from backend.agent.seam import Machine
from backend.wire import Refused, RunSpec

STAGE = "adopt"


def prepare_adopt(machine: Machine, args: Dict[str, Any]) -> RunSpec:
    """Check that there is something to watch, and return the run that does.

    Raises Refused: `bad-path` where the folder or the log is not there, `not-found` where the process is not,
    `bad-request` where a number makes no sense.
    """
    out = _path(args, "out")
    if not os.path.isdir(out):
        raise Refused("bad-path", "%s is no folder on this host" % out, "name the folder that the shards go to")
    log = _path(args, "log") if args.get("log") else ""
    if log and not os.path.isfile(log):
        raise Refused("bad-path", "%s is no file on this host" % log, "name the log that the run writes")
    order: Dict[str, Any] = {"out": out, "log": log}
    for name in ("pid", "samples", "tokens"):
        value = args.get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Refused("bad-request", "`%s` must be a whole number, not %r" % (name, value))
        order[name] = value
    if order["pid"]:
        found = procfs.stat(order["pid"])
        if found is None or found.dead:
            raise Refused("not-found", "there is no process %d on this host" % order["pid"], "see `ps -ef`")
        order["pid_start"] = found.start_ticks
    label = str(args.get("label") or "") or os.path.basename(out.rstrip("/"))
    argv = [*machine.relaunch, STAGE, json.dumps(order)]
    return RunSpec(str(args.get("id") or ""), STAGE, argv, label="%s (adopted)" % label, out_dir=out, adopted=True)


def _path(args: Dict[str, Any], name: str) -> str:
    path = os.path.expanduser(str(args.get(name) or ""))
    if not os.path.isabs(path):
        raise Refused("bad-path", "`%s` is no absolute path" % path, "name the whole path on the host")
    return os.path.realpath(path)
