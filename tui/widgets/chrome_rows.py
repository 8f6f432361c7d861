"""The rows around the hosts: the head, the GPU in focus, the events and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.fleet import LinkState, badge
from backend.wire import RUN_LIVE
from tui import format
from tui.actions import ACTIONS
from tui.widgets.rows import clean, pad, spread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from backend.config import Thresholds
    from backend.fleet import Event, HostState
    from tui.widgets.rows import Row, Run

EVENT_LEVELS = {"info": "dim", "warn": "warn", "bad": "bad"}


def head_row(hosts: Collection[HostState], limits: Thresholds, width: int, now: float, paused: bool) -> Row:
    """Make the top line: how many hosts and GPUs are well, what is not, and the time."""
    left: list[Run] = [("accent", "eightzeros"), ("text", "  ")]
    badges = [badge(host, index, limits) for host in hosts for index in host.gpu_indices]
    live = sum(host.link.state is LinkState.LIVE for host in hosts)
    runs = sum(run.state in RUN_LIVE for host in hosts for run in list(host.runs.values()))
    fine = sum(item.level == "ok" for item in badges)
    left += [
        (
            "text" if live == len(hosts) else "bad",
            f"{live} of {len(hosts)} host{'s' * (len(hosts) != 1)} live",
        )
    ]
    left += [("faint", " · "), ("ok" if fine == len(badges) else "text", f"{fine} of {len(badges)} GPUs OK")]
    for level in ("bad", "unknown", "warn"):
        words = sorted({item.word for item in badges if item.level == level})
        for word in words:
            left += [("faint", " · "), (level, f"{sum(item.word == word for item in badges)} {word}")]
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
        return pad([("dim", f"{name}  "), ("unknown", clean(host.link.reason or host.link.state))], width)
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
    """Make the line of keys; `extra` are the screen's own, before the general ones, as (key, what it does)."""
    keys = [*extra, *((action.key, action.label.lower()) for action in ACTIONS if action.footer)]
    left: list[Run] = []
    for key, label in keys:
        left += [("key", key), ("dim", f" {label}   ")]
    return spread(left, [("dim", "on "), ("accent", clean(host))] if host else [], width)
