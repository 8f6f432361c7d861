"""What a console may ask of a training: its metrics, and the checkpoints that it has left."""

from __future__ import annotations

import os
from typing import Any, Dict

from backend.agent.runs import RunStore
from backend.agent.train import metrics
from backend.agent.train.checkpoints import checkpoints
from backend.wire import Refused


def op_metrics(store: RunStore, args: Dict[str, Any]) -> Any:
    """Return {train, eval, points} of a run, as `metrics.read` describes it."""
    return metrics.read(store.folder(str(args.get("id") or "")), int(args.get("points") or metrics.MOST_POINTS))


def op_checkpoints(store: RunStore, args: Dict[str, Any]) -> Any:
    """Return {path, checkpoints} of the folder that a run writes."""
    run = store.get(str(args.get("id") or ""))
    if run is None:
        raise Refused("not-found", "there is no run `%s` on this host" % args.get("id"))
    path = os.path.join(os.path.expanduser(run.cwd or "~"), os.path.expanduser(run.out_dir))
    return {"path": path, "checkpoints": checkpoints(path) if run.out_dir else []}
