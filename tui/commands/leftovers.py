"""`leftovers`: shared memory that nothing uses any more, and whoever still has a server's port."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from backend.wire import printable
from tui import format
from tui.commands.session import FAILED, OK, Session, json_option, pass_session, put_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.wire import Leftover, Leftovers


def leftover_lines(segments: Sequence[Leftover], ports: Sequence[str]) -> list[str]:
    """Write what was left behind, a line each."""
    return [_line(one) for one in segments] + [f"  {text}" for text in ports]


def _line(one: Leftover) -> str:
    words = [printable(one.path), format.size(one.bytes), one.kind, one.user, f"{format.duration(one.age_s)} old"]
    return "  left behind: " + "  ".join([*words, "removed" if one.removed else one.problem or one.why])


@click.command()
@click.argument("host_name", metavar="HOST")
@click.option("--remove", is_flag=True, help="Remove your own segments that nothing has open or mapped.")
@json_option
@pass_session
@click.pass_context
def leftovers(context: click.Context, session: Session, host_name: str, remove: bool, as_json: bool) -> None:
    """List the shared memory that dead processes left on a host, and whoever still has a server's port.

    Nothing that is open or mapped anywhere is touched, and nothing of other users. Ends with 1 where something of
    yours could not be removed.
    """
    with session.connected(host_name) as (fleet, host):
        found = fleet.leftovers(host.name, remove).result()
    if as_json:
        put_json(found)
    else:
        click.echo("\n".join([*leftover_lines(found.segments, found.ports), _sum(found)]))
    failed = [one for one in found.segments if remove and one.mine and not one.removed]
    context.exit(FAILED if failed else OK)


def _sum(found: Leftovers) -> str:
    removed = sum(one.bytes for one in found.segments if one.removed)
    left = sum(one.bytes for one in found.segments if not one.removed)
    return f"left {format.size(left)}, removed {format.size(removed)}; {found.in_use} segments in use"
