"""The plan of a reset as rows: what it loses, whom it kills as trees, whom it spares and why, what cannot be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui import format
from tui.widgets.process_tree import forest
from tui.widgets.rows import BLANK, clean, fit, paragraph, right, row_width, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backend.wire import Plan, Process
    from tui.widgets.process_tree import Branch
    from tui.widgets.rows import Row

USER, MEMORY, AGE = 10, 9, 12
"""Widths of the columns; the GPUs take the rest."""

LEAST_FIRST = 9
"""The first column holds branch and pid, as wide as the deepest needs."""


def gpu_list(gpus: list[int]) -> str:
    """Write GPU numbers with runs joined: 0-3, 6."""
    parts: list[list[int]] = []
    for gpu in sorted(set(gpus)):
        if parts and gpu == parts[-1][-1] + 1:
            parts[-1].append(gpu)
        else:
            parts.append([gpu])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "-"


def plan_rows(plan: Plan, width: int) -> list[Row]:
    """Show whom a reset would kill and how, what is lost, who is spared and why, and what could not be seen."""
    # What would be lost comes first: the list of processes may be longer than the window.
    rows = section("LOSES", "warn", plan.losses, width)[1:]
    if plan.victims:
        count = len(plan.victims)
        rows += [BLANK] * bool(rows)
        rows.append((("bad", f"KILLS {count} process{'es' * (count != 1)}"), ("dim", _sum(plan.victims))))
        rows += process_rows(plan.victims, width)
    else:
        rows.append((("ok", "NOTHING TO KILL"), ("text", "  no process holds a GPU of this host")))
    ghosts = [
        f"pid {ghost.get('pid')} on GPU {ghost.get('gpu')}: the driver names it, but it is not there"
        for ghost in plan.ghosts
    ]
    rows += section("GHOSTS", "unknown", ghosts, width)
    rows += section("COULD NOT BE READ", "unknown", plan.unseen, width)
    if plan.spared:
        rows += [BLANK, (("ok", f"SPARES {len(plan.spared)}"),), *process_rows(plan.spared, width)]
    if plan.baseline:
        rows += [BLANK, *paragraph(f"baseline {plan.baseline}", width, "dim")]
    return rows


def plan_summary(plan: Plan) -> str:
    """Say in a few words what the rows say, for where not all of them are in sight."""
    words = [f"kills {len(plan.victims)}", f"spares {len(plan.spared)}"]
    words += [f"{len(plan.unseen)} not readable"] if plan.unseen else []
    return " · ".join(words)


def process_rows(processes: Sequence[Process], width: int) -> list[Row]:
    """Show processes as trees: of each a line of numbers, then its command, and why and how, broken at spaces."""
    branches = forest(processes)
    first = max([LEAST_FIRST, *(len(one.mark) + len(str(one.process.pid)) for one in branches)])
    head = f"{'process':<{first}}  {'user':<{USER}}{'memory':>{MEMORY}}   {'age':<{AGE}}GPUs"
    rows: list[Row] = [(("faint", head),)]
    for branch in branches:
        rows += _process(branch, first, width)
    return rows


def _process(branch: Branch, first: int, width: int) -> list[Row]:
    one = branch.process
    used = one.used_bytes.number()
    amount = format.size(used) if used is not None else "-" if one.used_bytes.unsupported else "?"
    age = format.duration(one.age_s) if one.age_s is not None else "?"
    pid = f"{one.pid}".ljust(first - len(branch.mark))
    columns = f"  {fit(clean(one.user), USER)}{right(amount, MEMORY)}   {age:<{AGE}}"
    line: Row = (("faint", branch.mark), ("strong", pid + columns))
    gpus = wrap(gpu_list(one.gpus), max(4, width - row_width(line)))
    rows: list[Row] = [(*line, ("strong", gpus[0]))]
    indent = first + 2
    rows += [(*_past(branch.below, row_width(line)), ("strong", more)) for more in gpus[1:]]
    past, room = _past(branch.below, indent), max(20, width - indent)
    command, why = clean(one.command or one.exe), _why(one)
    if command and why and row_width((("text", f"{command} · {why}"),)) <= room:
        return [*rows, (*past, ("text", command), ("dim", f" · {why}"))]
    rows += [(*past, ("text", part)) for part in wrap(command, room) if command]
    return rows + [(*past, ("dim", part)) for part in wrap(why, room) if why]


def _past(below: str, indent: int) -> Row:
    """Lead a line to its column past the branches that run on beside it."""
    return (("faint", below.ljust(indent)),)


def _why(one: Process) -> str:
    return " · ".join(filter(None, (clean(one.reason), clean(one.method))))


def _sum(victims: Iterable[Process]) -> str:
    """Say which GPUs the victims hold and how much of their memory is known."""
    gpus = gpu_list([gpu for one in victims for gpu in one.gpus])
    known = [one.used_bytes.number() for one in victims]
    total = sum(used for used in known if used is not None)
    return f"  on GPU {gpus}" + (f", {format.size(total)}" if total else "") if gpus != "-" else ""


def section(title: str, style: str, lines: Iterable[str], width: int) -> list[Row]:
    """Show lines below a title, nothing where there are none."""
    found = list(lines)
    if not found:
        return []
    rows: list[Row] = [BLANK, ((style, title),)]
    for line in found:
        rows += paragraph(line, width, "text", 2)
    return rows
