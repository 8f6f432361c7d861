"""`replay`: a recorded flight on the timeline, or into a file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from backend.fleet.flightfiles import (
    FORMATS,
    NoPyarrow,
    column_names,
    rows_between,
    write_csv,
    write_jsonl,
    write_parquet,
)
from backend.fleet.flights import EVER
from backend.wire import RUN_LIVE
from tui.commands.session import FAILED, USAGE, Session, Stop, pass_session

if TYPE_CHECKING:
    from backend.fleet import Fleet, HostState
    from backend.wire.flight import Block, FlightEvent

MARGIN_S = 15.0
"""Kept before and after a run: how the GPUs were, and how their memory came back."""

EVERYTHING = "all"


@click.command()
@click.argument("host_name", metavar="HOST")
@click.argument("run_id", metavar="RUN", default=EVERYTHING)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write .jsonl, .csv or .parquet.")
@click.option("--every", type=click.Choice(["1", "10", "60"]), default="1", show_default=True, help="Seconds a row.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@pass_session
def replay(session: Session, host_name: str, run_id: str, out: Path | None, every: str, overwrite: bool) -> None:
    """Open the timeline on a RUN of a HOST, or on all that it recorded; where there is no terminal, print JSON lines.

    With --out the flight is written to a file instead: its ending says how.
    """
    if out is not None and out.suffix not in FORMATS:
        raise Stop(f"{out}: the ending says the format; take one of {', '.join(FORMATS)}", USAGE)
    if out is not None and out.exists() and not overwrite:
        raise Stop(f"{out} is there; name another file, or give --overwrite", USAGE)
    if out is None and sys.stdout.isatty() and sys.stdin.isatty():
        _show(session, host_name, run_id)
        return
    with session.connected(host_name) as (fleet, host):
        start, end = span_of(fleet, host, run_id)
        blocks = fleet.flights.blocks(host.name, int(every), start, end).result()
        events = fleet.flights.events(host.name, start, end).result()
    if not blocks:
        raise Stop(f"{host_name} has recorded nothing of `{run_id}`, or has dropped it since", FAILED)
    write(out, blocks, events, start, end)


def span_of(fleet: Fleet, host: HostState, run_id: str) -> tuple[float, float]:
    """Return when a run was, with a margin, or everything."""
    if run_id == EVERYTHING:
        return 0.0, EVER
    fleet.wait(lambda: host.caught_up or None, 20).result()
    run = host.runs.get(run_id)
    if run is None:
        known = ", ".join(sorted(host.runs)[-8:]) or "none"
        raise Stop(f"{host.name} has no run `{run_id}`; runs: {known}", FAILED)
    end = time.time() if run.state in RUN_LIVE else run.ended_at
    return run.started_at - MARGIN_S, end + MARGIN_S


def write(out: Path | None, blocks: list[Block], events: list[FlightEvent], start: float, end: float) -> None:
    """Write a flight to a file, whole or not at all, or to stdout."""
    rows = rows_between(blocks, start, end)
    if out is None:
        write_jsonl(sys.stdout, rows, events)
        return
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        kind = FORMATS[out.suffix]
        if kind == "parquet":
            count = write_parquet(draft, rows, column_names(blocks))
        else:
            with draft.open("w", encoding="utf-8", newline="" if kind == "csv" else None) as file:
                is_csv = kind == "csv"
                count = write_csv(file, rows, column_names(blocks)) if is_csv else write_jsonl(file, rows, events)
        draft.replace(out)
    except NoPyarrow as error:
        raise Stop(str(error), USAGE) from None
    except OSError as error:
        raise Stop(f"{out}: {error.strerror}", FAILED) from None
    finally:
        draft.unlink(missing_ok=True)
    click.echo(f"{out}: {count:,} rows, {out.stat().st_size:,} bytes", err=True)


def _show(session: Session, host_name: str, run_id: str) -> None:
    from backend.fleet import Fleet
    from tui.app import run

    run(Fleet(session.only(host_name)), replay=(host_name, "" if run_id == EVERYTHING else run_id))
