"""`pipeline`: the whole chain of a host, which goes on there by itself; shown, started, followed, looked at."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from backend.fleet import chain_names
from backend.wire import PIPELINE, RESET, RUN_ENDED, Gate, Pipeline, Run, Step
from tui import format
from tui.commands.runs import gate_line
from tui.commands.session import FAILED, GATE, OK, Session, Stop, json_option, pass_session, put_json

if TYPE_CHECKING:
    from backend.fleet import Fleet, HostState

LOOK_EVERY_S = 1.0
MARKS = {"done": "ok", "up": "up", "ended": "ended", "running": "RUNNING", "checking": "CHECKING", "skipped": "-",
         "waiting": ".", "refused": "REFUSED", "failed": "FAILED", "stopped": "STOPPED"}  # fmt: skip


def step_line(step: Step) -> str:
    """Write a step as one line."""
    took = format.duration(step.ended_at - step.started_at) if step.ended_at and step.started_at else ""
    words = f"  {MARKS.get(step.state, step.state):<9} {step.name:<16} {took:>9}  {step.run_id}"
    words += f"  forced: {step.forced}" if step.forced else ""
    return (words + (f"  {step.reason}" if step.reason else "")).rstrip()


def chain_lines(chain: Pipeline, host: str) -> list[str]:
    """Write a chain as plain lines: each step, the gates where it was refused, how it ended, how to go on."""
    lines = [f"{chain.id}: {chain.state}"] + [step_line(step) for step in chain.steps]
    lines += [gate_line(gate) for gate in chain.gates]
    lines += [f"{chain.state}: {chain.reason}"] if chain.reason else []
    lines += [f"do: {chain.fix}"] if chain.fix else []
    if chain.state not in ("running", "done") and chain.go_on:
        lines.append(f"then: eightzeros pipeline run {host} --from {chain.go_on}")
    return lines


@click.group()
def pipeline() -> None:
    """The chain of stages of a host, from the first to the last, unattended."""


@pipeline.command("run")
@click.argument("host_name", metavar="HOST")
@click.option("--from", "start", default="", metavar="STAGE", help="Begin at this step.")
@click.option("--dry-run", is_flag=True, help="Only print every command as it would run, and the first gates.")
@click.option("--force", default="", metavar="WHY", help="Pass the gates of the first step; the reason is kept.")
@click.option("--yes", is_flag=True, help="Kill what holds the GPUs at each reset without asking now.")
@click.option("--detach", is_flag=True, help="Do not follow it: it goes on either way.")
@json_option
@pass_session
@click.pass_context
def pipeline_run(
    context: click.Context, session: Session, host_name: str, start: str, dry_run: bool, force: str, yes: bool,
    detach: bool, as_json: bool,
) -> None:  # fmt: skip
    """Start the chain on HOST, which stops at the first gate or stage that is not well. Ctrl-C only stops watching.

    Exit codes: 0 done, 1 a stage failed or the chain was stopped, 4 refused by a gate.
    """
    with session.connected(host_name) as (fleet, host):
        if dry_run:
            _dry_run(fleet, host, start, as_json)
            return
        if not yes and host.config.confirm != "never":
            _confirm(fleet, host, start, as_json)
        run = fleet.run_chain(host.name, start, force).result()
        click.echo(f"{run.id} on {host.name}: it goes on if this command ends", err=True)
        if detach:
            put_json(run) if as_json else click.echo(run.id)
            return
        chain = _followed(fleet, host, run)
    put_json(chain) if as_json else click.echo("\n".join(chain_lines(chain, host.name)))
    context.exit({"done": OK, "refused": GATE}.get(chain.state, FAILED))


@pipeline.command("show")
@click.argument("host_name", metavar="HOST")
@click.argument("run_id", required=False, metavar="[ID]")
@json_option
@pass_session
def pipeline_show(session: Session, host_name: str, run_id: str | None, as_json: bool) -> None:
    """Show how a chain of HOST stands: the newest, or that of ID."""
    with session.connected(host_name) as (fleet, host):
        fleet.wait(lambda: host.caught_up or None, 20).result()
        known = [run for run in host.runs.values() if run.stage == PIPELINE]
        if not run_id and not known:
            raise Stop(f"no chain was ever run on {host.name}", FAILED)
        chain = fleet.chain(host.name, run_id or max(known, key=lambda run: run.started_at).id).result()
    put_json(chain) if as_json else click.echo("\n".join(chain_lines(chain, host.name)))


def _dry_run(fleet: Fleet, host: HostState, start: str, as_json: bool) -> None:
    found = fleet.plan_chain(host.name, start).result()
    if as_json:
        put_json(found)
        return
    for step in found["steps"]:
        env = f"  (env: {', '.join(step['env_names'])})" if step["env_names"] else ""
        kept = ", stays up" if step["service"] else ""
        click.echo(f"# {step['name']} ({step['kind']}{kept}), in {step['cwd']}{env}\n{step['command']}")
    gates = [Gate(**gate) for gate in found["gates"]]
    click.echo("\n".join([f"# the gates of {found['steps'][0]['name']}, now", *map(gate_line, gates)]))


def _confirm(fleet: Fleet, host: HostState, start: str, as_json: bool) -> None:
    """Ask before a chain that will kill what holds the GPUs, and say who that is now."""
    names = chain_names(fleet.config, host.name)
    ahead = names[names.index(start) :] if start in names else names
    resets = [name for name in ahead if name.partition(":")[0] == RESET]
    if not resets:
        return
    if as_json or not sys.stdin.isatty():
        raise Stop("the chain has a reset, which kills what holds the GPUs: say --yes where nobody can be asked", GATE)
    plan = fleet.plan_reset(host.name).result()
    for one in plan.victims:
        click.echo(f"  {one.pid:>8} {one.user:<10} {one.command[:70]}  {one.reason}")
    click.echo("\n".join(f"would be lost: {text}" for text in plan.losses))
    text = f"{', '.join(resets)} would now kill {len(plan.victims)} processes, and later what the chain started."
    if not click.confirm(f"{text} Start it?", default=False):
        raise Stop("nothing was started", GATE)


def _followed(fleet: Fleet, host: HostState, run: Run) -> Pipeline:
    """Watch a chain to its end, with a line on stderr when it has moved."""
    told, told_at = "", 0.0
    while True:
        now = host.runs.get(run.id, run)
        words = now.progress.message if now.progress is not None else ""
        if words != told and time.monotonic() - told_at >= LOOK_EVERY_S:
            click.echo(words, err=True)
            told, told_at = words, time.monotonic()
        if now.state in RUN_ENDED:
            return fleet.chain(host.name, run.id).result()
        time.sleep(LOOK_EVERY_S / 4)
