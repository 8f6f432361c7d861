"""The `eightzeros` command: the console, and for everything a key does, a command that does it."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import click

from backend import config as configuration
from tui.commands import (
    adopt,
    completion,
    doctor,
    export,
    layers,
    leftovers,
    pipeline,
    prepare,
    replay,
    reset,
    retire,
    runs,
    shards,
    status,
    web,
)
from tui.commands.session import OK, USAGE, Session, Stop, pass_session, put_json


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("eightzeros"), "--version", message="%(prog)s %(version)s")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read this configuration instead.",
)
@click.pass_context
def main(context: click.Context, path: Path | None) -> None:
    """Watch, extract, inspect and reset GPU hosts. Without a command: the console.

    Exit codes: 0 clean or ok, 1 not clean or failed, 2 usage, 3 unreachable, 4 refused by a gate.
    """
    context.obj = Session(path)
    if context.invoked_subcommand is None:
        console(context.obj)


def console(session: Session) -> None:
    """Open the console on the configured hosts."""
    need_terminal()
    from backend.fleet import Fleet
    from tui.app import run

    run(Fleet(session.config()))


def need_terminal() -> None:
    """Stop where there is no terminal to draw on: a pipe gets no escape sequences."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise Stop("the console needs a terminal; `eightzeros status --json` answers without one", USAGE)


@main.group("config")
def config_group() -> None:
    """Where the configuration is looked for, and whether it is right."""


@config_group.command("path")
def config_path() -> None:
    """Print where the configuration is looked for."""
    click.echo(configuration.default_path())


@config_group.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it with every default filled in.")
@pass_session
def config_check(session: Session, file: Path | None, as_json: bool) -> None:
    """Check a configuration; errors name file, line and key."""
    path = file or session.path
    found = Session(path).config()
    if as_json:
        put_json(configuration.as_dict(found))
        return
    source = path or configuration.default_path()
    where = str(source) if Path(source).exists() else f"no file at {source}: this machine is the only host"
    click.echo(f"ok: {where}: {len(found.hosts)} hosts, {len(found.stages)} stages")


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def extract(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Extract hidden states here, in the foreground; `extract --help` lists its options."""
    from backend.extraction.extract import main as extraction

    context.exit(extraction(list(arguments)))


@main.command()
@click.option("--headless", is_flag=True, help="Run the whole chain unattended instead of opening the console.")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, help="Records of the corpus.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Leave everything it made here.")
@click.option("--json", "as_json", is_flag=True, help="With --headless: print one JSON object last.")
@click.pass_context
def demo(context: click.Context, headless: bool, samples: int, keep: Path | None, as_json: bool) -> None:
    """Show everything on a virtual host with eight virtual GPUs and real processes that hold them."""
    from backend.virtual import demo as virtual

    if headless:
        context.exit(virtual.run_headless(samples, keep, as_json=as_json))
    need_terminal()
    from tui.app import run

    try:
        with virtual.fleet(samples, keep) as fleet:
            run(fleet)
    except FileExistsError as error:
        raise Stop(str(error), USAGE) from None
    context.exit(OK)


for command in (
    status.status, status.watch, reset.reset, reset.verify, reset.baseline, reset.receipts,
    leftovers.leftovers, runs.launch, runs.runs,
    runs.logs, runs.stop, pipeline.pipeline, shards.shards, prepare.prepare, export.export,
    layers.layers, adopt.adopt, replay.replay, retire.retire, doctor.doctor, web.web, completion.completion,
):  # fmt: skip
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="eightzeros")
