"""Reading the header of a safetensors file, and whether the file is what the header says."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

from backend.agent.shards.findings import ERROR, INFO, WARNING
from backend.agent.shards.pickles import walk
from backend.agent.shards.pickles.nodes import Unreadable
from backend.agent.shards.report import Part, Report, entry
from backend.agent.shards.source import Source
from backend.shardfmt import safetensors as fmt
from backend.shardfmt.dtypes import ITEM_BYTES, MAX_COUNT, SAFETENSORS, count, is_floating
from backend.wire import printable

MAX_HEADER_BYTES = 8 << 20
"""What is read here: some 80,000 tensors. The format allows 100 MB."""

MAX_CONTAINERS = 300_000
"""Objects and lists in JSON that is parsed: each costs a hundred bytes, whatever its text. A tensor has three."""

MAX_TENSORS = 200_000
MAX_METADATA = 50


class _Twice(Exception):
    """A name that stands in the header twice."""


def read(source: Source, report: Report) -> None:
    """Fill the report. Raises Unreadable where nothing can be said of the contents."""
    report.format = "safetensors"
    header = _header(source)
    metadata = header.pop(fmt.METADATA, None)
    if metadata is not None:
        _metadata(metadata, report)
    if len(header) > MAX_TENSORS:
        raise Unreadable("too-large", "a header of %d tensors" % len(header))
    data_at = fmt.LENGTH_BYTES + fmt.header_bytes(source.head)
    spans: List[Tuple[int, int, str]] = []
    for name, stated in header.items():
        key = walk.key_of(name)
        span = _tensor(key, stated, data_at, source, report)
        if span is not None:
            spans.append((span[0], span[1], key))
    _check_spans(sorted(spans), data_at, source, report)


def needed_bytes(source: Source) -> int:
    """Return the size of a whole file. Raises Unreadable."""
    ends = [stated[3] for stated in map(_stated, _header(source).values()) if stated is not None]
    return fmt.LENGTH_BYTES + fmt.header_bytes(source.head) + max(ends, default=0)


def _header(source: Source) -> Dict[str, Any]:
    size = fmt.header_bytes(source.head)
    if fmt.LENGTH_BYTES + size > source.size_bytes:
        text = "cut off or not safetensors: it states a header of %d bytes and has %d in all"
        raise Unreadable("truncated", text % (size, source.size_bytes))
    if size > fmt.MAX_HEADER_BYTES:
        raise Unreadable("bad-header", "a header of %d bytes, over the format's limit" % size)
    if size > MAX_HEADER_BYTES:
        raise Unreadable("too-large", "a header of %d bytes is longer than is read here" % size)
    raw = source.read(fmt.LENGTH_BYTES, size)
    refuse_crowded(raw)
    try:
        header = json.loads(raw, object_pairs_hook=_pairs, parse_int=whole_number)
    except _Twice as error:
        raise Unreadable("duplicate-key", "its header has the name %s twice" % walk.key_of(str(error))) from None
    except (ValueError, RecursionError):
        raise Unreadable("bad-header", "its header is not JSON") from None
    if not isinstance(header, dict):
        raise Unreadable("bad-header", "its header is not a JSON object")
    return header


def refuse_crowded(text: bytes) -> None:
    """Raise Unreadable where JSON holds more objects and lists than are worth their memory."""
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise Unreadable("too-large", "JSON of more than %d objects and lists" % MAX_CONTAINERS)


def _pairs(items: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(items)
    if len(found) != len(items):
        seen = set()
        for name, _ in items:
            if name in seen:
                raise _Twice(name)
            seen.add(name)
    return found


def whole_number(text: str) -> int:
    """Read a number. Long ones are refused: older Pythons need the square of the length."""
    if len(text) > 20:
        raise ValueError("a number of over 20 digits")
    return int(text)


def _metadata(metadata: Any, report: Report) -> None:
    if not isinstance(metadata, dict):
        report.note("bad-metadata", "its metadata is no dictionary: the reference loader refuses the file", WARNING)
        return
    if any(not isinstance(value, str) for value in metadata.values()):
        text = "its metadata holds something that is no text: the reference loader refuses the file"
        report.note("bad-metadata", text + "; its tensors are whole", WARNING)
    for name, value in list(metadata.items())[:MAX_METADATA]:
        shown = value if isinstance(value, str) else json.dumps(value)
        report.meta(name, shown)


def _tensor(key: str, stated: Any, data_at: int, source: Source, report: Report) -> Optional[Tuple[int, int]]:
    """Add one tensor and return its span in the data, or None where none is stated."""
    found = _stated(stated)
    if found is None:
        report.note("bad-entry", "%s: its entry does not state dtype, shape and data_offsets" % key, ERROR, key)
        return None
    dtype, shape, begin, end = found
    size, total = end - begin, count(shape)
    name = SAFETENSORS.get(dtype, printable(dtype, 40))
    needed = None if total is None or dtype not in SAFETENSORS else total * ITEM_BYTES[name]
    if total is None:
        report.note("shape-overflow", "%s has more elements than can be counted" % key, ERROR, key)
    elif needed is None:
        report.note("unknown-type", "%s has the type %s: its size is that of its offsets" % (key, name), INFO, key)
    elif needed != size:
        report.note("storage-size", "%s has %d bytes, and its shape needs %d" % (key, size, needed), ERROR, key)
    row = entry(key, name, shape, None if total is None else size)
    whole = data_at + end <= source.size_bytes and needed in (None, size)
    row.update(stride=_strides(shape), offset=data_at + begin, storage=key, whole=whole)
    report.stored_bytes += size
    there = max(0, min(size, source.size_bytes - data_at - begin))
    if there:
        report.parts.append(Part(key, key, data_at + begin, there, None, is_floating(name)))
    report.tensor(row)
    return begin, end


def _stated(stated: Any) -> Optional[Tuple[str, List[int], int, int]]:
    """Return (dtype, shape, begin, end) as the header states them; None where one is impossible."""
    if not isinstance(stated, dict):
        return None
    dtype, shape, offsets = stated.get("dtype"), stated.get("shape"), stated.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        return None
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return None
    return dtype, shape, offsets[0], offsets[1]


def _counts(values: List[Any]) -> bool:
    return all(type(item) is int and 0 <= item <= MAX_COUNT for item in values)


def _strides(shape: List[int]) -> List[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = min(step * max(size, 1), MAX_COUNT)
    return strides[::-1]


def _check_spans(spans: List[Tuple[int, int, str]], data_at: int, source: Source, report: Report) -> None:
    end = 0
    for begin, after, key in spans:
        if begin < end:
            text = "%s begins at %d, inside the tensor before it, which ends at %d" % (key, begin, end)
            report.note("overlap", text, ERROR, key)
        elif begin > end:
            report.note("hole", "%d bytes before %s belong to no tensor" % (begin - end, key), ERROR, key)
        end = max(end, after)
    there = source.size_bytes - data_at
    if there < end:
        whole = sum(after <= there for _, after, _ in spans)
        text = "cut off: %d of %d bytes are there; %d of %d tensors are whole"
        report.note("truncated", text % (source.size_bytes, data_at + end, whole, len(spans)), ERROR)
    elif there > end:
        report.note("trailing-bytes", "%d bytes follow the last tensor" % (there - end))
