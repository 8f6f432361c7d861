"""`adopt`: watch a run that eightzeros did not start."""

from __future__ import annotations

import click

from tui.commands.session import Session, host_option, json_option, pass_session, put_json
from tui.commands.status import run_line


@click.command()
@click.option("--out", required=True, metavar="DIR", help="The folder on the host that its shards go to.")
@click.option("--log", default="", metavar="FILE", help="Its log, or that of the server it asks.")
@click.option("--pid", type=click.IntRange(1), help="Its process: the watch ends with it.")
@click.option("--label", default="", help="What it is called in the console; the folder's name by default.")
@click.option("--samples", type=click.IntRange(1), help="How many samples it is to make, for an ETA.")
@click.option("--tokens", type=click.IntRange(1), help="How many tokens they have, for a better one.")
@host_option
@json_option
@pass_session
def adopt(
    session: Session,
    out: str,
    log: str,
    pid: int | None,
    label: str,
    samples: int | None,
    tokens: int | None,
    host_name: str | None,
    as_json: bool,
) -> None:
    """Watch a run that was not started here: progress, rate, ETA and disk, by its folder, log and process.

    The watch is a run of its own that outlives this command. Stopping it stops the watching and nothing else.
    """
    with session.connected(host_name) as (fleet, host):
        run = fleet.adopt(
            host.name, out=out, log=log, pid=pid or 0, label=label, samples=samples or 0, tokens=tokens or 0
        ).result()
    put_json(run) if as_json else click.echo(run_line(run))
