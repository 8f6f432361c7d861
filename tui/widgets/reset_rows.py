"""A reset as rows: what it does right now, and the verdict."""

from __future__ import annotations

import errno
import itertools
from typing import TYPE_CHECKING

from backend.wire import CLEAN, VERDICTS
from tui import format
from tui.widgets.host_rows import VERDICT_LEVELS, above_baseline
from tui.widgets.memory_rows import memory_rows
from tui.widgets.plan_rows import gpu_list, process_rows, section
from tui.widgets.rows import BLANK, clean, pad, paragraph, right, row_width, spread, wrap

if TYPE_CHECKING:
    from backend.fleet import ResetState
    from backend.wire import GpuVerdict, Receipt, ResetEvent
    from tui.widgets.rows import Row

BIG = {
    "0": ("╭─╮", "│ │", "╰─╯"), "1": (" ╷ ", " │ ", " ╵ "), "2": ("╶─╮", "╭─╯", "╰─╴"), "3": ("╶─╮", " ─┤", "╶─╯"),
    "4": ("╷ ╷", "╰─┤", "  ╵"), "5": ("╭─╴", "╰─╮", "╶─╯"), "6": ("╭─╴", "├─╮", "╰─╯"), "7": ("╶─╮", "  │", "  ╵"),
    "8": ("╭─╮", "├─┤", "╰─╯"), "9": ("╭─╮", "╰─┤", "╶─╯"), "?": ("╶─╮", " ╶╯", " ╵ "),
}  # fmt: skip
"""Digits of three rows, for the eight numbers that the whole tool is about."""


EVENT_STYLES = {"note": "warn", "signal": "text", "verdict": "strong"}
NBSP = "\u00a0"


def running_rows(state: ResetState, elapsed_s: float, width: int) -> list[Row]:
    """Show the steps so far with their durations and what happened in each, and below them each GPU's memory."""
    events = list(state.events)
    phases = [at for at, event in enumerate(events) if event.kind == "phase"]
    if not phases:
        return [(("dim", "the reset has begun; its first step is not reported yet"),)]
    rows: list[Row] = []
    for start, end in itertools.pairwise([*phases, len(events)]):
        judged = events[-1].kind == "verdict"
        open_ = end == len(events) and state.running and not judged
        end_s = elapsed_s if open_ else events[min(end, len(events) - 1)].at_s
        mark = ("accent", "● ") if open_ else ("ok", "✓ ")
        tail = [("accent" if open_ else "dim", format.duration(end_s - events[start].at_s))]
        rows.append(spread([mark, ("strong", clean(events[start].text))], tail, width))
        rows += _phase_rows(events[start + 1 : end], width)
    return rows + memory_rows(events, width)


def _phase_rows(events: list[ResetEvent], width: int) -> list[Row]:
    """Say what happened in a phase. Signals and ends are told by kind, not one a line: there may be dozens."""
    rows: list[Row] = []
    groups: dict[str, list[ResetEvent]] = {}
    for event in events:
        if event.kind == "memory":
            continue  # drawn for all steps together
        if event.kind in ("signal", "gone") and "pid" in event.data and not _odd(event):
            groups.setdefault(str(event.data.get("signal", "gone")), []).append(event)
        else:
            rows += _event_rows(event.at_s, EVENT_STYLES.get(event.kind, "dim"), event.text, width)
    told: list[Row] = []
    for name, members in sorted(groups.items(), key=lambda group: group[1][-1].at_s):
        if name == "SIGCONT":  # it only wakes what was stopped, so that SIGTERM is heard
            continue
        pids = " ".join(str(event.data["pid"]) for event in members)
        told += _event_rows(
            members[-1].at_s, "text" if name != "gone" else "dim", f"{name} {len(members)}: {pids}", width
        )
    return told + rows


def _odd(event: ResetEvent) -> bool:
    """Say whether a signal failed for another reason than that the process had just ended."""
    return event.kind == "signal" and event.data.get("errno") not in (None, 0, errno.ESRCH)


def _event_rows(at_s: float, style: str, text: str, width: int) -> list[Row]:
    first, *rest = wrap(text, width - 11)
    rows: list[Row] = [(("faint", f"{right(format.duration(at_s), 9)}  "), (style, first))]
    return rows + [((style, " " * 11 + line),) for line in rest]


def verdict_rows(receipt: Receipt, width: int) -> list[Row]:
    """Show the verdict large, then every GPU that is not clean with its reason and the command that shows it."""
    level = VERDICT_LEVELS.get(receipt.verdict, "unknown")
    total = receipt.durations.get("total")
    facts = [f"in {format.duration(total)}"] if total is not None else []
    if receipt.kind == "reset":
        facts.insert(0, f"killed {len(receipt.killed)}")
    if receipt.gpu_reset:
        gpus = gpu_list([int(one["index"]) for one in receipt.gpu_reset["gpus"]])
        facts.insert(0, f"reset of GPU {gpus} by the driver: {receipt.gpu_reset['outcome'] or 'not begun'}")
    if receipt.virtual:
        facts.append("VIRTUAL GPUs")
    rows: list[Row] = [
        spread([(f"{level}-fill", f"  {receipt.verdict}  ")], [("dim", ", ".join(facts))], width),
        BLANK,
    ]
    rows += [*paragraph(f"next: {next_step(receipt)}", width, "text"), BLANK]
    rows += big_numbers(receipt.after, width)
    bad = [gpu for gpu in receipt.after if gpu.verdict != CLEAN]
    for gpu in bad:
        rows += _gpu_verdict(gpu, width)
    if receipt.survivors:
        rows += [BLANK, (("bad", f"STILL THERE {len(receipt.survivors)}"),)]
        rows += process_rows(receipt.survivors, width)
    rows += section("COULD NOT BE READ", "unknown", receipt.unseen, width)
    rows += section("NOTES", "dim", receipt.notes, width)
    steps = [
        f"{name} {format.duration(value)}".replace(" ", NBSP)
        for name, value in receipt.durations.items()
        if name != "total"
    ]
    rows += [BLANK, *paragraph(" · ".join(steps), width, "dim")] if steps else [BLANK]
    if receipt.path:
        rows += paragraph(f"receipt {receipt.path}", width, "dim")
    return rows


def next_step(receipt: Receipt) -> str:
    """Say what the operator does next: what the worst finding asks for, or the next stage."""
    if receipt.verdict == CLEAN:
        return "launch the next stage (L)"
    order = [receipt.verdict, *(word for word in VERDICTS if word != receipt.verdict)]
    asked = [gpu for gpu in receipt.after if gpu.verdict != CLEAN and gpu.action]
    asked.sort(key=lambda gpu: order.index(gpu.verdict) if gpu.verdict in order else len(order))
    if asked:
        return f"GPU {asked[0].index}: {asked[0].action}"
    actions = [one["action"] for one in receipt.host_findings if one.get("action")]
    return actions[0] if actions else "verify the host again (V)"


def _gpu_verdict(gpu: GpuVerdict, width: int) -> list[Row]:
    level = VERDICT_LEVELS.get(gpu.verdict, "unknown")
    rows: list[Row] = [BLANK, (("strong", f"GPU {gpu.index}  "), (level, gpu.verdict))]
    rows += paragraph(gpu.reason, width, "text", 2)
    if gpu.action:
        rows += paragraph(f"do: {gpu.action}", width, "text", 2)
    if gpu.command:
        rows += paragraph(f"see it by hand: {gpu.command}", width, "accent", 2)
    return rows


def big_numbers(gpus: list[GpuVerdict], width: int) -> list[Row]:
    """Draw each GPU's MiB above its baseline, large where they fit, with the GPU's number below."""
    words = [above_baseline(gpu) for gpu in gpus]
    if not words:
        return []
    styles = [VERDICT_LEVELS.get(gpu.verdict, "unknown") for gpu in gpus]
    wide = [max(4, len(word) * 3) for word in words]
    gap = "  "
    large = sum(wide) + len(gap) * len(words) <= width
    if not large:
        wide = [max(4, len(word)) for word in words]
    heights = range(3) if large else range(1)
    rows: list[Row] = [
        tuple(
            (style, ("".join(BIG[digit][y] for digit in word) if large else word).center(cells) + gap)
            for word, cells, style in zip(words, wide, styles, strict=True)
        )
        for y in heights
    ]
    rows.append(tuple(("dim", str(gpu.index).center(cells) + gap) for gpu, cells in zip(gpus, wide, strict=True)))
    known = all(gpu.baseline_bytes is not None for gpu in gpus)
    rows.append(
        (
            (
                "dim",
                "MiB above the recorded baseline, by GPU" if known else "MiB used, by GPU; no baseline is recorded",
            ),
        )
    )
    return [row if row_width(row) <= width else pad(row, width) for row in rows]
