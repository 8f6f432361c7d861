"""`shards audit`: every shard of a folder, here in the foreground, or on a host as a run that outlives this command."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from backend.config import Stage
from tui.commands.session import FAILED, USAGE, Session, Stop, host_option, json_option, pass_session, put_json

if TYPE_CHECKING:
    from backend.fleet import Fleet, HostState
    from backend.wire import Run

LOOK_EVERY_S = 1.0
LONGEST_S = 30 * 86400.0


@click.command("audit")
@click.argument("path")
@host_option
@click.option("--corpus", default="", metavar="FILE", help="Compare with this corpus; by default the journal's.")
@click.option("--deep", is_flag=True, help="Read every byte: checksums, NaN, infinity, rows of zeros.")
@click.option("--fresh", is_flag=True, help="Look at every file again, also at those that have not changed.")
@click.option("--max-tokens", type=click.IntRange(1), help="A longer sample is a fault.")
@click.option("--quarantine", default="", metavar="DIR", help="Move bad files there and have them extracted again.")
@json_option
@pass_session
@click.pass_context
def shards_audit(
    context: click.Context,
    session: Session,
    path: str,
    host_name: str | None,
    corpus: str,
    deep: bool,
    fresh: bool,
    max_tokens: int | None,
    quarantine: str,
    as_json: bool,
) -> None:
    """Look at every shard of a folder, and at all of them together. Exit codes: 0 no fault, 1 faults, 2 usage.

    Without --host: here, in the foreground. What was looked at is kept, so that an interrupted audit goes on.
    """
    more = ["--fresh"] if fresh else []
    stage = Stage(
        kind="audit", folder=path, corpus=corpus, deep=deep, max_tokens=max_tokens, quarantine=quarantine,
        arguments=more,
    )  # fmt: skip
    if host_name is None:
        context.exit(_here(stage, as_json))
    with session.connected(host_name) as (fleet, host):
        context.exit(_there(fleet, host, stage, as_json))


def _here(stage: Stage, as_json: bool) -> int:
    from backend.agent.shards.audit.main import main
    from backend.stages.audit import audit_argv

    return main([*audit_argv(stage, ())[2:], *(["--json"] if as_json else [])])


def _there(fleet: Fleet, host: HostState, stage: Stage, as_json: bool) -> int:
    if not stage.folder.startswith(("/", "~")):
        raise Stop(f"{stage.folder}: name the whole path on {host.name}, beginning with / or ~", USAGE)
    run = fleet.audit(host.name, stage).result()
    click.echo(f"{run.id} on {host.name}: it goes on if this command ends", err=True)
    run = _followed(fleet, host, run)
    if run.exit_code not in (0, 1):
        log = fleet.log(host.name, run.id).result()["text"].strip().split("\n")[-1]
        raise Stop(f"{run.id} ended without a result: {run.reason or log}", run.exit_code or FAILED)
    result = fleet.audit_result(host.name, run.id).result()
    if as_json:
        put_json({**result, "run": run.id, "list": _all_faults(fleet, host, run)})
    else:
        from backend.agent.shards.audit.results import lines_of

        click.echo("\n".join(lines_of(result)))
    return run.exit_code or 0


def _followed(fleet: Fleet, host: HostState, run: Run) -> Run:
    """Wait for the end, with a line of progress on stderr when it has moved."""
    ended = fleet.run_ended(host.name, run.id, LONGEST_S)
    told, told_at = "", time.monotonic()
    while True:
        try:
            return ended.result(LOOK_EVERY_S)
        except TimeoutError:
            if ended.done():
                raise
        progress = host.runs[run.id].progress
        if progress is not None and time.monotonic() - told_at >= 2 * LOOK_EVERY_S:
            eta = progress.eta_s()
            line = (
                f"{progress.samples_done:,} of {progress.samples_total:,} files, {progress.samples_per_s:,.0f} files/s"
            )
            line += (f", {eta:,.0f} s left" if eta else "") + f"; {progress.message}"
            if line != told:
                click.echo(line, err=True)
            told, told_at = line, time.monotonic()


def _all_faults(fleet: Fleet, host: HostState, run: Run) -> list[Any]:
    found: list[Any] = []
    offset: int | None = 0
    while offset is not None:
        page = fleet.audit_faults(host.name, run.id, offset).result()
        found += page["faults"]
        offset = page["next"]
    return found
