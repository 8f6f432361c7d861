"""One file, looked at by itself: what its container says, its ids and mask, and the last row of each state.

Whatever the file's size this reads its head and tail, its ids and mask, and a row a tensor: some 100 KB. What is
returned is plain data that a cache can keep; what only other files can tell is judged later (`rules`).
"""

from __future__ import annotations

import hashlib
import re
from array import array
from typing import Any, Callable, Dict, List, Optional

from backend.agent.shards.audit.scan import file_crc32, scan
from backend.agent.shards.audit.values import binary, ends, first_bad, integers, zero_rows
from backend.agent.shards.describe import describe
from backend.agent.shards.findings import ERROR, INFO
from backend.agent.shards.formats.alike import Alike
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source
from backend.shardfmt import layout
from backend.shardfmt.dtypes import ITEM_BYTES
from backend.wire import Refused

IDS = (layout.INPUT_IDS, "token_ids")
MAX_TOKENS_BYTES = 64 << 20
MAX_TENSORS = 256
"""A sample has four tensors, or one a layer; of a file with more only these take part in the comparison."""

MAX_ROW_BYTES = 1 << 20

Look = Dict[str, Any]
Entries = Dict[str, Dict[str, Any]]


class _Source(Source):
    """A file that says with every read that the look goes on."""

    def __init__(self, path: str, tick: Callable[[], None]) -> None:
        self._tick = tick
        super().__init__(path)

    def read(self, at: int, size: int) -> bytes:
        self._tick()
        return super().read(at, size)


def look(path: str, deep: bool, tick: Callable[[], None], alike: Optional[Alike] = None, numpy: Any = None) -> Look:
    """Look at one file. `deep` reads all of it, with numpy where it is given; `tick` is called now and then meanwhile;
    `alike` as in `describe`.

    Returns {format, notes: [[code, level, text]], tensors: [[key, dtype, shape]], ids, mask, rows, crc32}: `ids` is
    {key, tokens, hash, least, most} or None, `mask` {hash} or None, `rows` a hash of the last row of every state (empty
    where one is zero or cannot be read), `crc32` that of the whole file after a deep look, else None.
    """
    found: Look = {
        "format": "", "notes": [], "tensors": [], "ids": None, "mask": None, "rows": "", "crc32": None, "deep": deep,
    }  # fmt: skip
    try:
        source = _Source(path, tick)
    except Refused as refused:
        found["notes"].append([refused.code, ERROR, str(refused)])
        return found
    try:
        _look(source, deep, alike, numpy, found)
    except Refused as refused:
        found["notes"].append([refused.code, ERROR, str(refused)])
    except Unreadable as problem:  # a compressed stream, beyond what its description needed
        found["notes"].append([problem.code, ERROR, problem.text])
    finally:
        source.close()
    return found


def _look(source: Source, deep: bool, alike: Optional[Alike], numpy: Any, found: Look) -> None:
    report = describe(source, deep, alike)
    found["format"] = report.format
    _take(report, found)
    entries: Entries = {entry["key"]: entry for entry in report.entries[:MAX_TENSORS]}
    found["tensors"] = [[entry["key"], entry["dtype"], entry["shape"]] for entry in entries.values()]
    content: Source = report.content or source
    _ids(content, entries, report, found)
    _mask(content, entries, found)
    states = [entry for entry in entries.values() if _is_readable_state(entry)]
    if deep or content is source:  # of a compressed file the last rows cost all that lies before them
        _rows(content, states, entries, deep, found)
    if deep:
        scan(content, states, found["notes"], numpy)
        found["crc32"] = file_crc32(source, report.sums)


def is_state(key: str) -> bool:
    """Say whether a tensor's key is one of hidden states."""
    return "hidden" in key


def starred(key: str) -> str:
    """Return a key with the numbers of a list's items left out."""
    return re.sub(r"\[\d+\]", "[*]", key) if "[" in key else key


def ids_hash(numbers: "array[int]") -> str:
    """Return what stands for a list of token ids, whatever the type it is kept in."""
    wide = numbers if numbers.typecode == "q" else array("q", numbers)
    return hashlib.blake2b(wide.tobytes(), digest_size=12).hexdigest()


def mask_hash(mask: bytes) -> str:
    """Return what stands for a loss mask of 0 and 1, a byte each."""
    return hashlib.blake2b(mask, digest_size=12).hexdigest()


def worst(found: Look) -> List[str]:
    """Return the codes of a look's own faults."""
    return [code for code, level, _ in found["notes"] if level == ERROR]


def _take(report: Report, found: Look) -> None:
    """Take over what was found in the container: all but what is only told."""
    for finding in report.findings:
        if finding.level != INFO:
            found["notes"].append([finding.code, finding.level, finding.text])
    if report.findings_left_out:
        found["notes"].append(["notes-left-out", ERROR, "%d more findings" % report.findings_left_out])
    codes = [code for code, _, _ in found["notes"]]
    if "truncated" not in codes and "cut-tensor" not in codes:
        for entry in [entry for entry in report.entries if not entry["whole"]][:3]:
            found["notes"].append(["cut-tensor", ERROR, "%s: not all of its bytes are there" % entry["key"]])


def _bytes_of(content: Source, entry: Optional[Dict[str, Any]]) -> Optional[bytes]:
    """Return a whole tensor's bytes, or None where they are not there in one piece."""
    if entry is None or entry["offset"] is None or not entry["whole"] or not entry["contiguous"]:
        return None
    if entry["bytes"] is None or entry["bytes"] > MAX_TOKENS_BYTES:
        return None
    data = content.read(entry["offset"], entry["bytes"])
    return data if len(data) == entry["bytes"] else None


def _ids(content: Source, entries: Entries, report: Report, found: Look) -> None:
    entry = next((entries[key] for key in IDS if key in entries), None)
    if entry is None:
        other = next((value for value in report.values if value["key"].partition("[")[0] in IDS), None)
        if other is not None:
            found["notes"].append(["ids-not-tensor", ERROR, "%s is %s" % (other["key"], other["text"])])
        elif entries:
            found["notes"].append(["no-ids", ERROR, "no token ids; its keys: %s" % ", ".join(list(entries)[:8])])
        return
    tokens = 1
    for size in entry["shape"]:
        tokens *= size
    found["ids"] = {"key": entry["key"], "tokens": tokens, "hash": "", "least": None, "most": None}
    if tokens == 0:
        found["notes"].append(["zero-length", ERROR, "%s has no token" % entry["key"]])
    if entry["dtype"] not in ("int64", "int32"):
        found["notes"].append(["ids-dtype", ERROR, "%s is %s, not int64 or int32" % (entry["key"], entry["dtype"])])
        return
    data = _bytes_of(content, entry)
    if data:
        numbers = integers(data, entry["dtype"])
        least, most = ends(numbers)
        found["ids"].update(hash=ids_hash(numbers), least=least, most=most)


def _mask(content: Source, entries: Entries, found: Look) -> None:
    entry = entries.get(layout.LOSS_MASK)
    data = _bytes_of(content, entry)
    if entry is None or not data:
        return
    low = binary(data, entry["dtype"])
    if low is None:
        try:
            numbers = integers(data, entry["dtype"])
            text = "%s holds %d to %d, not 0 and 1" % (entry["key"], *ends(numbers))
        except KeyError:
            text = "%s is %s, not whole numbers" % (entry["key"], entry["dtype"])
        found["notes"].append(["mask-values", ERROR, text])
        return
    found["mask"] = {"hash": mask_hash(low)}
    if 1 not in low:
        found["notes"].append(["mask-empty", ERROR, "%s is all zero: the sample trains nothing" % entry["key"]])


def _is_readable_state(entry: Dict[str, Any]) -> bool:
    if not is_state(entry["key"]) or len(entry["shape"]) < 2 or not entry["bytes"]:
        return False
    return bool(entry["dtype"] in ITEM_BYTES and entry["offset"] is not None and entry["contiguous"] and entry["whole"])


def _rows(content: Source, states: List[Dict[str, Any]], entries: Entries, deep: bool, found: Look) -> None:
    """Look at the last row of every state: the first is equal in all files that begin with one token."""
    digest = hashlib.blake2b(digest_size=12)
    whole = len(states) == sum(is_state(key) for key in entries)
    for entry in states:
        size = min(entry["shape"][-1] * ITEM_BYTES[entry["dtype"]], MAX_ROW_BYTES)
        row = content.read(entry["offset"] + entry["bytes"] - size, size)
        digest.update(row)
        if zero_rows(row, size):
            whole = False
            if not deep:
                found["notes"].append(["zero-row", ERROR, "%s: its last row is all zero" % entry["key"]])
        elif not deep and first_bad(row, entry["dtype"]) >= 0:
            found["notes"].append(["non-finite", ERROR, "%s: NaN or infinity in its last row" % entry["key"]])
    if states and whole:
        found["rows"] = digest.hexdigest()
