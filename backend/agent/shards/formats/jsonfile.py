"""JSON that lies beside shards, such as data_config.json: shown as the values it holds."""

from __future__ import annotations

import json
import os
from typing import Any, List, Tuple

from backend.agent.shards.formats.safetensors import refuse_crowded, whole_number
from backend.agent.shards.pickles import walk
from backend.agent.shards.pickles.nodes import Mapping, Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import layout

MAX_BYTES = 4 << 20
"""The lengths of 100,000 samples take 2 MB."""


def looks_like(path: str, head: bytes) -> bool:
    """Say whether a file is JSON by its name and its first character."""
    return path.endswith(".json") and head.lstrip()[:1] in (b"{", b"[")


def read(source: Source, report: Report) -> None:
    """Fill the report with the file's values. Raises Unreadable."""
    name = os.path.basename(source.path)
    report.format = name if name == layout.CONFIG_NAME else "json"
    if source.size_bytes > MAX_BYTES:
        raise Unreadable("too-large", "a JSON file of %d bytes" % source.size_bytes)
    text = source.read(0, source.size_bytes)
    refuse_crowded(text)
    try:
        root = json.loads(text, object_pairs_hook=_mapping, parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        reason = "line %d: %s" % (error.lineno, error.msg) if isinstance(error, json.JSONDecodeError) else str(error)
        raise Unreadable("bad-json", "it is not JSON: %s" % reason) from None
    for key, leaf in walk.leaves(root, report):
        report.value(key or "(root)", walk.text_of(leaf))


def _mapping(pairs: List[Tuple[str, Any]]) -> Mapping:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return Mapping(pairs)
