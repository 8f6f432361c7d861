"""What is in one folder: folders, shards and the rest, in the order in which people count."""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent.shards.source import kind_of, refusal
from backend.shardfmt import layout
from backend.wire import Refused, printable

MAX_ENTRIES = 5000
MAX_LISTED_BYTES = 180 * 1024
"""A reply is one line of at most 256 KiB."""

MAX_SEEN = 200_000
"""Names that are looked at; a group has 2,000, a flat folder of a large corpus some 100,000."""


KEPT_S = 60.0
"""How long the order of a large folder is kept for the next page."""

_compact = json.JSONEncoder(separators=(",", ":")).encode


class _Order(NamedTuple):
    """The names of one folder in order, as they were when its first page was asked for."""

    path: str
    since: float
    at: float
    names: List[str]
    total: int
    more: bool


_kept: List[_Order] = []
"""The order of the folder that was listed last, where there are more pages of it. Sorting costs more than a page."""


def list_shards(path: str, offset: int = 0, since: float = 0.0) -> Dict[str, Any]:
    """List one folder, without going into others.

    Returns {path, entries, truncated, total, next}: `entries` are {name, kind, bytes, modified_at, note},
    folders first, data_9 before data_10. `kind` is folder, shard (a tensor file that can be shown) or other;
    `note` says what is odd about it (a leftover, a FIFO, a link to nothing), in words, or is empty. `bytes`
    and `modified_at` (wall seconds) are None where they cannot be read. `total` counts the folder's entries,
    as far as they were looked at; where `truncated`, `next` is the offset to go on from (None at the end). The
    pages that follow within a minute are of the folder as it was at the first.
    With `since` (wall seconds) only what was modified then or later is listed, which is how a growing folder is
    followed; what has no time is listed too.
    Links are followed to tell what they are, never to walk. Raises wire.Refused where the path is no folder
    that can be read.
    """
    order = _order(path, offset, since)
    entries: List[Dict[str, Any]] = []
    cost, end = 0, max(0, offset)
    for name in order.names[end : end + MAX_ENTRIES]:
        entry = _entry(path, name)
        if entry is not None:
            cost += len(_compact(entry)) + 1
            if cost > MAX_LISTED_BYTES:
                break
            entries.append(entry)
        end += 1
    following = end if end < len(order.names) else None
    _kept[:] = [order] if following is not None else []
    return {
        "path": path,
        "entries": entries,
        "truncated": following is not None or order.more,
        "total": order.total,
        "next": following,
    }


def _order(path: str, offset: int, since: float) -> _Order:
    """Return a folder's names in order: for the pages after the first those that are kept, where they are."""
    now = time.monotonic()
    if offset > 0:
        for kept in _kept:
            if (kept.path, kept.since) == (path, since) and now - kept.at < KEPT_S:
                return kept._replace(at=now)
    names: List[Tuple[bool, Tuple[str, str]]] = []
    total, more = 0, False
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise Refused("not-a-folder", "%s is a file" % path, "show it instead")
        with os.scandir(path) as found:
            for entry in found:
                more = total >= MAX_SEEN
                if more:
                    break
                total += 1
                if not since or _touched(entry, since):
                    names.append((not _is_folder(entry), layout.natural_key(entry.name)))
    except (OSError, ValueError) as error:
        raise refusal(path, error) from None
    names.sort()
    return _Order(path, since, now, [name for _, (_, name) in names], total, more)


def _touched(entry: "os.DirEntry[str]", since: float) -> bool:
    """Say whether something was modified then or later; what does not tell was."""
    try:
        return entry.stat().st_mtime >= since
    except OSError:
        return True


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entry(path: str, name: str) -> Optional[Dict[str, Any]]:
    """Return what is told of one name, or None where it is gone since its folder was read."""
    full = os.path.join(path, name)
    try:
        found = os.stat(full)
    except OSError:
        if not os.path.lexists(full):
            return None
        return _row(name, "other", None, None, "a link to nothing" if os.path.islink(full) else "cannot be read")
    if stat.S_ISDIR(found.st_mode):
        note = "a folder with the name of a shard" if layout.file_kind(name) == "shard" else ""
        note = "a link to another folder" if os.path.islink(full) else note
        return _row(name, "folder", None, found.st_mtime, note)
    if not stat.S_ISREG(found.st_mode):
        return _row(name, "other", None, found.st_mtime, kind_of(found.st_mode))
    kind = layout.file_kind(name)
    note = _note(name, kind, found)
    return _row(name, "other" if kind == "leftover" else kind, found.st_size, found.st_mtime, note)


def _note(name: str, kind: str, found: os.stat_result) -> str:
    if kind == "leftover":
        return "a leftover, not a sample"
    if kind == "shard" and name.startswith(("data_", "hs_")) and layout.sample_index(name) is None:
        return "not the name of a sample"
    if kind == "shard" and found.st_size == 0:
        return "empty"
    if kind == "shard" and found.st_nlink > 1:
        return "a hard link: its bytes count once"
    return ""


def _row(name: str, kind: str, size_bytes: Any, modified_at: Any, note: str) -> Dict[str, Any]:
    shown = name if name.isprintable() else printable(name.encode("utf-8", "backslashreplace").decode("utf-8"))
    return {"name": shown, "kind": kind, "bytes": size_bytes, "modified_at": modified_at, "note": note}
