"""The tree of shards, the tensors of one shard and their values, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from tui import format
from tui.widgets.histogram import histogram_rows
from tui.widgets.rows import BLANK, clean, fit, pad, paragraph, right

if TYPE_CHECKING:
    from tui.shardtree import Line, ShardTree
    from tui.widgets.rows import Row, Run

NOTE_LEVELS = {"info": "dim", "warning": "warn", "error": "bad"}
SHORT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
WIDE = 96
"""Cells from which the table has room for the values beside the shapes."""


class TreeRows(Sequence["Row"]):
    """The rows of a tree's lines, each made when it is painted."""

    def __init__(self, tree: ShardTree, width: int) -> None:
        self._tree, self._lines, self._width = tree, tree.lines, width

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [tree_row(self._tree, line, self._width) for line in self._lines[at]]
        return tree_row(self._tree, self._lines[at], self._width)


def tree_row(tree: ShardTree, line: Line, width: int) -> Row:
    """Make the row of one line: a folder with its counts and bytes, or a file."""
    if line.number < 0:
        return spread_sums([("accent", "▴ ..")], tree.sums(""), width)
    entry = tree.entry(line)
    kind, name = str(entry.get("kind", "other")), clean(str(entry.get("name", "")))
    indent = "  " * (line.folder.count("/") + 1 if line.folder else 0)
    if kind == "folder":
        inside = tree.inside(line)
        folder = tree.folders.get(inside)
        mark = "▾ " if folder is not None and (folder.open or tree.words) else "▸ "
        return spread_sums([("accent", f"{indent}{mark}{name}/")], tree.sums(inside) if folder else None, width)
    size = "" if entry.get("bytes") is None else format.size(float(entry["bytes"]))
    style = "warn" if entry.get("note") else "text" if kind == "shard" else "dim"
    room = max(8, width - 10)
    return ((style, fit(f"{indent}  {name}", room)), ("dim", right(size, 10)))


def spread_sums(left: list[Run], sums: tuple[int, int, bool] | None, width: int) -> Row:
    """Set counts and bytes at the right edge; a `+` says that not all is listed yet."""
    if sums is None or not sums[0]:
        return pad(left, width)
    more = "" if sums[2] else "+"
    tail = right(f"{format.size(float(sums[1]))}{more}", 10)
    count = f"{format.count(sums[0])} "
    return (*pad(left, max(8, width - len(tail) - len(count) - 1)), ("text", " " + count), ("dim", tail))


# --- one shard --------------------------------------------------------------------------------------------------------


def shard_rows(shard: dict[str, Any], width: int) -> tuple[list[Row], dict[int, str]]:
    """Make the table of a shard's tensors, what is wrong with the file in words above, and {row: its tensor's key}."""
    name = str(shard.get("path", "")).rsplit("/", 1)[-1]
    facts = " ".join(filter(None, [str(shard.get("format", "")), format.size(float(shard.get("bytes") or 0))]))
    notes = shard.get("notes") or []
    bad = any(note.get("level") == "error" for note in notes)
    word: Run = ("bad", "DAMAGED") if bad else ("warn", "REMARKS") if notes else ("ok", "WHOLE")
    rows: list[Row] = [pad([("strong", clean(name) + "  "), word, ("dim", f"  {clean(facts)}")], width)]
    for note in notes:
        words = f"{note.get('code', '')}: {note.get('text', '')}"
        rows += paragraph(words, width, NOTE_LEVELS.get(str(note.get("level", "warning")), "warn"), 2)
    entries = shard.get("entries") or []
    if not entries:
        return [*rows, BLANK, (("unknown", "no tensor can be read from this file"),)], {}
    rows.append(BLANK)
    told = {str(one["key"]): one for one in (shard.get("statistics") or {}).get("tensors", ())}
    columns = Columns.of(entries, width)
    head = f"{fit('key', columns.key)} {fit('dtype', 6)}{fit('shape', columns.shape)}"
    head += (right("size", columns.size) + "  " if columns.size else "") + "health"
    rows.append((("faint", head + ("      min      max     mean     norm" if told and width >= WIDE else "")),))
    keys: dict[int, str] = {}
    for entry in entries:
        keys[len(rows)] = str(entry.get("key", ""))
        rows.append(tensor_row(entry, told.get(str(entry.get("key", ""))), columns, width))
        if entry.get("note"):
            rows += paragraph(str(entry["note"]), width, "warn", 2)
    listed = f"the first {len(entries)} of " if shard.get("truncated") else ""
    total = shard.get("logical_bytes") or sum(float(entry.get("bytes") or 0) for entry in entries)
    rows += [BLANK, (("dim", f"{listed}{shard.get('tensors', len(entries))} tensors, {format.size(float(total))}"),)]
    for value in shard.get("values") or []:
        rows += paragraph(f"{value.get('key', '')} = {value.get('text', '')}", width, "dim", 2)
    return rows, keys


class Columns(NamedTuple):
    """How wide the columns of the table are; where there is little room the sizes are left out."""

    key: int
    shape: int
    size: int

    @classmethod
    def of(cls, entries: Sequence[dict[str, Any]], width: int) -> Columns:
        """Fit the columns to what stands in them."""
        longest = max(len(str(entry.get("key", ""))) for entry in entries)
        shape = max(8, *(len(shape_of(entry)) + 1 for entry in entries))
        room = width - 6 - shape - 7
        size = 9 if room - 11 >= min(longest, 18) else 0
        return cls(max(6, min(40, longest, room - size - 2 * bool(size))), shape, size)


def shape_of(entry: dict[str, Any]) -> str:
    """Write a shape: 1×1731×7168."""
    return "×".join(str(n) for n in entry.get("shape") or []) or "scalar"


def tensor_row(entry: dict[str, Any], told: dict[str, Any] | None, columns: Columns, width: int) -> Row:
    """Make the row of one tensor."""
    size = format.size(float(entry["bytes"])) if entry.get("bytes") is not None else "?"
    key, dtype = clean(str(entry.get("key", ""))), clean(str(entry.get("dtype", "")))
    row: list[Run] = [
        ("text" if entry.get("whole", True) else "bad", f"{fit(key, columns.key)} "),
        ("dim", fit(SHORT_TYPES.get(dtype, dtype), 6)),
        ("accent", fit(shape_of(entry), columns.shape)),
        ("dim", right(size, columns.size) + "  " if columns.size else ""),
        health(entry, told),
    ]
    if told is not None and width >= WIDE:
        row[-1] = (row[-1][0], fit(row[-1][1], 7))
        row += [("text", right(number(told.get(name)), 9)) for name in ("min", "max", "mean", "norm")]
    return tuple(row)


def health(entry: dict[str, Any], told: dict[str, Any] | None) -> Run:
    """Say in a word how a tensor is: by its bytes alone, or by its values where they were read."""
    if not entry.get("whole", True):
        return ("bad", "CUT")
    if told is None:
        return ("dim", "whole")
    if told.get("problem"):
        return ("unknown", "unread")
    if told.get("nan"):
        return ("bad", f"NaN {format.short(told['nan'])}")
    if told.get("inf"):
        return ("bad", f"Inf {format.short(told['inf'])}")
    if told.get("zero_rows"):
        return ("warn", f"0-rows {format.short(told['zero_rows'])}")
    return ("ok", "ok")


def number(value: Any) -> str:
    """Write a statistic in at most nine cells."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def value_rows(entry: dict[str, Any], told: dict[str, Any], width: int, height: int) -> list[Row]:
    """Make what is said of one tensor's values: figures, the first and last elements, and their histogram."""
    rows: list[Row] = [pad([("strong", clean(str(entry.get("key", "")))), ("dim", "  its values")], width)]
    if told.get("problem"):
        return [*rows, *paragraph(f"not read: {told['problem']}", width, "unknown")]
    figures = [(name, number(told.get(name))) for name in ("min", "max", "mean", "norm")]
    figures += [("NaN", f"{told.get('nan') or 0:,}"), ("Inf", f"{told.get('inf') or 0:,}")]
    if told.get("rows"):
        figures.append(("zero\u00a0rows", f"{told.get('zero_rows') or 0:,}\u00a0of\u00a0{told['rows']:,}"))
    rows += paragraph(" · ".join(f"{name}\u00a0{text}" for name, text in figures), width)
    ends = [*map(number, told.get("first") or []), *(["…"] if told.get("last") else []), *map(number, told["last"])]
    rows.append(pad([("dim", " ".join(ends))], width))
    share = f"{format.size(float(told.get('read_bytes') or 0))} of {format.size(float(entry.get('bytes') or 0))} read"
    drawn = told.get("histogram")
    if drawn and len(drawn["counts"]) > 1:
        low, high = number(float(drawn["low"])), number(float(drawn["high"]))
        rows += histogram_rows(drawn["counts"], (low, high), width, max(2, height - len(rows) - 3), log=True)
        share += f"; {sum(drawn['counts']):,} values drawn, log heights"
    elif drawn:
        share += f"; every value drawn is {number(float(drawn['low']))}"
    return [*rows, pad([("faint", share)], width)]


# --- a folder ---------------------------------------------------------------------------------------------------------


def folder_rows(
    path: str, sums: tuple[int, int, bool], told: dict[str, Any] | str | None, width: int, height: int
) -> list[Row]:
    """Make what is said of a folder: its path, counts, bytes, and how long its sequences are."""
    shards, size, whole = sums
    short = path if len(path) <= width else "…" + path[1 - width :]
    rows: list[Row] = [pad([("strong", clean(short))], width)]
    words = f"{format.count(shards)} shards, {format.size(float(size))}" + ("" if whole else " so far")
    if not shards:
        words = "no shard in it" if whole else "not listed yet"
    rows += [pad([("text", words)], width), BLANK]
    if isinstance(told, str) or told is None:
        return [*rows, *paragraph(told or "reading how long its sequences are", width, "dim")]
    if not told.get("samples"):
        return [*rows, (("dim", "no record and no shard here tells how long a sequence is"),)]
    rows.append(pad([("title", "Sequence lengths, tokens")], width))
    figures = (("least", "least"), ("median", "median"), ("mean", "mean"), ("most", "most"))
    text = " · ".join(f"{word}\u00a0{told[name]:,.0f}" for name, word in figures)
    rows += paragraph(f"{text} · total\u00a0{format.short(told['tokens'])}", width)
    tall = max(3, min(12, height - len(rows) - 4)) if len(told["counts"]) > 1 else 0
    rows += histogram_rows(told["counts"], (f"{told['low']:,}", f"{told['most']:,}"), width, tall)
    sources = {"journal": "by the journal", "index": "by sample_lengths.json", "heads": "by the heads of shards"}
    of = f"{told['samples']:,} of {told['of']:,} samples" if told["of"] else f"{told['samples']:,} samples"
    return [*rows, pad([("faint", f"{of}, {sources.get(told['source'], told['source'])}")], width)]
