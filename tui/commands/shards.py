"""`shards list`, `show`, `repair` and `audit`: what is in a file, here or on a host, without torch."""

from __future__ import annotations

import os
from typing import Any

import click

from tui.commands.audit import shards_audit
from tui.commands.session import Session, host_option, json_option, pass_session, put_json


def show_lines(shard: dict[str, Any]) -> list[str]:
    """Write a shard as plain lines of text."""
    lines = [f"{shard['path']}  {shard['format']}  {shard['bytes']:,} bytes"]
    told = {tensor["key"]: tensor for tensor in (shard.get("statistics") or {}).get("tensors", ())}
    for entry in shard["entries"]:
        lines.append(_tensor_line(entry))
        lines += _value_lines(told[entry["key"]]) if entry["key"] in told else []
    if shard["truncated"]:
        lines.append(f"  ... {len(shard['entries'])} of {shard['tensors']} tensors are listed")
    lines += [f"  {value['key']} = {value['text']}" for value in shard["values"]]
    return lines + [f"  {note['level']} {note['code']}: {note['text']}" for note in shard["notes"]]


def _tensor_line(entry: dict[str, Any]) -> str:
    shape = " x ".join(map(str, entry["shape"])) or "scalar"
    size = "      of unknown size" if entry["bytes"] is None else f"{entry['bytes']:>14,} bytes"
    words = [] if entry["contiguous"] or entry["stride"] is None else [f"strides {entry['stride']}"]
    words += [f"storage {entry['storage']}"] if entry["storage"] not in ("", entry["key"]) else []
    words += [entry["note"]] if entry["note"] else []
    words += [] if entry["whole"] else ["NOT WHOLE"]
    line = f"  {entry['key']:<28} {entry['dtype']:<10} {shape:<22} {size}"
    return line + (f"  {', '.join(words)}" if words else "")


def _value_lines(told: dict[str, Any]) -> list[str]:
    if told["problem"]:
        return [f"      values not read: {told['problem']}"]
    peek = " ".join([*map(_number, told["first"]), *(["..."] if told["last"] else []), *map(_number, told["last"])])
    line = f"min {_number(told['min'])}  max {_number(told['max'])}  mean {_number(told['mean'])}"
    line += f"  norm {_number(told['norm'])}  NaN {told['nan']:,}  Inf {told['inf']:,}"
    rows = f"  zero rows {told['zero_rows']:,} of {told['rows']:,}" if told["rows"] else ""
    return [f"      {peek}", f"      {line}{rows}  ({told['read_bytes']:,} bytes read)"]


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


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
@click.option("--values", is_flag=True, help="Peek at values, and their statistics over a sample of each tensor.")
@click.option("--all", "all_values", is_flag=True, help="Statistics over every value.")
@click.option("--tensor", "only", default="", metavar="KEY", help="Values of this tensor alone; * stands for any text.")
@click.option("--deep", is_flag=True, help="Read every byte: checksums, lost pages.")
@host_option
@json_option
@pass_session
def shards_show(
    session: Session, path: str, values: bool, all_values: bool, only: str, deep: bool, host_name: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the tensors of a shard: keys, shapes, dtypes, bytes, and what is wrong with the file.

    Ends with 1 where something is wrong with it.
    """
    values = values or all_values or bool(only)
    with session.connected(host_name) as (fleet, host):
        whole = _whole(path, None if host.config.local else host.name)
        if deep or all_values:
            shard = fleet.scan_shard(host.name, whole, deep, values, only, all_values).result()
        else:
            shard = fleet.show_shard(host.name, whole, values, only).result()
    put_json(shard) if as_json else click.echo("\n".join(show_lines(shard)))
    if not shard["ok"]:
        raise SystemExit(1)


@shards.command("repair")
@click.argument("path")
@click.option("--out", required=True, metavar="COPY", help="The mended copy; nothing is overwritten.")
@host_option
@json_option
@pass_session
def shards_repair(session: Session, path: str, out: str, host_name: str | None, as_json: bool) -> None:
    """Write a mended copy of a torch file that lost its end, where every tensor is whole."""
    with session.connected(host_name) as (fleet, host):
        name = None if host.config.local else host.name
        done = fleet.repair_shard(host.name, _whole(path, name), _whole(out, name)).result()
    if as_json:
        put_json(done)
        return
    click.echo(f"{done['out']}: tensors: {done['tensors']}, {done['bytes']:,} bytes, {done['lost_bytes']:,} made anew")
    for note in done["notes"]:
        click.echo(f"  {note['level']} {note['code']}: {note['text']}")


shards.add_command(shards_audit)
