"""`reset`, `verify`, `baseline`, `receipts`: the kill-and-verify cycle without a screen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from backend.wire import CLEAN, GIB, LIMITED, MIB, GpuVerdict, Plan, Receipt
from tui.commands.gpureset import GpuResetOrder, gpu_reset_options, outcome_lines, reset_gpus
from tui.commands.leftovers import leftover_lines
from tui.commands.session import (
    FAILED,
    GATE,
    OK,
    Session,
    Stop,
    host_option,
    json_option,
    pass_session,
    put_json,
)
from tui.widgets.process_tree import forest

if TYPE_CHECKING:
    from backend.fleet import Fleet, HostState
    from tui.widgets.process_tree import Branch


def process_line(branch: Branch) -> str:
    """Write a process of a plan as one line, indented below the one that started it."""
    process = branch.process
    used = process.used_bytes.number()
    size = f"{used / GIB:.1f} GiB" if used is not None else "-" if process.used_bytes.unsupported else "? GiB"
    where = f"gpu {','.join(map(str, process.gpus)) or '-':<8} {size:>10}"
    method = f" [{process.method}]" if process.method else ""
    who = f"{'  ' * branch.depth}{process.pid:>8} {process.user:<10}"
    return f"  {who} {where}  {process.command[:70]}  {process.reason}{method}"


def plan_lines(plan: Plan) -> list[str]:
    """Write a plan as plain lines of text."""
    lines = [f"victims: {len(plan.victims)}"] + [process_line(one) for one in forest(plan.victims)]
    lines += [f"spared: {len(plan.spared)}"] + [process_line(one) for one in forest(plan.spared)]
    lines += [
        f"  ghost: pid {ghost.get('pid')} is named on GPU {ghost.get('gpu')} and is not there" for ghost in plan.ghosts
    ]
    lines += [f"not seen: {text}" for text in plan.unseen] + [f"would be lost: {text}" for text in plan.losses]
    return [*lines, f"baseline: {plan.baseline}", f"digest: {plan.digest}"]


def verdict_line(gpu: GpuVerdict) -> str:
    """Write what a GPU is as one line."""
    used = gpu.used_bytes.number()
    shown = f"{used / MIB:.0f} MiB" if used is not None else "? MiB"
    tail = f"  do: {gpu.action}" if gpu.action else ""
    return f"  GPU {gpu.index}  {gpu.verdict:<16} {shown:>10}  {gpu.reason}{tail}  by hand: {gpu.command}"


def receipt_lines(receipt: Receipt) -> list[str]:
    """Write a receipt as plain lines of text."""
    lines = [f"{receipt.kind} {receipt.id}  killed {len(receipt.killed)}  left {len(receipt.survivors)}"]
    lines += outcome_lines(receipt.gpu_reset)
    lines += [verdict_line(gpu) for gpu in receipt.after]
    lines += [f"  not seen: {text}" for text in receipt.unseen] + [f"  note: {text}" for text in receipt.notes]
    lines += leftover_lines(receipt.leftovers, receipt.ports)
    lines += ["  " + "  ".join(f"{name} {value:.2f} s" for name, value in receipt.durations.items())]
    return [*lines, f"{receipt.verdict}" + (f"  receipt {receipt.path}" if receipt.path else "")]


def clean(receipt: Receipt, accept_limited: bool) -> bool:
    """Say whether a verdict opens the next stage."""
    return receipt.verdict == CLEAN or (accept_limited and receipt.verdict == LIMITED)


def _report(context: click.Context, receipt: Receipt, accept_limited: bool, as_json: bool) -> None:
    if as_json:
        put_json(receipt)
    else:
        click.echo("\n".join(receipt_lines(receipt)))
    context.exit(OK if clean(receipt, accept_limited) else FAILED)


@click.command()
@host_option
@click.option("--yes", is_flag=True, help="Kill the plan's victims without asking.")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be done; do nothing.")
@gpu_reset_options
@json_option
@pass_session
@click.pass_context
def reset(
    context: click.Context, session: Session, host_name: str | None, yes: bool, only_plan: bool, asked: GpuResetOrder,
    as_json: bool,
) -> None:  # fmt: skip
    """Kill what holds the GPUs of a host and verify that they are clean.

    With --gpu-reset nothing is killed: the driver resets the GPUs that are named, once all that this needs is met.
    """
    if asked.wanted:
        receipt, accept_limited = reset_gpus(session, host_name, asked, only_plan, as_json)
        _report(context, receipt, accept_limited, as_json)
    with session.connected(host_name) as (fleet, host):
        plan = fleet.plan_reset(host.name).result()
        if only_plan and as_json:
            put_json(plan)
        elif not as_json:
            click.echo("\n".join(plan_lines(plan)))
        if only_plan:
            return
        if not yes:
            _confirm(plan, as_json)
        receipt = _run(fleet, host, plan)
    _report(context, receipt, host.config.accept_limited, as_json)


def _confirm(plan: Plan, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise Stop("a reset needs --yes where nobody can be asked", GATE)
    if not click.confirm(f"Kill {len(plan.victims)} processes?", default=False):
        raise Stop("nothing was killed", GATE)


def _run(fleet: Fleet, host: HostState, plan: Plan) -> Receipt:
    run = fleet.start_reset(host.name, plan).result()
    return fleet.reset_result(host.name, run.id).result()


@click.command()
@host_option
@click.option("--cuda-test", is_flag=True, help="Run a small CUDA program on every GPU that is free, too.")
@json_option
@pass_session
@click.pass_context
def verify(context: click.Context, session: Session, host_name: str | None, cuda_test: bool, as_json: bool) -> None:
    """Judge every GPU of a host without killing anything."""
    with session.connected(host_name) as (fleet, host):
        receipt = fleet.verify(host.name, cuda_test).result()
    _report(context, receipt, host.config.accept_limited, as_json)


@click.group()
def baseline() -> None:
    """What each GPU shows when nothing holds it: a verdict is measured against it."""


@baseline.command("record")
@host_option
@pass_session
def baseline_record(session: Session, host_name: str | None) -> None:
    """Record it now; refused while something holds a GPU."""
    with session.connected(host_name) as (fleet, host):
        put_json(fleet.record_baseline(host.name).result())


@baseline.command("show")
@host_option
@pass_session
def baseline_show(session: Session, host_name: str | None) -> None:
    """Show what was recorded."""
    with session.connected(host_name) as (fleet, host):
        put_json(fleet.baseline(host.name).result())


@click.group()
def receipts() -> None:
    """The evidence of past resets."""


@receipts.command("list")
@host_option
@json_option
@pass_session
def receipts_list(session: Session, host_name: str | None, as_json: bool) -> None:
    """List a host's receipts, newest first."""
    with session.connected(host_name) as (fleet, host):
        found = fleet.receipts(host.name).result()
    if as_json:
        put_json(found)
        return
    for item in found:
        click.echo(
            f"{item['id']}  {item['kind']:<9} {item['verdict']:<16} killed {item['killed']}  {item['total_s']:.1f} s"
        )


@receipts.command("show")
@click.argument("receipt_id")
@host_option
@json_option
@pass_session
def receipts_show(session: Session, receipt_id: str, host_name: str | None, as_json: bool) -> None:
    """Show one receipt."""
    with session.connected(host_name) as (fleet, host):
        receipt = fleet.receipt(host.name, receipt_id).result()
    if as_json:
        put_json(receipt)
    else:
        click.echo("\n".join(receipt_lines(receipt)))
