"""`shards list`, `shards show` and `shards audit`: what is in a file, here or on a host, without torch."""

from __future__ import annotations

import os
from typing import Any

import click

from tui.commands.audit import shards_audit
from tui.commands.session import Session, host_option, json_option, pass_session, put_json


def show_lines(shard: dict[str, Any]) -> list[str]:
    """Write a shard as plain lines of text."""
    lines = [f"{shard['path']}  {shard['format']}  {shard['bytes']:,} bytes"]
    for entry in shard["entries"]:
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        lines.append(f"  {entry['key']:<28} {entry['dtype']:<10} {shape:<22} {entry['bytes']:>14,} bytes")
    return lines + [f"  {note['code']}: {note['text']}" for note in shard["notes"]]


def _whole(path: str, host_name: str | None) -> str:
    """Read a path as the shell would where the host is this machine; a host's own path is left to the host."""
    return path if host_name else os.path.abspath(os.path.expanduser(path))


@click.group()
def shards() -> None:
    """Shards of hidden states: .pt, .ckpt and .safetensors files."""


@shards.command("list")
@click.argument("path")
@host_option
@json_option
@pass_session
def shards_list(session: Session, path: str, host_name: str | None, as_json: bool) -> None:
    """List a folder; without --host, of the only host of the configuration."""
    with session.connected(host_name) as (fleet, host):
        found = fleet.list_shards(host.name, _whole(path, None if host.config.local else host.name)).result()
    if as_json:
        put_json(found)
        return
    for entry in found["entries"]:
        click.echo(f"{entry['kind']:<7} {entry['bytes']:>16,}  {entry['name']}")
    if found["truncated"]:
        click.echo(f"... only the first {len(found['entries'])} are shown")


@shards.command("show")
@click.argument("path")
@host_option
@json_option
@pass_session
def shards_show(session: Session, path: str, host_name: str | None, as_json: bool) -> None:
    """Show the tensors of a shard: keys, shapes, dtypes, bytes, and what is wrong with the file."""
    with session.connected(host_name) as (fleet, host):
        shard = fleet.show_shard(host.name, _whole(path, None if host.config.local else host.name)).result()
    put_json(shard) if as_json else click.echo("\n".join(show_lines(shard)))


shards.add_command(shards_audit)
