"""The checkpoints that a training has left: a folder each, of whichever trainer."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, Dict, List, Optional

from backend.agent.shards.describe import describe
from backend.agent.shards.source import Source
from backend.wire import Refused, printable

WHOLE, TORN, WRITING = "whole", "torn", "writing"
WEIGHTS = (".safetensors", ".pt", ".bin", ".pth", ".ckpt")
INDEX = ".index.json"
MOST = 200
"""Checkpoints that are looked at, the newest; and files in each."""

QUIET_S = 60.0
"""A checkpoint that is not whole is being written as long as a file of it is younger than this."""

_TORN = frozenset(
    ("empty-file", "zero-filled", "truncated", "sparse", "lfs-pointer", "bad-directory", "cut-tensor", "bad-header")
)
"""Of all that may be said of a file (shards/findings.py), what says that not all of it is there."""

_STEP = re.compile(r"(?:step|checkpoint|iter)[-_]?([0-9]+)", re.IGNORECASE)


def checkpoints(folder: str, now: Optional[float] = None) -> List[Dict[str, Any]]:
    """List the checkpoints below a folder, the newest first.

    Each is {name, path, step, epoch, bytes, modified_at (wall seconds), state: whole | torn | writing, why}; step and
    epoch are None where nothing says them. Links (`latest`, `best`) are other names of one that is listed. Every file
    of weights is opened and its ends are read: whole is what can be loaded, as far as its container says.
    """
    root = os.path.expanduser(folder)
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = [one for one in (_look(os.path.join(root, name), name) for name in names) if one is not None]
    found.sort(key=lambda one: (-one["modified_at"], one["name"]))
    return [_judged(one, time.time() if now is None else now) for one in found[:MOST]]


def _look(path: str, name: str) -> Optional[Dict[str, Any]]:
    """Say what is in a folder; None for one that holds no weights."""
    files: List[str] = []
    size, newest = 0, 0.0
    try:
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False) and len(files) < MOST:
                st = entry.stat(follow_symlinks=False)
                files.append(entry.name)
                size, newest = size + st.st_size, max(newest, st.st_mtime)
    except OSError:
        return None  # rotated away at this moment, or not ours to read
    if not any(_of_weights(file) for file in files):
        return None
    step, epoch = _position(path, name)
    return {"name": printable(name, 200), "path": path, "step": step, "epoch": epoch, "bytes": size,
            "modified_at": newest, "files": sorted(files)}  # fmt: skip


def _of_weights(name: str) -> bool:
    """Say whether a file holds weights, whole or on the way."""
    return any(ending in name for ending in WEIGHTS) and not name.endswith(INDEX)


def _judged(one: Dict[str, Any], now: float) -> Dict[str, Any]:
    files: List[str] = one.pop("files")
    why = next(filter(None, (_fault(one["path"], name, files) for name in files)), "")
    state = WHOLE if not why else WRITING if now - one["modified_at"] < QUIET_S else TORN
    return dict(one, state=state, why=printable(why, 300))


def _fault(folder: str, name: str, files: List[str]) -> str:
    """Say why a file is not all there; empty where it is, or is none of weights."""
    if name.endswith(INDEX):
        return _missing(os.path.join(folder, name), files)
    if not _of_weights(name):
        return ""
    if not name.endswith(WEIGHTS):
        return "%s was never renamed to its name" % name
    try:
        source = Source(os.path.join(folder, name))
        try:
            findings = describe(source).findings
        finally:
            source.close()
    except Refused as error:
        return "%s: %s" % (name, error)
    return next(("%s: %s" % (name, one.text) for one in findings if one.code in _TORN), "")


def _missing(path: str, files: List[str]) -> str:
    """Say which part an index names that is not there."""
    try:
        with open(path, "rb") as file:
            parts = set(json.loads(file.read())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "%s cannot be read" % os.path.basename(path)
    missing = sorted(str(part) for part in parts - set(files))
    return "%s is missing" % ", ".join(missing[:3]) if missing else ""


def _position(path: str, name: str) -> List[Optional[int]]:
    """Return [step, epoch], from what the trainer wrote beside the weights, else from the folder's name."""
    match = _STEP.search(name)
    step = int(match.group(1)) if match else None
    epoch = int(name) if name.isdigit() and len(name) < 7 else None
    try:
        with open(os.path.join(path, "training_state.json"), "rb") as file:
            state = json.loads(file.read())
        return [int(state.get("global_step", step)), int(state.get("epoch", epoch))]
    except (OSError, ValueError, TypeError, AttributeError):
        return [step, epoch]
