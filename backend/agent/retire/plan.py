"""What a deletion would delete, what refers to it, and what forbids it: made anew and compared before anything goes."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Tuple

from backend.agent import procfs
from backend.agent.retire import refs
from backend.agent.retire.place import Place, aside_of
from backend.agent.retire.tree import Tree, walk
from backend.agent.runs import RunStore
from backend.wire import SCHEMA, printable

FRESH_S = 60.0
"""A file that is younger may belong to a writer that opens and closes one at a time."""

MAX_PARTS, MAX_TOLD = 300, 40
"""A reply is one line of at most 256 KiB."""


def make_plan(place: Place, store: RunStore, other_users: bool, own: str = "") -> Tuple[Dict[str, Any], Tree]:
    """Look at a place. Returns the plan and the tree that it is of.

    The plan: path, root, target (where it lies now), name (what the operator types), resumes (a deletion has begun),
    digest, files, folders, links, bytes, freed_bytes, newest_at and oldest_at (wall seconds, None where there is no
    file), parts [{name, files, bytes, newest_at}] of its first level, refs [{kind, text}], and refused
    [{code, text}]: while that holds anything, nothing is deleted. `own` is the run that asks.
    """
    tree = walk(place)
    refused = list(tree.problems)
    folder = os.path.normpath(place.target)
    live, ended = refs.runs(store, os.path.normpath(place.path), own)
    refused += live
    held = refs.lock_held(place)
    refused += [("lock", held)] if held else []
    open_by, hidden = refs.users(tree, folder)
    refused += open_by
    refused += _owners(tree, other_users)
    if tree.newest_at is not None and time.time() - tree.newest_at < FRESH_S and not place.resumes:
        text = "a file was written %.0f s ago: something may be writing there" % (time.time() - tree.newest_at)
        refused.append(("fresh", text))
    if place.unfinished:
        aside = os.path.join(os.path.dirname(place.path), aside_of(place.name))
        refused.append(("unfinished", "an earlier deletion has not ended: retire %s first" % aside))
    found = [*refs.records(place), *ended, *refs.referring(place)]
    if hidden:
        whose = "one process of another user" if hidden == 1 else "%d processes of other users" % hidden
        found.append(("unseen", "%s could not be looked into" % whose))
    return _told(place, tree, found, refused), tree


def _owners(tree: Tree, other_users: bool) -> List[Tuple[str, str]]:
    others = {uid: path for uid, path in tree.owners.items() if uid != os.geteuid()}
    if other_users:
        return []
    return [
        ("not-yours", "%s and more belongs to %s" % (path, procfs.user_name(uid)))
        for uid, path in sorted(others.items())[:MAX_TOLD]
    ]


def _told(place: Place, tree: Tree, found: List[refs.Found], refused: List[Tuple[str, str]]) -> Dict[str, Any]:
    parts = [dict(tree.parts[name], name=printable(name, 200)) for name in sorted(tree.parts)]
    return {
        "schema": SCHEMA, "at": time.time(), "path": place.path, "root": place.root, "target": place.target,
        "name": os.path.basename(place.path), "resumes": place.resumes, "digest": tree.digest(place),
        "files": tree.files, "folders": tree.folders, "links": tree.links, "bytes": tree.bytes,
        "freed_bytes": tree.freed_bytes, "newest_at": tree.newest_at, "oldest_at": tree.oldest_at,
        "parts": parts[:MAX_PARTS], "parts_left_out": max(0, len(parts) - MAX_PARTS),
        "refs": [{"kind": kind, "text": printable(text, 300)} for kind, text in found[:MAX_TOLD]],
        "refused": [{"code": code, "text": printable(text, 300)} for code, text in refused[:MAX_TOLD]],
        "refused_count": len(refused),
    }  # fmt: skip
