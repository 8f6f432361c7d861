"""`export`: our shards for other trainers, here, in the foreground."""

from __future__ import annotations

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def export(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Write our shards for other trainers; `export --help` lists the formats."""
    from backend.extraction.export import main as exporting

    context.exit(exporting(list(arguments)))
