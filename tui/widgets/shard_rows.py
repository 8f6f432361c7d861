"""Folders of shards and the tensors of one shard, as rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tui import format
from tui.widgets.rows import BLANK, clean, fit, pad, paragraph, right

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.widgets.rows import Row

MARKS = {"folder": ("accent", "▸ "), "shard": ("text", "  "), "other": ("dim", "  ")}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Make the key that sorts data_9 before data_10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part.lower()) for part in parts if part]


def sort_entries(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order a folder: folders first, then by name with numbers as numbers."""
    return sorted(
        entries, key=lambda entry: (entry.get("kind") != "folder", natural(str(entry.get("name", ""))))
    )


def entry_row(entry: dict[str, Any], width: int) -> Row:
    """Make the row of one file or folder."""
    kind = str(entry.get("kind", "other"))
    style, mark = MARKS.get(kind, MARKS["other"])
    size = "" if kind == "folder" or entry.get("bytes") is None else format.size(float(entry["bytes"]))
    name = clean(str(entry.get("name", ""))) + ("/" if kind == "folder" else "")
    return ((style, f"{mark}{fit(name, max(4, width - 12))}"), ("dim", right(size, 10)))


def listing_rows(listing: dict[str, Any], entries: Sequence[dict[str, Any]], width: int) -> list[Row]:
    """Make the rows of a folder, the way up first."""
    rows: list[Row] = [(("dim", "▴ .."),), *(entry_row(entry, width) for entry in entries)]
    if listing.get("truncated"):
        rows.append((("warn", "  there are more; the list is cut"),))
    return rows


def tensor_rows(shard: dict[str, Any], width: int) -> list[Row]:
    """Make the table of a shard's tensors, what is wrong with it in words above."""
    name = str(shard.get("path", "")).rsplit("/", 1)[-1]
    facts = " ".join(
        filter(None, [str(shard.get("format", "")), format.size(float(shard.get("bytes") or 0))])
    )
    rows: list[Row] = [pad([("strong", clean(name)), ("dim", f"  {clean(facts)}")], width)]
    notes = shard.get("notes") or []
    for note in notes:
        words = f"{note.get('code', '')}: {note.get('text', '')}" if isinstance(note, dict) else str(note)
        rows += paragraph(words, width, "warn", 2)
    entries = shard.get("entries") or []
    rows.append(BLANK)
    if not entries:
        return [*rows, (("unknown", "no tensor can be read from this file"),)]
    key_width = max(8, min(32, max(len(str(entry.get("key", ""))) for entry in entries), width - 40))
    rows.append((("faint", f"{fit('key', key_width)}  {fit('dtype', 9)}{fit('shape', 18)}{'size':>10}"),))
    for entry in entries:
        shape = " × ".join(str(n) for n in entry.get("shape") or []) or "scalar"
        size = format.size(float(entry.get("bytes") or 0))
        key, dtype = clean(str(entry.get("key", ""))), clean(str(entry.get("dtype", "")))
        rows.append(
            (
                ("text", f"{fit(key, key_width)}  "),
                ("dim", fit(dtype, 9)),
                ("accent", fit(shape, 18)),
                ("dim", right(size, 10)),
            )
        )
    total = sum(float(entry.get("bytes") or 0) for entry in entries)
    return [*rows, BLANK, (("dim", f"{len(entries)} tensors, {format.size(total)}"),)]
