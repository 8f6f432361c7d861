"""Folders of shards and the tensors of one shard, as rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tui import format
from tui.widgets.rows import BLANK, clean, fit, pad, paragraph, right

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.widgets.rows import Row

NOTE_LEVELS = {"info": "dim", "warning": "warn", "error": "bad"}
MARKS = {"folder": ("accent", "▸ "), "shard": ("text", "  "), "other": ("dim", "  ")}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Make the key that sorts data_9 before data_10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part.lower()) for part in parts if part]


def sort_entries(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order a folder: folders first, then by name with numbers as numbers."""
    return sorted(entries, key=lambda entry: (entry.get("kind") != "folder", natural(str(entry.get("name", "")))))


def entry_row(entry: dict[str, Any], width: int) -> Row:
    """Make the row of one file or folder."""
    kind = str(entry.get("kind", "other"))
    style, mark = MARKS.get(kind, MARKS["other"])
    size = "" if kind == "folder" or entry.get("bytes") is None else format.size(float(entry["bytes"]))
    name = clean(str(entry.get("name", ""))) + ("/" if kind == "folder" else "")
    if width < 30:
        return pad([(style, mark + name)], width)
    return ((style, f"{mark}{fit(name, width - 12)}"), ("dim", right(size, 10)))


def listing_rows(listing: dict[str, Any], entries: Sequence[dict[str, Any]], width: int) -> list[Row]:
    """Make the rows of a folder, the way up first."""
    rows: list[Row] = [(("dim", "▴ .."),), *(entry_row(entry, width) for entry in entries)]
    if listing.get("truncated"):
        rows.append((("warn", "  there are more; the list is cut"),))
    return rows


def tensor_rows(shard: dict[str, Any], width: int) -> list[Row]:
    """Make the table of a shard's tensors, what is wrong with it in words above."""
    name = str(shard.get("path", "")).rsplit("/", 1)[-1]
    facts = " ".join(filter(None, [str(shard.get("format", "")), format.size(float(shard.get("bytes") or 0))]))
    rows: list[Row] = [pad([("strong", clean(name)), ("dim", f"  {clean(facts)}")], width)]
    notes = shard.get("notes") or []
    for note in notes:
        words = f"{note.get('code', '')}: {note.get('text', '')}" if isinstance(note, dict) else str(note)
        level = str(note.get("level", "warning")) if isinstance(note, dict) else "warning"
        rows += paragraph(words, width, NOTE_LEVELS.get(level, "warn"), 2)
    entries = shard.get("entries") or []
    rows.append(BLANK)
    if not entries:
        return [*rows, (("unknown", "no tensor can be read from this file"),)]
    key_width = max(6, min(32, max(len(str(entry.get("key", ""))) for entry in entries), width - 34))
    rows.append((("faint", f"{fit('key', key_width)} {fit('dtype', 9)}{fit('shape', 14)}{'size':>9}"),))
    for entry in entries:
        rows.append(_tensor_row(entry, key_width))
        if entry.get("note"):
            rows += paragraph(str(entry["note"]), width, "warn", 2)
    listed = f"the first {len(entries)} of " if shard.get("truncated") else ""
    total = shard.get("logical_bytes") or sum(float(entry.get("bytes") or 0) for entry in entries)
    rows += [BLANK, (("dim", f"{listed}{shard.get('tensors', len(entries))} tensors, {format.size(float(total))}"),)]
    for value in shard.get("values") or []:
        rows += paragraph(f"{value.get('key', '')} = {value.get('text', '')}", width, "dim", 2)
    return rows


def _tensor_row(entry: dict[str, Any], key_width: int) -> Row:
    shape = "×".join(str(n) for n in entry.get("shape") or []) or "scalar"
    size = format.size(float(entry["bytes"])) if entry.get("bytes") is not None else "?"
    key, dtype = clean(str(entry.get("key", ""))), clean(str(entry.get("dtype", "")))
    return (
        ("text" if entry.get("whole", True) else "bad", f"{fit(key, key_width)} "),
        ("dim", fit(dtype, 9)),
        ("accent", fit(shape, max(14, len(shape)))),
        ("dim", right(size, 9)),
    )
