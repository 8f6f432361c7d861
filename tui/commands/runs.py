"""`launch`, `runs`, `logs`, `stop`: detached runs without a screen."""

from __future__ import annotations

import time

import click

from backend.wire import RESET, Gate
from tui.commands.session import (
    FAILED,
    GATE,
    OK,
    USAGE,
    Session,
    Stop,
    host_option,
    json_option,
    pass_session,
    put_json,
)
from tui.commands.status import run_line

FOLLOW_EVERY_S = 0.5


def gate_line(gate: Gate) -> str:
    """Write a gate as one line."""
    word = {True: "ok", False: "CLOSED", None: "UNKNOWN"}[gate.ok]
    return f"  {word:<8} {gate.name}: {gate.detail}" + (f"  do: {gate.fix}" if gate.fix and gate.ok is not True else "")


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[HOST] STAGE")
@host_option
@click.option("--force", metavar="WHY", default="", help="Launch although a gate is closed; the reason is kept.")
@click.option("--check", is_flag=True, help="Only show the gates.")
@json_option
@pass_session
@click.pass_context
def launch(
    context: click.Context,
    session: Session,
    words: tuple[str, ...],
    host_name: str | None,
    force: str,
    check: bool,
    as_json: bool,
) -> None:
    """Launch a stage of the configuration as a run that outlives this command."""
    *before, stage = words
    if len(before) > 1 or (before and host_name):
        raise Stop("write HOST STAGE, or STAGE --host HOST", USAGE)
    if stage == RESET:
        raise Stop("`eightzeros reset` does that: it shows first whom it kills", USAGE)
    host_name = before[0] if before else host_name
    with session.connected(host_name) as (fleet, host):
        gates = fleet.gates(host.name, stage).result()
        closed = [gate for gate in gates if gate.ok is not True]
        if not as_json or check:
            put_json(gates) if as_json else click.echo("\n".join(gate_line(gate) for gate in gates) or "  no gates")
        if check:
            context.exit(GATE if closed else OK)
        if closed and not force:
            raise Stop("; ".join(f"{gate.name}: {gate.detail}" for gate in closed), GATE)
        run = fleet.launch(host.name, stage, force).result()
    put_json(run) if as_json else click.echo(run_line(run))


@click.command()
@host_option
@json_option
@pass_session
def runs(session: Session, host_name: str | None, as_json: bool) -> None:
    """List a host's runs, newest first."""
    with session.connected(host_name) as (fleet, host):
        fleet.wait(lambda: host.caught_up or None, 20).result()
        found = sorted(host.runs.values(), key=lambda run: run.started_at, reverse=True)
    if as_json:
        put_json(found)
        return
    for run in found:
        click.echo(run_line(run))


@click.command()
@click.argument("run_id")
@host_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@pass_session
def logs(session: Session, run_id: str, host_name: str | None, follow: bool) -> None:
    """Print a run's log."""
    with session.connected(host_name) as (fleet, host):
        offset = 0
        while True:
            live = bool(run_id in host.runs and host.runs[run_id] in host.live_runs())
            piece = fleet.log(host.name, run_id, offset).result()
            click.echo(piece["text"], nl=False)
            caught_up = piece["next"] >= piece["size"] or piece["next"] == offset
            offset = piece["next"]
            if caught_up and not (follow and live):
                return
            if caught_up:
                time.sleep(FOLLOW_EVERY_S)


@click.command()
@click.argument("run_id")
@host_option
@json_option
@pass_session
@click.pass_context
def stop(context: click.Context, session: Session, run_id: str, host_name: str | None, as_json: bool) -> None:
    """Ask a run to end; what is left after its grace is killed."""
    with session.connected(host_name) as (fleet, host):
        run = fleet.stop_run(host.name, run_id).result()
        run = fleet.run_ended(host.name, run_id, run.grace_s + 60).result()
    put_json(run) if as_json else click.echo(run_line(run))
    context.exit(FAILED if run.state == "lost" else OK)
