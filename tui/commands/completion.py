"""`eightzeros completion`: the script by which a shell completes commands, options and hosts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tui.commands.session import FAILED, Stop

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete `eightzeros`: `source <(eightzeros completion bash)`."""
    kind = get_completion_class(shell)
    if kind is None:
        raise Stop(f"this version of click has no completion for {shell}", FAILED)
    made = kind(context.find_root().command, {}, "eightzeros", "_EIGHTZEROS_COMPLETE")
    click.echo(kind.source_template % made.source_vars())
