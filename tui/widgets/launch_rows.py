"""The stages of a launch and the gates before it, as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.widgets.rows import clean, fit, paragraph, wrap
from tui.widgets.run_rows import STAGE_MARKS, WAITING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.config import Config, Stage
    from backend.wire import Gate
    from tui.widgets.rows import Row

GATES = {True: ("ok", "ok"), False: ("bad", "FAIL"), None: ("unknown", "unknown")}

MOST_LINES = 3
"""Lines of one gate's reason: a host with eight dirty GPUs has much to say, and the other gates must stay in sight."""


def launchable(config: Config, host: str) -> list[str]:
    """List the stages that may run on a host, in the order of the file."""
    return [name for name, stage in config.stages.items() if not stage.hosts or host in stage.hosts]


def next_stage(states: Sequence[tuple[str, str]], names: Sequence[str]) -> int:
    """Return the position of the first stage that waits, or the first one."""
    waiting = [name for name, state in states if state == WAITING and name in names]
    return names.index(waiting[0]) if waiting else 0


def stage_rows(config: Config, names: Sequence[str], states: dict[str, str]) -> list[Row]:
    """Make one row a stage: its state, its name and what it runs."""
    rows: list[Row] = []
    for name in names:
        state = states.get(name, WAITING)
        style, mark = STAGE_MARKS[state]
        rows.append(
            (
                (style, f" {mark} "),
                ("strong", fit(name, 14)),
                (style, fit(state, 9)),
                ("dim", command_words(config.stages[name])),
            )
        )
    return rows


def command_words(stage: Stage) -> str:
    """Write what a stage runs in one line."""
    if stage.kind == "extract":
        return clean(f"extract with {stage.engine}: {stage.corpus} to {stage.out}")
    if stage.kind == "serve":
        points = " ".join(map(str, sorted(stage.points)))
        return clean(f"serve {stage.model} on {stage.tp or 1} GPUs, capture points {points}")
    if stage.kind == "prepare":
        return clean(f"prepare {', '.join(stage.datasets)} to {stage.out}")
    return clean(" ".join(stage.command))


def gate_rows(gates: Sequence[Gate], width: int) -> list[Row]:
    """Make the gates: passed, failed or not readable, why, and what would help."""
    if not gates:
        return [(("ok", " ok       "), ("dim", "this stage needs nothing"))]
    rows: list[Row] = []
    name_width = min(18, max(len(clean(gate.name)) for gate in gates))
    indent = 12 + name_width
    for gate in sorted(gates, key=lambda item: item.ok is True):
        style, word = GATES[gate.ok]
        lines = wrap(gate.detail, width - indent)
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1]} …"]
        name = fit(clean(gate.name), name_width)
        rows.append(((style, f" {fit(word, 9)}"), ("strong", f"{name}  "), ("text", lines[0])))
        rows += [(("text", " " * indent + line),) for line in lines[1:]]
        if gate.ok is not True and gate.fix:
            rows += paragraph(f"do: {gate.fix}", width, "accent", indent)
    return rows


def passed(gates: Sequence[Gate]) -> bool:
    """Say whether every gate is open; one that could not be read is shut."""
    return all(gate.ok is True for gate in gates)
