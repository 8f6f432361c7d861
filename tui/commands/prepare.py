"""`prepare`: datasets into one corpus, here, in the foreground."""

from __future__ import annotations

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def prepare(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Merge datasets into one shuffled corpus of token ids; `prepare --help` lists its options."""
    from backend.extraction.prepare.main import main as preparation

    context.exit(preparation(list(arguments)))
