"""Runs as rows: how far the one that progresses is, and the chain of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.wire import RUN_LIVE, Run
from tui import format
from tui.widgets.rows import bar, clean, fill, pad, row_width, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.config import Config, Thresholds
    from backend.fleet import HostState
    from backend.wire import Progress
    from tui.widgets.rows import Row
    from tui.widgets.rows import Run as Span

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
STAGE_MARKS = {WAITING: ("dim", "○"), RUNNING: ("accent", "●"), DONE: ("ok", "✓"), FAILED: ("bad", "✗")}
RUN_LEVELS = {
    "starting": "warn",
    "running": "ok",
    "stopping": "warn",
    "exited": "ok",
    "failed": "bad",
    "lost": "bad",
}


def chosen_run(hosts: Iterable[HostState], prefer: str = "") -> tuple[HostState, Run] | None:
    """Choose the run to show: one that progresses, then any live one, then the newest; the host in focus first."""
    found = [(host, run) for host in hosts for run in list(host.runs.values()) if run.stage != "reset"]
    if not found:
        return None

    def order(pair: tuple[HostState, Run]) -> tuple[bool, bool, bool, float]:
        host, run = pair
        live = run.state in RUN_LIVE
        return (live, live and run.progress is not None, host.name == prefer, run.started_at)

    return max(found, key=order)


def stalled_s(host: HostState, run: Run, limits: Thresholds) -> float | None:
    """Say for how long a live run has not advanced, where that is longer than the threshold; by the host's clock."""
    if run.state not in RUN_LIVE or run.progress is None or not run.progress.advanced_at:
        return None
    now = max(run.progress.at, host.telemetry.at if host.telemetry else 0.0)
    idle = now - run.progress.advanced_at
    return idle if idle >= limits.stall_s else None


def run_state(run: Run) -> Span:
    """Write a run's state in a word: one that ended says how."""
    if run.state == "exited":
        if run.exit_code == 0:
            return ("ok", "DONE")
        code = run.exit_code
        return (
            "bad",
            f"KILLED BY SIGNAL {-code}" if code is not None and code < 0 else f"FAILED, EXIT {code}",
        )
    if run.state == "running" and run.progress is not None and run.progress.state in ("paused", "starting"):
        return ("warn", run.progress.state.upper())
    if run.state == "running" and run.progress is not None and run.progress.state == "ready":
        return ("ok", "READY")
    return (RUN_LEVELS.get(run.state, "unknown"), run.state.upper())


def progress_rows(
    pick: tuple[HostState, Run] | None, width: int, limits: Thresholds, now: float, others: int = 0
) -> list[Row]:
    """Make the four rows of the progress band. `now` is wall time; `others` counts further live runs."""
    if pick is None:
        return [
            (("strong", "No run yet"),),
            (("dim", "L launches a stage; what runs is shown here."),),
            (),
            (),
        ]
    host, run = pick
    head = _head(host, run, limits, now, others)
    title: list[Span] = [("strong", clean(run.label or run.stage)), ("dim", f"  {clean(run.id)}")]
    title.append(("dim", f" on {clean(host.name)}"))
    rows: list[Row] = [spread(fill(title, width - row_width(tuple(head)) - 2), head, width)]
    progress = run.progress
    if progress is None:
        reason = clean(run.reason) or ("it writes no progress; O shows its log" if run.state in RUN_LIVE else "")
        return [*rows, pad([("dim", reason)], width), (), ()]
    return [
        *rows,
        _bar(progress, width),
        _speed(progress, run, width, now),
        _output(progress, run, width, limits),
    ]


def _head(host: HostState, run: Run, limits: Thresholds, now: float, others: int) -> list[Span]:
    spans: list[Span] = [("dim", f"+{others} more  ")] if others else []
    idle = stalled_s(host, run, limits)
    if idle is not None:
        spans += [("bad-fill", f" STALLED {format.duration(idle)} "), ("text", " ")]
    spans.append(run_state(run))
    if run.forced:
        spans.append(("warn", " forced"))
    if run.state in RUN_LIVE:
        spans.append(("dim", f"  for {format.duration(now - run.started_at)}"))
    elif run.ended_at:
        spans.append(("dim", f"  {format.duration(now - run.ended_at)} ago"))
    return spans


def _bar(progress: Progress, width: int) -> Row:
    if progress.steps_total:
        share, of = progress.steps_done / progress.steps_total, "of the steps"
    elif progress.tokens_total:
        share, of = progress.tokens_done / progress.tokens_total, "of the tokens"
    elif progress.samples_total:
        share, of = progress.samples_done / progress.samples_total, "of the samples"
    else:
        return pad([("dim", clean(progress.message) or "no total known yet")], width)
    text = f" {share * 100:5.1f}% {of}"
    style = "bad" if progress.state == "failed" else "ok" if progress.state == "done" else "accent"
    return (*bar(share, width - len(text), style), ("strong", text))


def _speed(progress: Progress, run: Run, width: int, now: float) -> Row:
    if progress.steps_done or progress.steps_total:
        return _steps(progress, run, width, now)
    known = progress.samples_total or progress.tokens_total
    if not known and not progress.samples_done:
        return pad([], width)  # a server, or a run whose samples are not counted yet
    of = f" / {format.count(progress.samples_total)}" if progress.samples_total else ""
    left: list[Span] = [("text", f"{format.count(progress.samples_done)}{of} samples")]
    if progress.samples_failed:
        left.append(("bad", f"  {format.count(progress.samples_failed)} failed"))
    if run.state not in RUN_LIVE:
        return spread(left, [], width)
    if width >= 100 and progress.samples_in_flight:
        left.append(("dim", f"  {progress.samples_in_flight} in flight"))
    left.append(
        (
            "dim",
            f"   {format.few(progress.samples_per_s)} samples/s  {format.short(progress.tokens_per_s)} tok/s",
        )
    )
    if not known:
        return spread(left, [("dim", "no total, no ETA")], width)
    return spread(left, _end(progress, progress.tokens_done > 0, now), width)


def _end(progress: Progress, started: bool, now: float) -> list[Span]:
    eta = progress.eta_s()
    if eta is None:
        return [("unknown" if started else "dim", "no ETA: nothing moves" if started else "no ETA yet")]
    return [("dim", "ends "), ("strong", format.moment(now + eta, now)), ("dim", f"  in {format.duration(eta)}")]


def _steps(progress: Progress, run: Run, width: int, now: float) -> Row:
    """Say how far a training is and how well it does."""
    of = f" / {format.count(progress.steps_total)}" if progress.steps_total else ""
    left: list[Span] = [("text", f"step {format.count(progress.steps_done)}{of}")]
    if progress.loss is not None:
        left.append(("strong", f"   loss {progress.loss:.4g}"))
    if progress.accuracy is not None:
        left.append(("text", f"  acc {progress.accuracy * 100:.1f} %"))
    if width >= 100 and progress.learning_rate is not None:
        left.append(("dim", f"  lr {progress.learning_rate:.3g}"))
    if run.state not in RUN_LIVE:
        return spread(left, [], width)
    if progress.tokens_per_s:
        left.append(("dim", f"  {format.short(progress.tokens_per_s)} tok/s"))
    if not progress.steps_total:
        return spread(left, [("dim", "no total, no ETA")], width)
    return spread(left, _end(progress, progress.steps_done > 0, now), width)


def _output(progress: Progress, run: Run, width: int, limits: Thresholds) -> Row:
    if progress.staging_bound_bytes and not progress.bytes_written:
        staging = f"staging {format.size(progress.staging_bytes)} of {format.size(progress.staging_bound_bytes)}"
        most = f", at most {format.size(progress.staging_high_bytes)}, waited {format.few(progress.capture_wait_s)} s"
        return pad([("dim", staging + most)], width)
    if progress.steps_done or progress.steps_total:
        return _checkpoint(progress, run, width, limits)
    left: list[Span] = [("text", f"{format.size(progress.bytes_written)} written")]
    if run.state in RUN_LIVE and progress.bytes_per_s:
        left.append(("dim", f"  {format.rate(progress.bytes_per_s)}"))
    disk = _disk(progress, run, limits)
    shard = clean(progress.shard)
    if shard and width - row_width(tuple(left)) - row_width(tuple(disk)) > 24:
        left.append(("dim", f"   {shard}"))
    return spread(left, disk, width)


def _checkpoint(progress: Progress, run: Run, width: int, limits: Thresholds) -> Row:
    """Say what is wrong with a training's numbers, else which checkpoint is the newest."""
    if progress.message:
        return pad([("warn", clean(progress.message))], width)
    newest = clean(progress.shard)
    said = ("text", f"newest checkpoint {newest}") if newest else ("dim", "no checkpoint yet")
    return spread([said], _disk(progress, run, limits), width)


def _disk(progress: Progress, run: Run, limits: Thresholds) -> list[Span]:
    free = progress.disk_free_bytes
    if free is None:
        return [("unknown", "disk not read")] if run.state in RUN_LIVE else []
    lasts, full = progress.disk_lasts(), progress.full_in_s()
    low = free < limits.disk_warn_gib * (1 << 30)
    style = "bad" if lasts is False else "warn" if low else "dim"
    spans: list[Span] = [(style, f"{format.size(free)} disk left")]
    if run.state not in RUN_LIVE:
        return spans
    if lasts is False:
        spans.append(("bad", ", too little for the rest"))
    elif lasts:
        spans.append(("ok", ", lasts"))
    if full is not None and (lasts is not True or low):
        spans.append((style, f", full in {format.duration(full)}"))
    return spans


def stage_states(config: Config, hosts: Iterable[HostState]) -> list[tuple[str, str]]:
    """List the configured stages in order, each with what its newest run says."""
    newest: dict[str, Run] = {}
    for host in hosts:
        for run in list(host.runs.values()):
            if run.stage not in newest or run.started_at >= newest[run.stage].started_at:
                newest[run.stage] = run
    return [(name, stage_state(newest.get(name))) for name in config.stages]


def stage_state(run: Run | None) -> str:
    """Say where a stage is, by its newest run."""
    if run is None:
        return WAITING
    if run.state in RUN_LIVE:
        return RUNNING
    return DONE if run.state == "exited" and run.exit_code == 0 else FAILED


def rail_row(stages: list[tuple[str, str]], width: int) -> Row:
    """Make the stage rail. Where not all fits, the words of the waiting ones go first, then the start of the rail."""
    if not stages:
        return pad([("dim", "no stages in the configuration")], width)
    for words in ((WAITING, RUNNING, DONE, FAILED), (RUNNING, DONE, FAILED), (RUNNING, FAILED)):
        row = _rail(stages, words)
        if row_width(row) <= width:
            return pad(row, width)
    start = next((at for at, (_, state) in enumerate(stages) if state == RUNNING), 0)
    while start < len(stages) - 1 and row_width(_rail(stages[:start], ())) > width // 2:
        stages, start = stages[1:], start - 1
    return pad(_rail(stages, (RUNNING, FAILED)), width)


def _rail(stages: list[tuple[str, str]], words: tuple[str, ...]) -> Row:
    spans: list[Span] = []
    for at, (name, state) in enumerate(stages):
        style, mark = STAGE_MARKS[state]
        if at:
            spans.append(("faint", " ── "))
        spans += [(style, mark), ("text" if state == WAITING else "strong", f" {name}")]
        if state in words:
            spans.append((style, f" {state}"))
    return tuple(spans)
