"""From a description to its rows: every tensor and value, under a key that can be told from any other."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Iterator, List, Tuple

from backend.agent.shards.findings import ERROR
from backend.agent.shards.pickles.nodes import Array, Global, Mapping, Opaque, Storage, Tensor
from backend.agent.shards.report import Report
from backend.wire import printable

MAX_DEPTH = 200
MAX_VISITS = 50_000
MAX_KEY_CHARS = 100
MAX_PATH_CHARS = 400
MAX_NAMED = 20
_LONG_LIST = 16
"""Longer lists of plain numbers are one row."""

_BARE = re.compile(r'[^\[\]"\s](?:[^\[\]"]*[^\[\]"\s])?')
_PLAIN = {int, float, bool, str, bytes, type(None)}


def leaves(root: Any, report: Report) -> Iterator[Tuple[str, Any]]:
    """Yield (key, leaf) in the file's order. A structure too deep or too large is cut, with a note."""
    todo: List[Tuple[str, Any, int]] = [("", root, 0)]
    plain = _PlainLists()
    visits = 0
    while todo:
        key, node, depth = todo.pop()
        below = _children(key, node, plain)
        visits += 1
        if visits + len(todo) + len(below) > MAX_VISITS:
            report.note("too-large", "it holds more than %d values; the rest is not listed" % MAX_VISITS, ERROR)
            return
        if isinstance(node, (Tensor, Array, Opaque)) or not below:
            yield key, node
        if below and depth >= MAX_DEPTH:
            report.note("too-deep", "it is nested deeper than %d, or holds itself; cut there" % MAX_DEPTH, ERROR)
            continue
        todo.extend((name, child, depth + 1) for name, child in reversed(below))


def key_of(name: str) -> str:
    """Return the key of a tensor that lies at the root under a name."""
    return _join("", name)


def text_of(value: Any) -> str:
    """Describe a value that is no tensor. Never repr(): see `unpickle`."""
    if isinstance(value, str):
        return printable(value, 200)
    if isinstance(value, bytes):
        return "%d bytes" % len(value)
    if isinstance(value, (list, tuple)):
        return "%s of %d values" % (type(value).__name__, len(value)) if value else "empty %s" % type(value).__name__
    if isinstance(value, Mapping):
        return "empty %s" % value.kind
    if isinstance(value, Opaque):
        return "an object made by %s" % printable(value.name, 120)
    if isinstance(value, Global):
        return printable(value.full, 120)
    if isinstance(value, Storage):
        return "a storage of %d bytes" % value.size_bytes
    return str(value)


def note_names(names: List[str], report: Report) -> None:
    """Say which names loading the file would import and call, beyond those of plain tensors."""
    for name in sorted(names)[:MAX_NAMED]:
        text = "loading it would import %s; nothing was imported here" % printable(name, 120)
        report.note("unknown-global", text, ERROR, name)
    if len(names) > MAX_NAMED:
        report.note("unknown-global", "loading it would import %d names more" % (len(names) - MAX_NAMED), ERROR)


class _PlainLists:
    """Which lists hold only plain values. Each is looked through once, however often the structure shares it."""

    def __init__(self) -> None:
        self._known: Dict[int, bool] = {}

    def holds(self, node: Any) -> bool:
        """Say whether a list or tuple, which the caller keeps alive, holds only plain values."""
        if id(node) not in self._known:
            self._known[id(node)] = not set(map(type, node)) - _PLAIN
        return self._known[id(node)]


def _children(key: str, node: Any, plain: _PlainLists) -> List[Tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [(_join(key, name), child) for name, child in node.pairs]
    if isinstance(node, (list, tuple)):
        if len(node) > _LONG_LIST and plain.holds(node):
            return []
        return [(_cut("%s[%d]" % (key, number)), child) for number, child in enumerate(node)]
    if isinstance(node, Tensor):
        return [(_cut("%s.%s" % (key, name)), child) for name, child in node.extra if _matters(child, plain)]
    if isinstance(node, Opaque):
        return [(_cut("%s.part%d" % (key, n)), child) for n, child in enumerate(node.parts) if _matters(child, plain)]
    return []


def _matters(node: Any, plain: _PlainLists) -> bool:
    """Say whether a part of an object is worth a row: plain values and empty containers are not."""
    if isinstance(node, Mapping):
        return bool(node.pairs)
    if isinstance(node, (list, tuple)):
        return bool(node) and not plain.holds(node)
    return isinstance(node, (Tensor, Array, Opaque))


def _join(key: str, name: Any) -> str:
    """Extend a key. A text at the root stands as it is; all else in brackets, quoted where it is text."""
    if isinstance(name, str):
        if not key and len(name) <= MAX_KEY_CHARS and name.isprintable() and _BARE.fullmatch(name):
            return name
        return _cut("%s[%s]" % (key, _quoted(name)))
    return _cut("%s[%s]" % (key, _brief(name)))


def _brief(name: Any) -> str:
    if isinstance(name, tuple) and len(name) <= 4:
        inner = ", ".join(_quoted(x) if isinstance(x, str) else _scalar(x) for x in name)
        return "(%s)" % inner
    return _scalar(name)


def _scalar(value: Any) -> str:
    return text_of(value) if type(value) in _PLAIN or isinstance(value, Global) else "<%s>" % type(value).__name__


def _quoted(text: str) -> str:
    return json.dumps(text[:MAX_KEY_CHARS], ensure_ascii=not text.isprintable())


def _cut(path: str) -> str:
    return path if len(path) <= MAX_PATH_CHARS else "…" + path[-MAX_PATH_CHARS:]
