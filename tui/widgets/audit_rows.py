"""An audit as rows: how far it is, its kinds of faults, and the faults one by one."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from backend.wire import RUN_LIVE
from tui import format
from tui.widgets.rows import bar, clean, fit, pad, right, spread
from tui.widgets.run_rows import run_state

if TYPE_CHECKING:
    from backend.wire import Run
    from tui.widgets.rows import Row
    from tui.widgets.rows import Run as Span

KINDS_WIDTH = 25


def audited(run: Run) -> str:
    """Return the folder that a run audits; empty where it is no audit."""
    words = run.argv
    at = words.index("audit") if "audit" in words else -1
    return words[at + 1] if 0 <= at < len(words) - 1 else ""


def progress_rows(run: Run, summary: dict[str, Any] | None, width: int) -> list[Row]:
    """Make three rows: what is audited, how far it is, and what was found so far or in the end."""
    verdict = run.state == "exited" and run.exit_code in (0, 1)
    state = ("dim", f"ended {format.clock(run.ended_at)}") if verdict else run_state(run)
    rows: list[Row] = [spread([("strong", clean(audited(run)))], [state], width)]
    progress = run.progress
    if progress is None:
        return [*rows, pad([("dim", "no word of its progress yet")], width), pad([("dim", clean(run.reason))], width)]
    share = progress.samples_done / progress.samples_total if progress.samples_total else None
    counts = f" {format.count(progress.samples_done)} of {format.count(progress.samples_total)} files"
    eta = progress.eta_s()
    if run.state in RUN_LIVE:
        counts += f", {format.few(progress.samples_per_s)}/s" + (f", {format.duration(eta)} left" if eta else "")
    rows.append((*bar(share, max(10, width - len(counts))), ("text", counts)))
    if summary is None:
        return [*rows, pad([("text", clean(progress.message))], width)]
    files, faulty = format.count(summary["files"]), format.count(summary["faulty_files"])
    said: Span = ("ok", f"NO FAULT in {files} files, {format.size(summary['bytes'])}")
    if not summary["ok"]:
        said = ("bad", f"{format.count(summary['fault_count'])} FAULTS in {faulty} files of {files}")
    took = format.duration(summary["seconds"]) + (", every byte" if summary["deep"] else "")
    return [*rows, spread([said], [("dim", took)], width)]


def kind_rows(summary: dict[str, Any], chosen: str, width: int) -> list[Row]:
    """Make a row for all findings and one for each kind, the most frequent first; the chosen one is marked."""
    kinds = [(code, kind["count"], level) for level in ("faults", "remarks") for code, kind in summary[level].items()]
    everything = sum(count for _, count, _ in kinds)
    rows: list[Row] = []
    for code, count, level in [("", everything, ""), *kinds]:
        style = {"faults": "bad", "remarks": "warn"}.get(level, "text")
        mark = "● " if code == chosen else "  "
        name = fit(mark + (clean(code) or "everything"), max(10, width - 9))
        rows.append(((style, name), ("text", right(format.count(count), 8))))
    return rows


class FaultRows(Sequence["Row"]):
    """The rows of findings, each made when it is painted; `coded` names the kind of each."""

    def __init__(self, faults: list[dict[str, Any]], width: int, coded: bool) -> None:
        self._faults, self._count, self._width, self._coded = faults, len(faults), width, coded

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [fault_row(fault, self._width, self._coded) for fault in self._faults[at]]
        return fault_row(self._faults[at], self._width, self._coded)


def fault_row(fault: dict[str, Any], width: int, coded: bool) -> Row:
    """Make the row of one finding: its kind, its file, and what is wrong."""
    path = clean(str(fault.get("path", "")))
    roomy = width >= 100
    short = path if roomy else posixpath.basename(path)
    row: list[Span] = [("accent", fit(short or "(the folder)", 34 if roomy else 16) + " ")]
    if coded:
        style = "warn" if fault.get("level") == "warning" else "bad"
        row.insert(0, (style, fit(clean(str(fault.get("code"))), 22 if roomy else 13) + " "))
    return pad([*row, ("text", clean(str(fault.get("text", ""))))], width)
