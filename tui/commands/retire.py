"""`retire`: delete an old cache on a host, by a plan that is shown first and a name that is typed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tui.commands.session import FAILED, GATE, OK, USAGE, Session, Stop, json_option, pass_session, put_json
from tui.retiring import plan_lines, receipt_lines

if TYPE_CHECKING:
    from backend.fleet import Fleet, HostState

LONGEST_S = 30 * 86400.0


@click.command()
@click.argument("host_name", metavar="HOST")
@click.argument("path")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be deleted; delete nothing.")
@click.option("--confirm", "typed", default="", metavar="NAME", help="The folder's name, where nobody can be asked.")
@json_option
@pass_session
@click.pass_context
def retire(
    context: click.Context, session: Session, host_name: str, path: str, only_plan: bool, typed: str, as_json: bool
) -> None:
    """Delete an old cache on a host: only below its `retire_roots`, never through a link or a mount.

    Ends with 4 where the plan is refused. What was interrupted goes on with the same command.
    """
    if not path.startswith(("/", "~")):
        raise Stop(f"{path}: name the whole path on {host_name}, beginning with / or ~", USAGE)
    with session.connected(host_name) as (fleet, host):
        plan = fleet.retire_plan(host.name, path).result()
        if as_json and (only_plan or plan["refused"]):
            put_json(plan)
        elif not as_json:
            click.echo("\n".join(plan_lines(plan, time.time())))
        if only_plan or plan["refused"]:
            context.exit(GATE if plan["refused"] else OK)
        _confirm(plan, typed, as_json)
        receipt = _delete(fleet, host, plan)
    if as_json:
        put_json(receipt)
    else:
        click.echo("\n".join(receipt_lines(receipt)))
    context.exit(OK if receipt["verdict"] == "deleted" else FAILED)


def _confirm(plan: dict[str, Any], typed: str, as_json: bool) -> None:
    """Have the folder's name typed. Raises Stop where it is another, or nobody can be asked."""
    if not typed:
        if as_json or not sys.stdin.isatty():
            raise Stop(f"a deletion needs --confirm {plan['name']} where nobody can be asked", GATE)
        typed = click.prompt(f"Type {plan['name']} to delete it", default="", show_default=False)
    if typed != plan["name"]:
        raise Stop(f"`{typed}` is not `{plan['name']}`: nothing was deleted", GATE)


def _delete(fleet: Fleet, host: HostState, plan: dict[str, Any]) -> dict[str, Any]:
    run = fleet.retire(host.name, plan["target"], plan["digest"]).result()
    click.echo(f"{run.id} on {host.name}: it goes on if this command ends", err=True)
    fleet.run_ended(host.name, run.id, LONGEST_S).result()
    return fleet.retire_receipt(host.name, run.id).result()
