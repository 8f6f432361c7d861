"""How long the sequences of a folder of shards are: by its journal or index, else by the heads of some of its files."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterator, List, Optional

from backend.agent.shards.describe import describe
from backend.agent.shards.source import Source, refusal
from backend.shardfmt import layout
from backend.wire import Refused

LENGTHS_NAME = "sample_lengths.json"
BINS = 32
MAX_RECORD_BYTES = 256 << 20
MOST_HEADS = 200
"""Some 0.5 ms each (facts: shards, section 3)."""

MAX_FILES = 200_000
ID_KEYS = (layout.INPUT_IDS, "token_ids")


def lengths(path: str) -> Dict[str, Any]:
    """Return the lengths in tokens of a folder's samples.

    {path, source (journal, index or heads), samples (how many were counted), of (how many there are; None where
    that is not known), tokens, least, most, mean, median, low, high, counts}: `counts` are of equal parts of
    `low` to `high`. The figures are None, and the source is empty, where nothing tells a length. Raises Refused where
    the folder cannot be read.
    """
    if not os.path.isdir(path):
        raise refusal(path, NotADirectoryError(20, "no folder", path))
    found, source, of = _journal(path), "journal", None
    if not found:
        found, source = _index(path), "index"
    if not found:
        files = _shards(path)
        step = max(1, -(-len(files) // MOST_HEADS))
        found, source, of = [n for n in map(_head, files[::step]) if n is not None], "heads", len(files)
    return _told(path, sorted(found), source if found else "", of if of is not None else len(found))


def _told(path: str, found: List[int], source: str, of: int) -> Dict[str, Any]:
    made: Dict[str, Any] = {
        "path": path, "source": source, "samples": len(found), "of": of, "tokens": None, "least": None, "most": None,
        "mean": None, "median": None, "low": None, "high": None, "counts": [],
    }  # fmt: skip
    if not found:
        return made
    low, high = found[0], found[-1]
    width = max(1, -(-(high - low + 1) // BINS))
    counts = [0] * (-(-(high - low + 1) // width))
    for number in found:
        counts[(number - low) // width] += 1
    return dict(
        made, tokens=sum(found), least=low, most=high, mean=sum(found) / len(found), median=found[len(found) // 2],
        low=low, high=low + width * len(counts), counts=counts,
    )  # fmt: skip


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_RECORD_BYTES)
    except OSError:
        return b""


def _journal(path: str) -> List[int]:
    """Return what our journal says; of a sample that was done twice, the last."""
    last: Dict[int, int] = {}
    for line in _read(os.path.join(path, layout.JOURNAL_NAME)).split(b"\n")[1:]:
        try:
            entry = json.loads(line)
            last[int(entry["index"])] = int(entry["tokens"])
        except (ValueError, KeyError, TypeError):
            continue
    return list(last.values())


def _index(path: str) -> List[int]:
    try:
        found = json.loads(_read(os.path.join(path, LENGTHS_NAME)))
        numbers = list(found.values()) if isinstance(found, dict) else list(found)
        return [int(number) for number in numbers if not isinstance(number, bool)]
    except (ValueError, TypeError):
        return []


def _shards(path: str) -> List[str]:
    files: List[str] = []
    for folder in _folders(path):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        files += [os.path.join(folder, name) for name in names if layout.file_kind(name) == "shard"]
        if len(files) > MAX_FILES:
            break
    return sorted(files, key=layout.natural_key)


def _folders(path: str) -> Iterator[str]:
    """Yield the folder and its groups of samples; no link is followed."""
    yield path
    with os.scandir(path) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False) and (
                layout.is_rows_folder(entry.name) or entry.name == "hidden_states"
            ):
                yield entry.path


def _head(path: str) -> Optional[int]:
    try:
        source = Source(path)
    except Refused:
        return None
    try:
        for entry in describe(source).entries:
            if entry["key"] in ID_KEYS and entry["shape"]:
                return int(entry["shape"][-1])
    except Refused:
        return None
    finally:
        source.close()
    return None
