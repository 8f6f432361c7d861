"""A host and its GPUs as rows: a pure function of what is known, the width and the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from backend.fleet import LinkState, badge
from backend.fleet.state import STALE_S
from backend.wire import MIB
from tui import format
from tui.widgets.rows import bar, clean, fill, fit, pad, right, row_width, spark, spread

if TYPE_CHECKING:
    from backend.config import Thresholds
    from backend.fleet import Badge, HostState
    from backend.wire import GpuSample, GpuVerdict, Holder, Reading
    from tui.widgets.rows import Row, Run

LINES, DENSE, ROOMY = "lines", "dense", "roomy"
TILE_ROWS = {LINES: 1, DENSE: 4, ROOMY: 5}
DENSE_WIDTH, ROOMY_WIDTH = 24, 44
WIDE = 150
"""Columns from which panes stand side by side; below, a row a GPU reads better."""
LINK_LEVELS = {
    LinkState.LIVE: "ok",
    LinkState.STALE: "unknown",
    LinkState.LOST: "bad",
    LinkState.REFUSED: "bad",
}
VERDICT_LEVELS = {
    "CLEAN": "ok",
    "CLEAN (limited)": "ok",
    "NOT CLEAN": "bad",
    "UNHEALTHY": "bad",
    "UNKNOWN": "unknown",
}


@dataclass(frozen=True)
class Form:
    """How a host's GPUs are laid out: `across` panes of `pane` cells a row, each `TILE_ROWS[kind]` rows high."""

    kind: str
    width: int
    across: int
    pane: int
    gap: int = 1

    def height(self, gpus: int) -> int:
        """Count the rows of a host with that many GPUs, its own line included."""
        return 1 + max(1, -(-gpus // self.across)) * TILE_ROWS[self.kind]

    def gpu_at(self, x: int, y: int) -> int | None:
        """Return the position (not the index) of the GPU at a place, or None on the host's own line."""
        if y < 1:
            return None
        return (y - 1) // TILE_ROWS[self.kind] * self.across + min(
            self.across - 1, max(0, x - 1) // (self.pane + self.gap)
        )


def make_form(kind: str, width: int) -> Form:
    """Lay out one kind of pane in a width."""
    if kind == LINES:
        return Form(LINES, width, 1, width - 1)
    least = DENSE_WIDTH if kind == DENSE else ROOMY_WIDTH
    across = max(1, width // least)
    across = next((n for n in (8, 4, 2, 1) if n <= across), 1)
    gap = 2 if kind == DENSE else 4
    return Form(kind, width, across, (width - 1 + gap) // across - gap, gap)


def choose_form(width: int, height: int, gpus: list[int]) -> Form:
    """Choose the roomiest layout in which every host is in sight; where none fits, the one that needs least rows."""
    kinds = [ROOMY, LINES, DENSE] if width >= WIDE else [LINES]
    forms = [make_form(kind, width) for kind in kinds]
    needs = [sum(form.height(count) for count in gpus) for form in forms]
    fitting = next((form for form, need in zip(forms, needs, strict=True) if need <= height), None)
    return fitting or min(zip(needs, forms, strict=True), key=lambda pair: pair[0])[1]


def panel_rows(host: HostState, form: Form, limits: Thresholds, now: float, cursor: int | None = None) -> list[Row]:
    """Make every row of a host. `now` is the monotonic clock; `cursor` the GPU position in focus, or None."""
    rows = [host_line(host, form.width, now, cursor is not None)]
    indices = host.gpu_indices
    if not indices:
        return [*rows, pad([("text", "  "), ("dim", _no_gpus(host))], form.width)]
    for start in range(0, len(indices), form.across):
        group = indices[start : start + form.across]
        panes = [gpu_pane(host, index, form, limits, start + offset == cursor) for offset, index in enumerate(group)]
        rows += [_join([pane[y] for pane in panes], form) for y in range(TILE_ROWS[form.kind])]
    return rows


def _join(parts: list[Row], form: Form) -> Row:
    runs: list[Run] = [("text", " ")]
    for number, part in enumerate(parts):
        runs += [("text", " " * form.gap), *part] if number else part
    return pad(runs, form.width)


def _no_gpus(host: HostState) -> str:
    if host.inventory and host.inventory.problem:
        return clean(host.inventory.problem)
    if host.inventory:
        return "the driver reports no GPU"
    live = host.link.state is LinkState.LIVE
    return "no answer from the driver yet" if live else "its GPUs were not seen yet"


def gpu_pane(host: HostState, index: int, form: Form, limits: Thresholds, focus: bool) -> list[Row]:
    """Make the rows of one GPU, each exactly `form.pane` wide."""
    pane = Pane(host, index, limits, focus)
    if form.kind == LINES:
        return [pane.line(form.pane)]
    return pane.roomy(form.pane) if form.kind == ROOMY else pane.dense(form.pane)


class Pane:
    """One GPU's parts, read once for the row or rows that show it."""

    def __init__(self, host: HostState, index: int, limits: Thresholds, focus: bool) -> None:
        self.host, self.index, self.limits, self.focus = host, index, limits, focus
        self.sample: GpuSample = host.sample(index)
        self.badge: Badge = badge(host, index, limits)
        self.fresh = host.link.state is LinkState.LIVE
        facts = host.facts(index)
        self.used = host.reading(index, "memory_used_bytes")
        total = host.reading(index, "memory_total_bytes")
        self.total = total if total.ok or facts is None else facts.memory_total_bytes
        self.limit = facts.power_limit_w if facts else host.reading(index, "power_limit_w")

    @property
    def level(self) -> str:
        """Return the badge's style; a host that is not there says so itself, so its GPUs stay quiet."""
        gone = self.host.link.state in (LinkState.LOST, LinkState.REFUSED)
        return "dim" if gone else self.badge.level

    def head(self, width: int) -> list[Run]:
        """Make the index and the badge."""
        mark = "mark" if self.focus else "dim"
        return [
            (mark, f"{self.index:>2}"),
            ("text", " "),
            (self.level, fit(self.badge.word, width - 3)),
        ]

    def broken(self, width: int) -> Row | None:
        """Make the row that stands in for readings of a GPU that answers nothing, or None where it answers."""
        if not self.sample.problem or self.sample.readings:
            return None
        text = self.badge.detail or self.sample.problem
        return pad([(self.badge.level if self.fresh else "dim", clean(text))], width)

    def value(self, name: str, spell: str) -> str:
        """Write one reading with its unit."""
        return format.reading(self.host.reading(self.index, name), spell)

    def tone(self, reading: Reading, style: str = "text") -> str:
        """Return the style of a reading: old values fade, failed ones stand out."""
        if reading.failed:
            return "dim" if format.reading(reading) == "?" else "bad"
        return style if self.fresh and reading.ok and reading.age_s < STALE_S else "dim"

    def memory_bar(self, width: int) -> Row:
        """Draw how full the memory is."""
        used, total = self.used.number(), self.total.number()
        share = used / total if used is not None and total else None
        full = share is not None and share * 100 >= self.limits.memory_warn_percent
        return bar(share, width, "warn" if full else "bar" if self.fresh else "faint")

    def memory(self, width: int) -> Run:
        """Write used and total memory."""
        return (self.tone(self.used), right(format.memory(self.used, self.total, " " if width > 13 else ""), width))

    def utilisation(self, width: int) -> Run:
        """Write the share of the last second in which a kernel ran."""
        reading = self.host.reading(self.index, "utilisation_percent")
        return (self.tone(reading), right(format.reading(reading, "{:.0f}%"), width))

    def heat(self, width: int) -> Run:
        """Write the temperature, marked by the configured thresholds."""
        reading = self.host.reading(self.index, "temperature_c")
        degrees = reading.number()
        style = "text"
        if degrees is not None and degrees >= self.limits.temperature_warn_c:
            style = "bad" if degrees >= self.limits.temperature_bad_c else "warn"
        return (self.tone(reading, style), right(format.reading(reading, "{:.0f}°C"), width))

    def power(self, width: int) -> Run:
        """Write the power and its limit."""
        reading = self.host.reading(self.index, "power_w")
        limit = self.limit.number()
        text = format.reading(reading) + (f"/{limit:.0f}W" if limit is not None else "W" if reading.ok else "")
        return (self.tone(reading, "dim"), right(text, width))

    def clock(self, width: int) -> Run:
        """Write the SM clock."""
        reading = self.host.reading(self.index, "sm_clock_mhz")
        return (self.tone(reading, "dim"), right(format.reading(reading, "{:.0f}MHz"), width))

    def spark(self, cells: int) -> Run:
        """Draw the last minute's utilisation."""
        line = self.host.history.get(self.index, {}).get("utilisation_percent", ())
        values = list(islice(line, max(0, len(line) - 120), None))
        last = self.host.telemetry.seq if self.host.telemetry else 0
        return ("spark" if self.fresh else "faint", spark(values, cells, last))

    def holders(self, width: int) -> Run:
        """Name who holds the GPU, the largest first, and how many more there are."""
        found = self.sample.holders
        if not found:
            return ("faint", fit("free" if self.fresh and not self.sample.problem else "", width))
        first = max(found, key=lambda holder: holder.used_bytes.number() or 0)
        more = f" +{len(found) - 1}" if len(found) > 1 else ""
        return ("dim", fit(holder_words(first, width - len(more)).rstrip() + more, width))

    def line(self, width: int) -> Row:
        """Make the whole GPU in one row."""
        gap, head = (" ", 11) if width < 110 else ("  ", 12)
        widths = {"memory": 13 if width < 110 else 15, "utilisation": 4, "heat": 5, "power": 8, "clock": 7}
        broken = self.broken(width - head - len(gap))
        if broken:
            return (*self.head(head), ("text", gap), *broken)
        left = width - head - sum(widths.values()) - len(gap) * 8
        bar_width = max(4, min(40, left // 3))
        spark_width = max(4, min(30, left // 4))
        parts: list[Row] = [tuple(self.head(head)), self.memory_bar(bar_width), (self.memory(widths["memory"]),)]
        parts += [
            (self.utilisation(4),),
            (self.spark(spark_width),),
            (self.heat(5),),
            (self.power(8),),
            (self.clock(7),),
        ]
        parts.append((self.holders(left - bar_width - spark_width),))
        runs: list[Run] = []
        for part in parts:
            runs += [*part, ("text", gap)]
        return pad(runs, width)

    def dense(self, width: int) -> list[Row]:
        """Make four narrow rows."""
        top = spread(self.head(11), [self.utilisation(5)], width)
        broken = self.broken(width)
        if broken:
            return [top, broken, pad([], width), pad([], width)]
        memory = self.memory(15)
        text = memory[1].strip()
        bar_width = max(3, width - len(text) - 1)
        return [
            top,
            (self.spark(width),),
            pad([*self.memory_bar(bar_width), ("text", " "), (memory[0], text)], width),
            spread([self.heat(4), ("text", " "), self.power(8)], [self.clock(8)], width),
        ]

    def roomy(self, width: int) -> list[Row]:
        """Make five wide rows, the last one empty."""
        top = spread(self.head(width - 24), [self.heat(6), ("text", "  "), self.utilisation(5)], width)
        broken = self.broken(width)
        blank = pad([], width)
        if broken:
            return [top, broken, blank, blank, blank]
        memory = self.memory(15)
        return [
            top,
            pad([*self.memory_bar(width - 16), ("text", " "), memory], width),
            (self.spark(width),),
            spread([self.holders(width - 20)], [self.power(9), ("text", " "), self.clock(8)], width),
            blank,
        ]


def holder_words(holder: Holder, width: int) -> str:
    """Write a holder in a width: where it is narrow, the pid and what runs; else the user and the arguments too."""
    pid = f"{holder.pid}" if holder.alive else f"{holder.pid} gone"
    words = clean(holder.command).split(" ")
    if width < 24:
        return fit(f"{pid} {program(words)}", width)
    command = " ".join([words[0].rsplit("/", 1)[-1], *words[1:]])
    return fit(" ".join(part for part in (pid, clean(holder.user), command) if part), width)


def program(words: list[str]) -> str:
    """Name what a command runs: of an interpreter its module or script, which says more than `python3`."""
    name = words[0].rsplit("/", 1)[-1]
    if not name.startswith("python"):
        return name
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if word and not word.startswith("-")), name)
    return script.rsplit("/", 1)[-1]


def host_line(host: HostState, width: int, now: float, focus: bool = False) -> Row:
    """Make the host's own row: name, link, what it runs on, and the last verdict at the right."""
    state = host.link.state
    left: list[Run] = [
        ("accent" if focus else "faint", "▌"),
        ("mark" if focus else "title", clean(host.name)),
    ]
    left += [("text", "  "), (LINK_LEVELS.get(state, "unknown"), state.upper())]
    if host.virtual:
        left += [("text", " "), ("warn", "VIRTUAL")]
    left += [("dim", "  " + text) for text in _host_words(host, now)]
    tail = fill(last_verdict(host), width // 2)
    return spread(fill(left, width - row_width(tuple(tail)) - 2), tail, width)


def _host_words(host: HostState, now: float) -> list[str]:
    if host.link.state is not LinkState.LIVE:
        words = [clean(host.link.reason)] if host.link.reason else []
        if host.link.retry_in_s is not None:
            words.append(f"again in {host.link.retry_in_s:.0f} s")
        age = host.age_s(now) if host.telemetry else None
        return [*words, *([f"values are {format.age(age)} old"] if age is not None else [])]
    words = []
    if host.inventory and host.inventory.driver:
        words.append(f"driver {clean(host.inventory.driver)}")
    if host.inventory and host.inventory.cuda:
        words.append(f"CUDA {clean(host.inventory.cuda)}")
    if host.telemetry and host.telemetry.host.load1 is not None:
        words.append(f"load {host.telemetry.host.load1:.1f}")
    return words


def last_verdict(host: HostState) -> list[Run]:
    """Write the reset that runs, or the last verdict with its zeros and its age."""
    if host.reset.running:
        phases = [event.text for event in host.reset.events if event.kind == "phase"]
        return [("warn", "RESETTING"), ("dim", f" {clean(phases[-1])}" if phases else "")]
    receipt = host.reset.receipt
    if receipt is None or not receipt.verdict:
        return [("faint", "not verified yet")]
    ended = receipt.started_at + receipt.durations.get("total", 0.0)
    # Minutes, not seconds: this line must not repaint four times a second.
    ago = max(0, int((time.time() - ended) / 60))
    zeros = " " + " ".join(above_baseline(gpu) for gpu in receipt.after) if len(receipt.after) <= 8 else ""
    said = f"{ago} min ago" if 1 <= ago < 120 else "just now" if ago < 1 else f"{format.duration(ago * 60)} ago"
    level = VERDICT_LEVELS.get(receipt.verdict, "unknown")
    return [(level, receipt.verdict), (level, zeros), ("dim", f"  {said}")]


def above_baseline(gpu: GpuVerdict) -> str:
    """Write how many MiB a GPU held above its baseline; `?` where that was not read."""
    used = gpu.used_bytes.number()
    if used is None:
        return "?"
    return str(max(0, round((used - (gpu.baseline_bytes or 0)) / MIB)))
