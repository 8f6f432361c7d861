"""The lanes of the timeline as rows: pure functions of the recording, the view and the events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.wire import RUN_LIVE
from backend.wire.flight import FAILED
from tui import format
from tui.widgets.rows import SPARKS, clean, fit, pad, right

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from backend.config import Thresholds
    from backend.fleet.recording import Cell, Moment, Recording
    from backend.wire import Run
    from backend.wire.flight import FlightEvent
    from tui.widgets.rows import Row
    from tui.widgets.rows import Run as Piece
    from tui.widgets.timeline_view import View

LABEL = 9
ABSENT, BROKEN = ("faint", "·"), ("unknown", "×")
EVENT_MARKS = {"info": ("dim", "•"), "warn": ("warn", "▲"), "bad": ("bad", "▲")}
ORDER = ("info", "warn", "bad")
TICKS_S = (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800)
TICK_CELLS = 8


@dataclass(frozen=True)
class Metric:
    """One reading of a GPU as a lane: full at `ceiling`, a number or a column of the same GPU; `worst` draws a cell's
    highest value instead of its mean."""

    key: str
    word: str
    ceiling: float | str
    floor: float = 0.0
    worst: bool = False


METRICS = (
    Metric("utilisation_percent", "load", 100.0),
    Metric("memory_used_bytes", "memory", "memory_total_bytes"),
    Metric("temperature_c", "heat", 100.0, 20.0, True),
    Metric("power_w", "power", "power_limit_w"),
    Metric("sm_clock_mhz", "clock", 2100.0),
)


def value_width(width: int) -> int:
    """Return how many columns the numbers at the cursor take."""
    return 33 if width >= 100 else 24


def lane_cells(width: int) -> int:
    """Return how many cells a lane has in a width."""
    return max(10, width - LABEL - value_width(width) - 2)


def lane(label: str, marks: Sequence[Piece], value: str, view: View, width: int, style: str = "text") -> Row:
    """Put a lane together: a label, one mark a cell with the cursor's in reverse, and what is there."""
    pieces: list[Piece] = [("dim", fit(label, LABEL))]
    known, cursor = view.cell(view.last), view.column
    for at, (kind, mark) in enumerate(marks):
        mark = " " if at > known else mark  # not yet
        kind = "mark" if at == cursor else kind
        if pieces[-1][0] == kind and len(pieces) > 1:
            pieces[-1] = (kind, pieces[-1][1] + mark)
        else:
            pieces.append((kind, mark))
    return pad([*pieces, ("text", "  "), (style, fit(value, value_width(width)))], width)


def marks(
    cells: Sequence[Cell], floor: float, ceiling: float, worst: bool, level: Callable[[float], str]
) -> list[Piece]:
    """Draw one mark a cell: its height, a cross where readings failed, a dot where nothing was recorded."""
    drawn: list[Piece] = []
    span = (ceiling - floor) or 1.0
    for cell in cells:
        value = cell.high if worst else cell.mean
        if value is None:
            drawn.append(BROKEN if cell.failed else ABSENT)
            continue
        height = max(0, min(len(SPARKS) - 1, int((value - floor) / span * len(SPARKS))))
        drawn.append((level(cell.high if cell.high is not None else value), SPARKS[height]))
    return drawn


class Lanes:
    """Makes lanes from a recording. Cells are kept until the window or the recording changes."""

    def __init__(self, recording: Recording, limits: Thresholds) -> None:
        self.recording, self._limits = recording, limits
        self._cells: dict[str, list[Cell]] = {}
        self._drawn: dict[str, list[Piece]] = {}
        self._key: tuple[object, ...] = ()

    def cells(self, name: str, view: View) -> list[Cell]:
        """Return a column's cells in the window."""
        key = (view.start, view.cell_s, view.count, self.recording.revision)
        if key != self._key:
            self._key, self._cells, self._drawn = key, {}, {}
            step = self.recording.best_step(view.cell_s, view.start, view.end)
            self._layout = self.recording.layout(step, view.start, view.cell_s, view.count)
        if name not in self._cells:
            self._cells[name] = self.recording.cells(name, self._layout, view.count)
        return self._cells[name]

    def gpu(self, index: int, metric: Metric, view: View, moment: Moment | None, width: int, first: bool = True) -> Row:
        """Make the lane of one GPU."""
        group = f"gpu{index}."
        ceiling = metric.ceiling
        if isinstance(ceiling, str):
            known = [cell.high for cell in self.cells(group + ceiling, view) if cell.high]
            ceiling = max(known, default=1.0)
        cells = self.cells(group + metric.key, view)
        drawn = self._drawn.get(group + metric.key)
        if drawn is None:
            drawn = marks(cells, metric.floor, ceiling, metric.worst, lambda value: self._level(metric, value))
            self._drawn[group + metric.key] = drawn
        label = f"GPU {index}" if first else f"  {metric.word}"
        return lane(label, drawn, gpu_value(moment, group, width) if first else "", view, width)

    def _level(self, metric: Metric, value: float) -> str:
        if metric.key != "temperature_c":
            return "spark"
        limits = self._limits
        return "bad" if value >= limits.temperature_bad_c else "warn" if value >= limits.temperature_warn_c else "spark"

    def of_runs(self, key: str, view: View, lowest: bool = False) -> list[Cell]:
        """Put the cells of the runs that have a column together: the highest of them, or the lowest."""
        names = [name for name in self.recording.names() if name.startswith("run.") and name.endswith("." + key)]
        found = [self.cells(name, view) for name in names]
        if not found:
            return self.cells("run.none." + key, view)
        choose = min if lowest else max

        def best(cells: tuple[Cell, ...]) -> Cell:
            known = [cell for cell in cells if cell.mean is not None]
            return choose(known, key=lambda cell: cell.mean or 0.0) if known else cells[0]

        return [best(cells) for cells in zip(*found, strict=True)]

    def rate(self, view: View, moment: Moment | None, width: int) -> Row:
        """Make the lane of the tokens a second, or of the samples where none are counted."""
        cells, unit = self.of_runs("tokens_per_s", view), "tokens/s"
        if not any(cell.high for cell in cells):
            samples = self.of_runs("samples_per_s", view)
            cells, unit = (samples, "samples/s") if any(cell.high for cell in samples) else (cells, unit)
        most = max((cell.high or 0.0 for cell in cells), default=0.0)
        now = _highest(moment, ".tokens_per_s" if unit == "tokens/s" else ".samples_per_s")
        words = "" if now is None else f"{format.short(now)} {unit}"
        if most:
            words = f"{words or '-'}, most {format.short(most)}"
        return lane("rate", marks(cells, 0.0, most or 1.0, False, lambda _: "accent"), words, view, width)

    def room(self, view: View, moment: Moment | None, width: int) -> Row:
        """Make the lane of the free disk space: full height is the most that was free in the window."""
        cells = self.of_runs("disk_free_bytes", view, lowest=True)
        most = max((cell.high or 0.0 for cell in cells), default=0.0)
        now = _lowest(moment, ".disk_free_bytes")
        words = "" if now is None else f"{format.size(now)} free"
        low = self._limits.disk_warn_gib * (1 << 30)
        return lane(
            "disk", marks(cells, 0.0, most or 1.0, False, lambda v: "warn" if v < low else "ok"), words, view, width
        )

    def shm(self, view: View, moment: Moment | None, width: int) -> Row:
        """Make the lane of what is free in /dev/shm, where states wait for the disk."""
        cells = self.cells("host.shm_free_bytes", view)
        most = max((cell.high or 0.0 for cell in cells), default=0.0)
        now = moment.number("host.shm_free_bytes") if moment else None
        words = "" if now is None else f"{format.size(now)} free"
        return lane("/dev/shm", marks(cells, 0.0, most or 1.0, False, lambda _: "ok"), words, view, width)


def gpu_value(moment: Moment | None, group: str, width: int) -> str:
    """Write a GPU's numbers at the cursor."""
    if moment is None:
        return ""

    def said(key: str, spell: Callable[[float], str], wide: int) -> str:
        value = moment.value(group + key)
        number = moment.number(group + key)
        word = spell(number) if number is not None else "fail" if value == FAILED else "n/a" if value else "-"
        return right(word, wide)

    parts = [
        said("utilisation_percent", lambda v: f"{v:.0f} %", 5),
        said("memory_used_bytes", format.size, 10),
        said("temperature_c", lambda v: f"{v:.0f} °C", 7),
    ]
    return "".join([*parts, said("power_w", lambda v: f"{v:.0f} W", 7)] if width >= 100 else parts)


def event_lane(events: Iterable[FlightEvent], view: View, width: int) -> Row:
    """Mark where something happened; the worst in a cell wins."""
    drawn: list[Piece] = [("faint", " ")] * view.count
    worst = [-1] * view.count
    count = 0
    for event in events:
        at = view.cell(event.at)
        if 0 <= at < view.count:
            count += 1
            level = ORDER.index(event.level) if event.level in ORDER else 0
            if level > worst[at]:
                worst[at], drawn[at] = level, EVENT_MARKS[ORDER[level]]
    return lane("events", drawn, f"{count} in sight" if count else "none in sight", view, width, "dim")


def run_lanes(runs: Iterable[Run], view: View, width: int, most: int) -> list[Row]:
    """Draw the runs as bars with their stages' names; those at the same time stand below each other."""
    found = sorted(runs, key=lambda run: run.started_at)
    rows: list[list[Piece]] = [[("faint", " ")] * view.count for _ in range(most)]
    free = [-1] * most
    hidden = 0
    for run in found:
        end = view.last if run.state in RUN_LIVE else run.ended_at or run.started_at
        first, last = view.cell(run.started_at), view.cell(max(end, run.started_at))
        if last < 0 or first >= view.count:
            continue
        row = next((row for row in range(most) if free[row] < max(0, first)), None)
        if row is None:
            hidden += 1
            continue
        shown = range(max(0, first), min(view.count - 1, last) + 1)
        free[row] = shown[-1] + (1 if len(shown) > 1 else 0)
        _bar(rows[row], run, shown)
    said = [f"{hidden} more" if hidden and at == most - 1 else "" for at in range(most)]
    return [lane("runs" if not at else "", row, said[at], view, width, "dim") for at, row in enumerate(rows)]


def _bar(row: list[Piece], run: Run, shown: range) -> None:
    good = run.state in RUN_LIVE or (run.state == "exited" and run.exit_code == 0)
    style = "accent" if run.state in RUN_LIVE else "ok" if good else "bad"
    text = clean(run.stage) if len(shown) > len(run.stage) + 1 else ""
    for at, cell in enumerate(shown):
        row[cell] = (style, text[at] if at < len(text) else "━" if len(shown) > 1 else "◆")


def axis_row(view: View, width: int) -> Row:
    """Write the times below the lanes, at round ones of the local clock."""
    tick_s = next((tick for tick in TICKS_S if tick / view.cell_s >= TICK_CELLS), TICKS_S[-1])
    line = [" "] * view.count
    shift = time.localtime(view.start).tm_gmtoff
    at = ((view.start + shift) // tick_s + 1) * tick_s - shift
    while at < view.end:
        spell = "%H:%M:%S" if tick_s < 60 else "%H:%M" if tick_s < 86400 else "%d %b"
        midnight = time.localtime(at)[3:5] == (0, 0) and tick_s < 86400
        text = "╵" + time.strftime("%a %H:%M" if midnight else spell, time.localtime(at))
        cell = view.cell(at)
        if cell + len(text) <= view.count:
            line[cell : cell + len(text)] = text
        at += tick_s
    return pad([("faint", " " * LABEL), ("faint", "".join(line))], width)


def event_row(event: FlightEvent, now: float) -> Row:
    """Write one event for the list."""
    style = {"warn": "warn", "bad": "bad"}.get(event.level, "text")
    return (("faint", f"{stamp(event.at, now)}  "), (style, clean(event.text)))


def stamp(at: float, now: float) -> str:
    """Write a time to the second, with its day where it is not today."""
    same = time.localtime(at)[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if same else "%a %d %b %H:%M:%S", time.localtime(at))


def progress_text(moment: Moment | None, run_id: str) -> str:
    """Say how far a run was at the cursor."""
    if moment is None:
        return ""

    def number(key: str) -> float | None:
        return moment.number(f"run.{run_id}.{key}")

    done, total, rate, failed = (number(k) for k in ("samples_done", "samples_total", "tokens_per_s", "samples_failed"))
    words = []
    if done is not None:
        words.append(f"{format.count(done)}{f' of {format.count(total)}' if total else ''} samples")
    words += [f"{format.short(rate)} tokens/s"] if rate else []
    words += [f"{format.count(failed)} failed"] if failed else []
    log = number("log_bytes")
    words += [f"log {format.size(log)}"] if log is not None else []
    return ", ".join(words)


def _highest(moment: Moment | None, end: str) -> float | None:
    return max(_numbers(moment, end), default=None)


def _lowest(moment: Moment | None, end: str) -> float | None:
    return min(_numbers(moment, end), default=None)


def _numbers(moment: Moment | None, end: str) -> list[float]:
    names = [name for name in moment.block.names if name.startswith("run.") and name.endswith(end)] if moment else []
    return [number for name in names if moment and (number := moment.number(name)) is not None]
