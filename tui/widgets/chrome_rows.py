"""The rows around the hosts: the head, the GPU in focus, the events and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.fleet import LinkState, badge
from backend.wire import RUN_LIVE
from tui import format
from tui.actions import ACTIONS
from tui.widgets.rows import clean, pad, row_width, spread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from backend.config import Thresholds
    from backend.fleet import Event, HostState
    from tui.widgets.rows import Row, Run

EVENT_LEVELS = {"info": "dim", "warn": "warn", "bad": "bad"}


def head_row(hosts: Collection[HostState], limits: Thresholds, width: int, now: float, paused: bool) -> Row:
    """Make the top line: how many hosts and GPUs are well, what is not, and the time."""
    left: list[Run] = [("accent", "eightzeros"), ("text", "  ")]
    live = [host for host in hosts if host.link.state in (LinkState.LIVE, LinkState.STALE)]
    badges = [badge(host, index, limits) for host in live for index in host.gpu_indices]
    gpus = sum(len(host.gpu_indices) for host in hosts)
    runs = sum(run.state in RUN_LIVE for host in hosts for run in list(host.runs.values()))
    fine = sum(item.level == "ok" for item in badges)
    said = f"{len(live)} of {len(hosts)} host{'s' * (len(hosts) != 1)} live"
    left.append(("text" if len(live) == len(hosts) else "bad", said))
    if gpus:
        left += [("faint", " · "), ("ok" if fine == gpus else "text", f"{fine} of {gpus} GPUs OK")]
    for level in ("bad", "unknown", "warn"):
        for word in sorted({item.word for item in badges if item.level == level}):
            count = sum(item.word == word and item.level == level for item in badges)
            left += [("faint", " · "), (level, f"{count} {word}")]
    if gpus > len(badges):
        left += [("faint", " · "), ("unknown", f"{gpus - len(badges)} not seen")]
    if runs:
        left += [("faint", " · "), ("text", f"{runs} run{'s' * (runs != 1)}")]
    tail: list[Run] = [("warn-fill", " PAUSED "), ("text", " ")] if paused else []
    return spread(left, [*tail, ("dim", format.clock(now))], width)


def focus_row(host: HostState | None, index: int | None, limits: Thresholds, width: int) -> Row:
    """Make the line about the GPU in focus: what its badge means, or who holds it."""
    if host is None:
        return pad([("dim", "no host in the configuration")], width)
    name = clean(host.name)
    if index is None:
        hint = host.link.hint or ("C shows the key" if host.link.host_key else "")
        said = f"{clean(host.link.reason or host.link.state)}{f' ({clean(hint)})' if hint else ''}"
        return pad([("accent", f"{name}  "), ("text", said)], width)
    found = badge(host, index, limits)
    head: list[Run] = [("accent", f"{name} / {index}"), ("text", "  ")]
    if found.level != "ok":
        hint = f" ({clean(host.link.hint)})" if host.link.hint else ""
        return pad([*head, (found.level, found.word), ("text", f"  {clean(found.detail)}{hint}")], width)
    holders = host.sample(index).holders
    if not holders:
        return pad([*head, ("dim", "nothing holds it")], width)
    for holder in sorted(holders, key=lambda item: -(item.used_bytes.number() or 0)):
        used = holder.used_bytes.number()
        amount = format.size(used) if used is not None else format.reading(holder.used_bytes)
        head += [
            ("text", f"{holder.pid} {clean(holder.user)}"),
            ("dim", f" {amount}  {clean(holder.command)}   "),
        ]
    return pad(head, width)


def event_rows(events: Iterable[Event], many_hosts: bool) -> list[Row]:
    """Make the event log, oldest first; the host is named where there are several."""
    rows: list[Row] = []
    for event in events:
        style = EVENT_LEVELS.get(event.level, "dim")
        host: tuple[Run, ...] = (("dim", f"{clean(event.host)}  "),) if many_hosts else ()
        text = ("text" if style == "dim" else style, clean(event.text))
        rows.append((("faint", f"{format.clock(event.at)}  "), *host, text))
    return rows


def foot_row(width: int, extra: Sequence[tuple[str, str]] = (), host: str = "") -> Row:
    """Make the line of keys; a screen with keys of its own, as (key, what it does), names only the way out beside."""
    general = [action for action in ACTIONS if action.footer and (not extra or action.id in ("help", "quit"))]
    keys = [*extra, *((action.key, action.label.lower()) for action in general)]
    tail: list[Run] = [("dim", "on "), ("accent", clean(host))] if host else []
    room = width - row_width(tuple(tail)) - 1
    left: list[Run] = []
    for key, label in keys:
        part: list[Run] = [("key", key), ("dim", f" {label}   ")]
        if row_width(tuple(left + part)) <= room + 3:
            left += part
    return spread(left, tail, width)
