"""`reset --gpu-reset`: let the driver reset GPUs, with everything that this needs printed, and a typed confirmation."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tui import format
from tui.commands.session import GATE, OK, USAGE, Session, Stop, put_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.wire import Gate, GpuResetPlan, Receipt


@dataclass(frozen=True)
class GpuResetOrder:
    """What the command line says of a reset of GPUs; `wanted` where it asks for one at all."""

    wanted: bool
    gpus: tuple[str, ...]
    because: str
    in_vm: bool
    typed: str

    @property
    def name(self) -> str:
        """Return what has to be typed."""
        return ",".join(dict.fromkeys(self.gpus))


def gpu_reset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a reset of GPUs, handed over as one GpuResetOrder, `asked`."""

    @functools.wraps(command)
    def gathered(*args: Any, gpu_reset: bool, gpus: Any, because: str, in_vm: bool, typed: str, **more: Any) -> Any:
        order = GpuResetOrder(gpu_reset, gpus, because, in_vm, typed)
        if gpu_reset != bool(gpus) or (not gpu_reset and (because or in_vm or typed)):
            raise Stop(
                "--gpu-reset needs --gpu N, once for each GPU; --because, --in-vm and --confirm need both", USAGE
            )
        return command(*args, asked=order, **more)

    for option in reversed((
        click.option("--gpu-reset", is_flag=True, help="Kill nothing; let the driver reset the GPUs named by --gpu."),
        click.option("--gpu", "gpus", multiple=True, metavar="N|UUID", help="A GPU to reset; again for each other."),
        click.option("--because", default="", metavar="TEXT", help="Your reason, where nothing asks for a reset."),
        click.option("--in-vm", is_flag=True, help="This virtual machine may reset the GPUs that it was given."),
        click.option("--confirm", "typed", default="", metavar="N,N", help="The same, where nobody can be asked."),
    )):  # fmt: skip
        gathered = option(gathered)
    return gathered


def need_line(need: Gate) -> str:
    """Write a need as one line: met, not met or not known, what was found, what to do."""
    word = {True: "ok", False: "NO", None: "?"}[need.ok]
    return f"  {word:<3} {need.name:<28} {need.detail}" + (f"  -> {need.fix}" if need.fix else "")


def plan_lines(plan: GpuResetPlan) -> list[str]:
    """Write what a reset of GPUs needs as plain lines of text."""
    lines = [f"reset of GPU {', '.join(map(str, plan.gpus))} by the driver needs:"]
    lines += [need_line(need) for need in plan.needs]
    return [*lines, f"would run: {plan.command}"]


def outcome_lines(told: dict[str, Any]) -> list[str]:
    """Write what a receipt tells of a reset of GPUs; nothing where it is of another kind."""
    if not told:
        return []
    gpus = ", ".join(str(one["index"]) for one in told["gpus"])
    took = f" in {format.duration(told['took_s'])}" if told["took_s"] is not None else ""
    lines = [f"  GPU {gpus} reset by the driver: {told['outcome'] or 'not begun'}{took}"]
    lines += [f"    GPU {one['index']}: {fault}" for one in told["gpus"] for fault in one["faults"]]
    return lines + ([f"    {told['output']}"] if told["output"] else [])


def reset_gpus(
    session: Session, host_name: str | None, asked: GpuResetOrder, only_plan: bool, as_json: bool
) -> tuple[Receipt, bool]:
    """Print what it needs, have it confirmed, do it. Returns the receipt, and whether a limited verdict is accepted."""
    with session.connected(host_name) as (fleet, host):
        plan = fleet.plan_gpu_reset(host.name, asked.gpus, asked.because, asked.in_vm).result()
        unmet = [need for need in plan.needs if need.ok is not True]
        if as_json and (only_plan or unmet):
            put_json(plan)
        elif not as_json:
            click.echo("\n".join(plan_lines(plan)))
        if unmet:
            raise Stop(f"{len(unmet)} of {len(plan.needs)} needs are not met; no GPU was reset", GATE)
        if only_plan:
            raise click.exceptions.Exit(OK)
        _confirm(asked, as_json)
        run = fleet.start_gpu_reset(host.name, asked.gpus, asked.because, asked.in_vm).result()
        click.echo(f"{run.id} on {host.name}: it goes on if this command ends", err=True)
        return fleet.reset_result(host.name, run.id).result(), host.config.accept_limited


def _confirm(asked: GpuResetOrder, as_json: bool) -> None:
    """Have the GPUs typed. Raises Stop where they are others, or nobody can be asked; --yes is no answer to this."""
    typed = asked.typed
    if not typed:
        if as_json or not sys.stdin.isatty():
            raise Stop(f"a reset of GPUs needs --confirm {asked.name} where nobody can be asked", GATE)
        typed = click.prompt(f"Type {asked.name} to reset GPU {asked.name}", default="", show_default=False)
    if typed.replace(" ", "") != asked.name:
        raise Stop(f"`{typed}` is not `{asked.name}`: no GPU was reset", GATE)
