"""`doctor`: what works here and on each host, what is missing, and what to do about it, in one table."""

from __future__ import annotations

import locale
import os
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from backend.fleet import Fleet, LinkState
from backend.wire import Gate, Refused, printable
from tui.commands.session import (
    FAILED,
    OK,
    READY_S,
    UNREACHABLE,
    Session,
    answers,
    json_option,
    pass_session,
    put_json,
    unreachable,
)  # fmt: skip

if TYPE_CHECKING:
    from backend.fleet import HostState

HERE = "this machine"
SKEW_S = 5.0
"""From here on two clocks are called apart: the timeline and an ETA read on the console would be wrong by as much."""

SMALLEST = (80, 24)
"""Columns and lines for which the console is drawn (DESIGN section 9)."""

EXTRAS = {"torch": "extract with torch", "pyarrow": "parquet corpora, export for speculators",
          "transformers": "prepare with a tokenizer"}  # fmt: skip
"""Optional packages, and what each is for."""

MARKS = {True: "ok", False: "FAILS", None: "partly"}


@click.command()
@click.argument("host_name", metavar="[HOST]", required=False)
@json_option
@pass_session
@click.pass_context
def doctor(context: click.Context, session: Session, host_name: str | None, as_json: bool) -> None:
    """Show what works here and on HOST (or on every host), what is missing, and what to do about it.

    Ends with 1 where something fails and 3 where a host cannot be reached; what works in part does not count.
    """
    config = session.only(host_name) if host_name else session.config()
    tables = {HERE: local_rows()}
    reached = True
    with Fleet(config) as fleet, answers():
        waits = {name: fleet.ready(name, READY_S) for name in fleet.hosts}
        for name, wait in waits.items():
            try:
                wait.result()
            except TimeoutError:
                pass  # its row says why
            tables[name] = host_rows(fleet, fleet.hosts[name])
            reached = reached and fleet.hosts[name].link.state is LinkState.LIVE
    if as_json:
        put_json({name: [_record(row) for row in rows] for name, rows in tables.items()})
    else:
        click.echo("\n\n".join(table(name, rows) for name, rows in tables.items()))
    if not reached:
        context.exit(UNREACHABLE)
    context.exit(FAILED if any(row.ok is False for rows in tables.values() for row in rows) else OK)


def _record(row: Gate) -> dict[str, Any]:
    return {"name": row.name, "state": MARKS[row.ok], "found": row.detail, "do": row.fix}


def local_rows() -> list[Gate]:
    """Look at this machine: the terminal, ssh, and optional packages."""
    rows = [
        Gate("eightzeros", True, f"{version('eightzeros')}, Python {sys.version.split()[0]}"),
        _terminal(),
        _letters(),
    ]
    found = shutil.which("ssh")
    rows.append(
        Gate("ssh", True, found) if found else
        Gate("ssh", None, "not here: ~/.ssh/config is read without its Match lines", "install OpenSSH's client")
    )  # fmt: skip
    for package, use in EXTRAS.items():
        try:
            rows.append(Gate(package, True, version(package)))
        except PackageNotFoundError:
            rows.append(Gate(package, None, f"not installed here; needed for: {use}", f"pip install {package}"))
    return rows


def _terminal() -> Gate:
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        return Gate("terminal", None, "this command has none", "the console needs one; every command works without")
    size = shutil.get_terminal_size()
    said = f"{os.environ.get('TERM', 'TERM is not set')}, {size.columns}x{size.lines}"
    if size < SMALLEST:
        return Gate("terminal", None, said, f"make it {SMALLEST[0]}x{SMALLEST[1]} or larger")
    return Gate("terminal", True, said)


def _letters() -> Gate:
    """Say whether the terminal will show the console's lines: a locale without UTF-8 draws question marks."""
    coding = locale.getencoding()
    if coding.lower().replace("-", "") == "utf8":
        return Gate("characters", True, coding)
    return Gate("characters", None, f"{coding}: charts and lines are not drawn", "set LANG=C.UTF-8")


def host_rows(fleet: Fleet, host: HostState) -> list[Gate]:
    """Ask a host, or say why it cannot be asked."""
    hello = host.hello
    if host.link.state is not LinkState.LIVE or hello is None:
        why, _, hint = unreachable(host).partition("\n")
        return [Gate("connection", False, printable(why, 500), printable(hint, 500))]
    source = f", settings from {host.link.settings_from}" if host.link.settings_from else ""
    rows = [Gate("connection", True, f"{hello.user} at {hello.hostname}, {hello.system}{source}"), *_clock(host)]
    try:
        return rows + fleet.doctor(host.name).result()
    except (Refused, ConnectionError, TimeoutError) as error:
        return [*rows, Gate("the rest", None, f"not told: {error or 'no answer in time'}", "try again")]


def _clock(host: HostState) -> list[Gate]:
    """Set the host's clock against ours, by the time of its newest telemetry."""
    if host.telemetry is None:
        return []
    apart_s = host.telemetry.at - time.time()
    said = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} this machine's"
    if abs(apart_s) < SKEW_S:
        return [Gate("clock", True, "as this machine's")]
    return [Gate("clock", None, said, "timedatectl, on both: times on the timeline are the host's")]


def table(name: str, rows: list[Gate]) -> str:
    """Write one machine's rows: mark, what, what was found, and below it what to do."""
    wide = max(len(row.name) for row in rows)
    lines = [name]
    for row in rows:
        lines.append(f"  {MARKS[row.ok]:<6}  {row.name:<{wide}}  {printable(row.detail, 1000)}")
        if row.fix and row.ok is not True:
            lines.append(f"  {'':<6}  {'':<{wide}}  -> {printable(row.fix, 1000)}")
    return "\n".join(lines)
