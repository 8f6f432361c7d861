"""Whether the shards of a folder were audited, without a fault, since they last changed."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Iterator, List, Optional

from backend.agent.files import read_json
from backend.agent.paths import state_dir
from backend.agent.reset.losses import hours
from backend.agent.runs import RunStore
from backend.agent.shards.audit.results import SUMMARY_NAME
from backend.shardfmt import layout
from backend.wire import Gate


def check(store: RunStore, folder: str) -> Gate:
    """Look for the newest audit of a folder, by a run or by hand, and hold it against the folder as it is."""
    name, real = "audit of %s" % folder, os.path.realpath(os.path.expanduser(folder))
    fix = "launch an audit stage, or eightzeros shards audit %s" % folder
    found = max(_audits(store, real), key=lambda one: float(one["at"]), default=None)
    if found is None:
        return Gate(name, False, "it was never audited", fix)
    ago = "%s ago" % hours(max(0.0, time.time() - float(found["at"])))
    if not found["ok"]:
        kinds = ", ".join("%s: %d" % (code, kind["count"]) for code, kind in found["faults"].items())
        return Gate(name, False, "%s, with faults: %s" % (ago, kinds), "see docs/audit.md; quarantine, extract, " + fix)
    changed = _changed_at(real)
    if changed is not None and changed > float(found["at"]):
        return Gate(name, False, "%s without a fault, but samples were committed since" % ago, fix)
    depth = "every byte read" if found.get("deep") else "heads and last rows read"
    return Gate(name, True, "%s without a fault: %d files, %s" % (ago, found["files"], depth))


def _audits(store: RunStore, real: str) -> Iterator[Dict[str, Any]]:
    folders: List[str] = [store.folder(run.id) for run in store.list()]
    by_hand = state_dir("audits")
    folders += [os.path.join(by_hand, name) for name in os.listdir(by_hand)]
    for folder in folders:
        try:
            found = read_json(os.path.join(folder, SUMMARY_NAME))
            if isinstance(found, dict) and found["path"] == real and float(found["at"]) and "ok" in found:
                yield found
        except (OSError, ValueError, KeyError, TypeError):
            continue  # torn, or of another version: no evidence


def _changed_at(real: str) -> Optional[float]:
    """Return when a sample was last committed here; None for shards that are not ours."""
    try:
        return os.stat(os.path.join(real, layout.JOURNAL_NAME)).st_mtime
    except OSError:
        return None
