"""The corpus that was extracted, as what its samples must be: a hash of the ids and of the mask of each.

It is read as the extraction reads it: lines end at LF, blank ones are nothing, those listed as left out are no samples.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any, Callable, Dict, List, Optional, Set

from backend.agent.shards.audit.look import ids_hash, mask_hash

MAX_LINE_BYTES = 64 << 20


def read(path: str, skipped: Optional[List[int]], tick: Callable[[], None]) -> Dict[str, Any]:
    """Return {sha256, rows: [[ids hash, mask hash, id]], problem} of a corpus.

    `skipped` are the numbers of the lines that are no samples; None: those that cannot be read are none. `problem` says
    what keeps it from being compared with, or is empty.
    """
    digest, problem = hashlib.sha256(), ""
    rows: List[List[str]] = []
    left_out: Optional[Set[int]] = None if skipped is None else set(skipped)
    try:
        with open(path, "rb") as file:
            number = 0
            while True:
                raw = file.readline(MAX_LINE_BYTES)
                if not raw:
                    break
                number += 1
                digest.update(raw)
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    raw = raw[3:]
                tick()
                if not raw.strip(b" \t\r\n") or (left_out is not None and number in left_out):
                    continue
                row = _row(raw, len(rows))
                if row is not None:
                    rows.append(row)
                elif left_out is not None and not problem:
                    problem = "%s:%d: no sample, and not listed as left out" % (path, number)
    except OSError as error:
        problem = "%s: %s" % (path, error.strerror)
    return {"sha256": digest.hexdigest(), "rows": rows, "problem": problem}


def _row(raw: bytes, index: int) -> Optional[List[str]]:
    try:
        record = json.loads(raw)
        ids = array("q", record["input_ids"])
        mask = bytes(record.get("loss_mask") or [1] * len(ids))
        name = record.get("id")
        if not ids or len(mask) != len(ids):
            return None
        return [ids_hash(ids), mask_hash(mask), str(index) if name is None or name == "" else str(name)]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
