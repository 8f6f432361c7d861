"""One GPU with everything that is known of it, as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.fleet import badge
from backend.wire import LEAN, SLOW
from tui import format
from tui.widgets.host_rows import VERDICT_LEVELS
from tui.widgets.rows import BLANK, clean, fit, pad, paragraph, row_width, spark

if TYPE_CHECKING:
    from backend.config import Thresholds
    from backend.fleet import HostState
    from backend.wire import Holder, Reading
    from tui.widgets.rows import Row

NAMES = {
    "memory_used_bytes": "memory used", "memory_total_bytes": "memory total", "utilisation_percent": "utilisation",
    "temperature_c": "temperature", "power_w": "power", "sm_clock_mhz": "SM clock", "clock_reasons": "clock reasons",
    "ecc_uncorrected": "ECC uncorrected", "memory_reserved_bytes": "reserved", "power_limit_w": "power limit",
    "ecc_corrected": "ECC corrected", "remapped_pending": "remap pending", "remapped_failed": "remap failed",
    "recovery_action": "recovery action", "persistence": "persistence", "mig": "MIG", "pcie_gen": "PCIe gen",
    "pcie_width": "PCIe width", "fan_percent": "fan", "thermal_margin_c": "thermal margin",
}  # fmt: skip
REASONS = {
    0x1: "idle", 0x2: "clocks set by an application", 0x4: "power cap", 0x8: "HW slowdown",
    0x10: "sync boost", 0x20: "SW thermal", 0x40: "HW thermal", 0x80: "HW power brake", 0x100: "display clocks",
}  # fmt: skip
CELL = 36


def spell(name: str, reading: Reading) -> str:
    """Write a reading with the unit that its name ends in."""
    number = reading.number()
    if number is None:
        return format.reading(reading)
    if name.endswith("_bytes"):
        return format.size(number)
    if name == "clock_reasons":
        return ", ".join(text for bit, text in REASONS.items() if int(number) & bit) or "none"
    if name in ("persistence", "mig"):
        return "on" if number else "off"
    if name in ("remapped_pending", "remapped_failed"):
        return "yes" if number else "no"
    for end, unit in (("_percent", " %"), ("_c", " °C"), ("_w", " W"), ("_mhz", " MHz")):
        if name.endswith(end):
            return f"{number:.0f}{unit}"
    return f"x{number:.0f}" if name == "pcie_width" else f"{number:.0f}"


def gpu_rows(host: HostState, index: int, width: int, limits: Thresholds) -> list[Row]:
    """Show one GPU: badge, readings, every failed reading with its reason, the last verdict and the holders."""
    found, facts, sample = badge(host, index, limits), host.facts(index), host.sample(index)
    head: list[tuple[str, str]] = [("strong", f"GPU {index}"), ("text", "  "), (found.level, found.word)]
    if facts:
        head.append(("dim", f"  {clean(facts.name)}  {clean(facts.bus_id)}  {clean(facts.uuid)}"))
    rows: list[Row] = [pad(head, width)]
    if found.detail:
        rows += paragraph(found.detail, width, found.level if found.level != "ok" else "text", 2)
    if sample.problem and sample.problem != found.detail:
        rows += paragraph(sample.problem, width, "bad", 2)
    rows += [*_failures(host, index, width), BLANK, *holder_rows(sample.holders, width)]
    rows += [BLANK, *_readings(host, index, width), *_history(host, index, width)]
    verdict = host.verdicts.get(index)
    if verdict:
        level = VERDICT_LEVELS.get(verdict.verdict, "unknown")
        rows += [
            BLANK,
            (("dim", "last verdict  "), (level, verdict.verdict), ("text", f"  {clean(verdict.reason)}")),
        ]
        if verdict.command:
            rows.append((("dim", "by hand       "), ("accent", clean(verdict.command))))
    return rows


def _readings(host: HostState, index: int, width: int) -> list[Row]:
    across = max(1, width // CELL)
    cells: list[Row] = []
    for name in (*LEAN, *SLOW):
        reading = host.reading(index, name)
        style = "text" if reading.ok else "dim" if reading.unsupported or format.reading(reading) == "?" else "bad"
        text = spell(name, reading)
        age = f" {format.age(reading.age_s)} old" if reading.ok and reading.age_s >= 15 else ""
        cells.append(pad([("dim", fit(NAMES.get(name, name), 17)), (style, text), ("faint", age)], CELL))
    height = -(-len(cells) // across)
    return [tuple(run for cell in cells[y::height] for run in cell) for y in range(height)]


def _failures(host: HostState, index: int, width: int) -> list[Row]:
    rows: list[Row] = []
    for name in (*LEAN, *SLOW):
        reading = host.reading(index, name)
        if reading.failed and format.reading(reading) == "fail":
            rows += paragraph(f"{NAMES.get(name, name)}: {reading.problem}", width, "bad", 2)
    return [BLANK, (("bad", "FAILED READINGS"),), *rows] if rows else []


def _history(host: HostState, index: int, width: int) -> list[Row]:
    lines = host.history.get(index, {})
    values = list(lines.get("utilisation_percent", ()))
    if not values:
        return []
    cells = max(10, min(120, width - 34))
    last = host.telemetry.seq if host.telemetry else 0
    rows: list[Row] = [BLANK]
    rows.append((("dim", fit("utilisation", 17)), ("spark", spark(values, cells, last, 240)), ("dim", "  4 min")))
    for name, ceiling in (("memory_used_bytes", _ceiling(host, index)), ("power_w", _limit(host, index))):
        share = [None if v is None or not ceiling else v * 100 / ceiling for v in list(lines.get(name, ()))]
        rows.append(
            (
                ("dim", fit(NAMES[name], 17)),
                ("spark", spark(share, cells, last, 240)),
                ("dim", "  of the limit"),
            )
        )
    return [row for row in rows if row_width(row) <= width]


def _ceiling(host: HostState, index: int) -> float | None:
    return host.reading(index, "memory_total_bytes").number()


def _limit(host: HostState, index: int) -> float | None:
    facts = host.facts(index)
    return facts.power_limit_w.number() if facts else None


def holder_rows(holders: list[Holder], width: int) -> list[Row]:
    """Make the table of who holds a GPU, the largest first."""
    if not holders:
        return [(("dim", "nothing holds this GPU"),)]
    rows: list[Row] = [
        pad([("faint", f"{'pid':>8}  {'user':<11}{'memory':>10}  {'age':<13}{'kind':<13}command")], width)
    ]
    for holder in sorted(holders, key=lambda item: -(item.used_bytes.number() or 0)):
        used = holder.used_bytes.number()
        amount = format.size(used) if used is not None else format.reading(holder.used_bytes)
        age = format.duration(holder.age_s) if holder.age_s is not None else "?"
        kind = holder.kind if holder.alive else "gone"
        line = f"{holder.pid:>8}  {fit(clean(holder.user), 11)}{amount:>10}  {age:<13}{kind:<13}"
        rows.append(pad([("text" if holder.alive else "bad", line), ("dim", clean(holder.command))], width))
    return rows
