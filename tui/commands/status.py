"""`eightzeros status` and `watch`: what every GPU and run is, once or every few seconds, as text or JSON."""

from __future__ import annotations

import time
from typing import Any

import click

from backend.config import Thresholds
from backend.fleet import Fleet, HostState, LinkState, badge
from backend.wire import GIB, LEAN, NOT_READ, SCHEMA, SLOW, Reading, Run, printable
from tui.commands.session import (
    FAILED,
    OK,
    READY_S,
    UNREACHABLE,
    Session,
    answers,
    complete_host,
    json_option,
    pass_session,
    put_json,
)

XIDS_SHOWN = 5
SLOW_WAIT_S = 20.0
"""How long `status` waits for the first slow readings: they follow the first lean ones (agent/telemetry.py)."""


def reading_json(reading: Reading) -> dict[str, Any]:
    """Write a reading so that a failure can never be taken for a number."""
    if reading.ok:
        return {"value": reading.value, "age_s": round(reading.age_s, 3)}
    if reading.unsupported:
        return {"unsupported": True}
    return {"failed": reading.problem, "age_s": round(reading.age_s, 3)}


def host_json(host: HostState, limits: Thresholds) -> dict[str, Any]:
    """Return all that is known of a host, for programs."""
    inventory, telemetry = host.inventory, host.telemetry
    return {
        "host": host.name,
        "link": {"state": str(host.link.state), "reason": host.link.reason, "code": host.link.code},
        "virtual": host.virtual,
        "hostname": host.hello.hostname if host.hello else None,
        "boot_id": host.hello.boot_id if host.hello else None,
        "driver": inventory.driver if inventory else None,
        "cuda": inventory.cuda if inventory else None,
        "problem": inventory.problem if inventory else host.link.reason,
        "at": telemetry.at if telemetry else None,
        "host_load": telemetry.host if telemetry else None,
        "xids": host.xids,
        "xids_gap": host.xids_gap or "",
        "gpus": [gpu_json(host, index, limits) for index in host.gpu_indices],
        "runs": sorted(host.runs.values(), key=lambda run: run.started_at, reverse=True),
    }


def gpu_json(host: HostState, index: int, limits: Thresholds) -> dict[str, Any]:
    """Return one GPU's facts, readings, holders and badge."""
    facts, sample, mark = host.facts(index), host.sample(index), badge(host, index, limits)
    assert facts is not None
    return {
        "index": index,
        "uuid": facts.uuid,
        "name": facts.name,
        "bus_id": facts.bus_id,
        "badge": {"word": mark.word, "level": mark.level, "detail": mark.detail},
        "problem": sample.problem or facts.problem,
        "readings": {name: reading_json(host.reading(index, name)) for name in (*LEAN, *SLOW)},
        "holders": [{**vars(holder), "used_bytes": reading_json(holder.used_bytes)} for holder in sample.holders],
    }


def _shown(reading: Reading, unit: str, scale: float = 1.0, places: int = 0) -> str:
    number = reading.number()
    if number is not None:
        return f"{number / scale:.{places}f}{unit}"
    return "n/a" if reading.unsupported else "failed"


def host_lines(host: HostState, limits: Thresholds) -> list[str]:
    """Write a host as plain lines of text."""
    inventory = host.inventory
    head = f"{host.name}  {host.link.state}" + ("  VIRTUAL" if host.virtual else "")
    if inventory and inventory.driver:
        head += f"  driver {inventory.driver}  CUDA {inventory.cuda}"
    lines = [head]
    problem = (inventory.problem if inventory else "") or (host.link.reason if not inventory else "")
    lines += [f"  {problem}"] if problem else []
    for index in host.gpu_indices:
        lines.append(gpu_line(host, index, limits))
    return lines + xid_lines(host) + [run_line(run) for run in host.live_runs()]


def xid_lines(host: HostState) -> list[str]:
    """Write the newest XIDs of a host, and why some may not be known."""
    said = [xid for xid in host.xids if xid.level != "info"]
    lines = [f"  {sum(xid.count for xid in said[:-XIDS_SHOWN])} earlier XIDs"] if said[:-XIDS_SHOWN] else []
    for xid in said[-XIDS_SHOWN:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(xid.at))
        lines.append("  " + printable(f"{at}  {xid.in_words()}; {xid.advice}", 500))
    return lines + ([f"  {host.xids_gap}"] if host.xids_gap else [])


def gpu_line(host: HostState, index: int, limits: Thresholds) -> str:
    """Write a GPU as one line."""

    def shown(name: str, unit: str, scale: float = 1.0, places: int = 0) -> str:
        return _shown(host.reading(index, name), unit, scale, places)

    mark = badge(host, index, limits)
    memory = f"{shown('memory_used_bytes', '', GIB, 1):>6} / {shown('memory_total_bytes', ' GiB', GIB, 1):<10}"
    load = f"{shown('utilisation_percent', ' %'):>6} {shown('temperature_c', ' °C'):>7} {shown('power_w', ' W'):>7}"
    line = f"  {index}  {mark.word:<8} {memory} {load} {shown('sm_clock_mhz', ' MHz'):>9}  {_holders(host, index)}"
    return line + (f"  {mark.detail}" if mark.detail else "")


def _holders(host: HostState, index: int) -> str:
    holders = host.sample(index).holders
    if not holders:
        return "-"
    first = holders[0]
    more = f" +{len(holders) - 1}" if len(holders) > 1 else ""
    return f"{first.pid} {first.user} {first.command[:40]}{'' if first.alive else '(gone)'}{more}"


def run_line(run: Run) -> str:
    """Write a run as one line."""
    line = f"  {run.id}  {run.stage}  {run.state}" + ("" if run.exit_code is None else f" {run.exit_code}")
    progress = run.progress
    if progress and progress.steps_done:
        of = f"/{progress.steps_total}" if progress.steps_total else ""
        line += f"  step {progress.steps_done}{of}" + ("" if progress.loss is None else f"  loss {progress.loss:.4g}")
        eta = progress.eta_s() if progress.steps_total else None
        line += f"  {progress.tokens_per_s:.0f} tok/s" + (f"  ETA {eta:.0f} s" if eta is not None else "")
    elif progress and progress.samples_total:
        eta = progress.eta_s()
        line += f"  {progress.samples_done}/{progress.samples_total} samples  {progress.tokens_per_s:.0f} tok/s"
        line += f"  {progress.bytes_written / GIB:.2f} GiB" + (f"  ETA {eta:.0f} s" if eta is not None else "")
    return line + (f"  {run.reason}" if run.reason else "")


def fleet_json(fleet: Fleet) -> dict[str, Any]:
    """Return every host, for programs."""
    limits = fleet.config.thresholds
    return {"schema": SCHEMA, "hosts": [host_json(host, limits) for host in fleet.hosts.values()]}


def fleet_text(fleet: Fleet) -> str:
    """Write every host as text."""
    return "\n".join(line for host in fleet.hosts.values() for line in host_lines(host, fleet.config.thresholds))


def _settled(host: HostState) -> bool:
    """Say whether a host has told all: its slow readings too, or that there are none."""
    if host.link.state is LinkState.REFUSED or (host.inventory and not host.inventory.gpus):
        return True
    slow = [host.reading(index, SLOW[0]) for index in host.gpu_indices]
    return bool(slow) and all(reading != NOT_READ for reading in slow)


def _wait(fleet: Fleet) -> None:
    """Wait for every host together; one that does not answer is shown as what it is."""
    waits = [fleet.ready(name, READY_S) for name in fleet.hosts]
    for wait in waits:
        try:
            wait.result()
        except TimeoutError:
            continue
    live = [host for host in fleet.hosts.values() if host.telemetry]
    try:
        fleet.wait(lambda: all(_settled(host) for host in live) or None, SLOW_WAIT_S).result()
    except TimeoutError:
        return  # what was not read says so itself


def _exit_code(fleet: Fleet) -> int:
    hosts = list(fleet.hosts.values())
    if any(host.link.state in (LinkState.REFUSED, LinkState.LOST) or not host.inventory for host in hosts):
        return UNREACHABLE
    return FAILED if any(host.inventory and host.inventory.problem for host in hosts) else OK


@click.command()
@click.option("--host", "host_name", metavar="NAME", help="Only this host.", shell_complete=complete_host)
@json_option
@pass_session
@click.pass_context
def status(context: click.Context, session: Session, host_name: str | None, as_json: bool) -> None:
    """Show every host's GPUs and runs once."""
    config = session.only(host_name) if host_name else session.config()
    with Fleet(config) as fleet, answers():
        _wait(fleet)
        if as_json:
            put_json(fleet_json(fleet))
        else:
            click.echo(fleet_text(fleet))
        code = _exit_code(fleet)
    context.exit(code)


@click.command()
@click.option("--host", "host_name", metavar="NAME", help="Only this host.", shell_complete=complete_host)
@click.option("--every", "every_s", type=click.FloatRange(0.5), default=2.0, show_default=True, help="Seconds.")
@json_option
@pass_session
def watch(session: Session, host_name: str | None, every_s: float, as_json: bool) -> None:
    """Print the hosts again and again, as plain text or one JSON object a time, until interrupted."""
    config = session.only(host_name) if host_name else session.config()
    with Fleet(config) as fleet, answers():
        _wait(fleet)
        while True:
            if as_json:
                put_json(fleet_json(fleet))
            else:
                click.echo(time.strftime("%H:%M:%S") + "\n" + fleet_text(fleet))
            time.sleep(every_s)
