"""From what a pickle describes to the rows of a report: its tensors, its values, and what is odd about them."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent.shards.findings import ERROR, INFO, WARNING
from backend.agent.shards.pickles import walk
from backend.agent.shards.pickles.nodes import Array, Opaque, Storage, Tensor
from backend.agent.shards.pickles.rebuild import understood
from backend.agent.shards.pickles.unpickle import Unpickler
from backend.agent.shards.report import Part, Report, entry
from backend.shardfmt.dtypes import is_floating
from backend.wire import printable


class Extent(NamedTuple):
    """Where a storage's data lies and how much of it is there. `at` is None where that is unknown."""

    at: Optional[int]
    there_bytes: int
    name: str = ""
    crc32: Optional[int] = None


NOWHERE = Extent(None, 0)


def add_rows(report: Report, root: Any, unpickler: Unpickler, where: Dict[str, Extent]) -> None:
    """Add every tensor and value below the root. `where` has the extent of each storage that was found."""
    used: Dict[str, List[Tuple[str, Tensor]]] = {}
    for key, leaf in walk.leaves(root, report):
        if isinstance(leaf, Tensor):
            if leaf.storage is not None:
                used.setdefault(leaf.storage.key, []).append((key, leaf))
            _add_tensor(report, key, leaf, where)
        elif isinstance(leaf, Array):
            _add_array(report, key, leaf)
        else:
            report.value(key or "(root)", walk.text_of(leaf))
            if isinstance(leaf, Opaque) and not key:
                report.note("not-a-container", "it holds %s, not tensors by name" % walk.text_of(leaf), WARNING)
    for name, tensors in used.items():
        _note_sharing(report, name, [tensor for _, tensor in tensors])
        _add_part(report, tensors, where.get(name, NOWHERE))
    walk.note_names([name for name, found in unpickler.names.items() if not understood(found)], report)


def _add_tensor(report: Report, key: str, tensor: Tensor, where: Dict[str, Extent]) -> None:
    if tensor.storage is None:
        row = entry(key or "(root)", tensor.dtype, tensor.shape, tensor.size_bytes if tensor.kind == "meta" else 0)
        row.update(contiguous=False, note=printable(tensor.kind, 120), stride=list(tensor.stride) or None)
        report.tensor(row)
    elif report.full and tensor.end * (tensor.item_bytes or 0) <= tensor.storage.size_bytes:
        report.count(tensor.size_bytes)
    else:
        extent = where.get(tensor.storage.key, NOWHERE)
        report.tensor(_row(report, key or "(root)", tensor, tensor.storage, extent))


def _add_array(report: Report, key: str, array: Array) -> None:
    row = entry(key or "(root)", printable(array.dtype, 40), array.shape, array.held_bytes)
    row["note"] = "a numpy array, whose bytes lie in the description"
    report.stored_bytes += array.held_bytes
    report.tensor(row)


def _row(report: Report, key: str, tensor: Tensor, storage: Storage, extent: Extent) -> Dict[str, Any]:
    row = entry(key, tensor.dtype, tensor.shape, tensor.size_bytes)
    row.update(stride=list(tensor.stride), storage=storage.key, contiguous=tensor.contiguous)
    item = tensor.item_bytes
    if item is None:
        text = "%s has the type %s, whose size is not known here" % (key, tensor.dtype)
        report.note("unknown-type", text, WARNING, key)
        return row
    if tensor.size_bytes is None:
        report.note("shape-overflow", "%s has more elements than torch can count" % key, ERROR, key)
    beyond = tensor.end * item - storage.size_bytes
    if beyond > 0:
        elements = -(-beyond // item)
        text = "%s ends %d element%s beyond its storage" % (key, elements, "" if elements == 1 else "s")
        report.note("view-outside-storage", text, ERROR, key)
    row["offset"] = None if extent.at is None else extent.at + tensor.offset * item
    there = tensor.end * item <= extent.there_bytes
    row["whole"] = beyond <= 0 and there
    if beyond <= 0 and not there and extent.name:
        text = "%s: only %d bytes of its storage are there" % (key, extent.there_bytes)
        report.note("cut-tensor", text, ERROR, key)
    words = [printable(tensor.kind, 120)] if tensor.kind else []
    if tensor.size_bytes is not None and tensor.size_bytes > storage.size_bytes:
        words.append("repeated: %d stored bytes" % storage.size_bytes)
    if not storage.device.startswith("cpu"):
        words.append("saved from %s" % printable(storage.device, 20))
    row["note"] = ", ".join(words)
    return row


def _add_part(report: Report, tensors: List[Tuple[str, Tensor]], extent: Extent) -> None:
    """Remember where a storage lies, for whoever reads all of it."""
    if extent.at is not None and extent.there_bytes:
        floating = all(is_floating(tensor.dtype) for _, tensor in tensors)
        key = tensors[0][0] or "(root)"
        report.parts.append(Part(extent.name, key, extent.at, extent.there_bytes, extent.crc32, floating))


def _note_sharing(report: Report, name: str, tensors: List[Tensor]) -> None:
    """Say where a storage is shared, or far larger than what is used of it: a slice saves all of a batch."""
    held = tensors[0].storage
    stored = held.size_bytes if held is not None else 0
    used = sum(min(tensor.size_bytes or 0, stored) for tensor in tensors)
    if len(tensors) > 1:
        types = sorted({tensor.dtype for tensor in tensors})
        if len(types) > 1:
            text = "%d tensors share storage %s under the types %s; torch may refuse it"
            report.note("two-types", text % (len(tensors), name, " and ".join(types)), WARNING)
        else:
            report.note("shared-storage", "%d tensors share storage %s" % (len(tensors), name), INFO)
    if 0 < used * 2 < stored:
        text = "storage %s has %d bytes, %d times what its tensors use (%d): a slice, saved with all its batch"
        report.note("oversized-storage", text % (name, stored, stored // used, used), WARNING)
