"""From a host's messages to its state: what arrives is checked, kept as the newest value, and told as events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from backend.fleet.state import XIDS_KEPT, Event, HostState, ResetState, host_event
from backend.link.status import LinkState, LinkStatus
from backend.wire import RUN_LIVE, Hello, Inventory, ResetEvent, Run, Telemetry, Xid, printable

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS = ("info", "warn", "bad")


class Feed:
    """The one writer of a HostState.

    `told` is called after each change, with the event where there is one; `reset_seen` with the id of a reset that
    runs, whoever started it, so that its receipt is fetched at its end.
    """

    def __init__(
        self, host: HostState, told: Callable[[Event | None], None], reset_seen: Callable[[str], None]
    ) -> None:
        self._host, self._told, self._reset_seen = host, told, reset_seen
        self._takes: dict[str, Callable[[dict[str, Any]], None]] = {
            "hello": self._hello,
            "inventory": self._inventory,
            "telemetry": self._telemetry,
            "run": self._run,
            "reset": self._reset,
            "note": self._note,
            "xids": self._xids,
        }

    def message(self, message: dict[str, Any]) -> None:
        """Take one message. One that does not fit its record is told as a note and changes nothing."""
        take = self._takes.get(str(message.get("t")))
        if take is None:
            return
        try:
            take(message)
        except (msgspec.ValidationError, KeyError) as error:
            self._event("warn", f"a {message.get('t')} message was not understood: {error}")
            return
        self._host.revision += 1
        self._told(None)

    def status(self, status: LinkStatus) -> None:
        """Take the link's new state."""
        before, self._host.link = self._host.link, status
        if status.state is not before.state:
            calm = status.state in (LinkState.CONNECTING, LinkState.BOOTSTRAPPING, LinkState.IDLE)
            bad = status.state in (LinkState.LOST, LinkState.REFUSED)
            if not calm:
                text = f"{status.state}" + (f": {status.reason}" if status.reason else "")
                self._event("bad" if bad else "warn" if status.state is LinkState.STALE else "info", text)
        self._host.revision += 1
        self._told(None)

    def _hello(self, message: dict[str, Any]) -> None:
        hello = msgspec.convert(message["hello"], Hello)
        if self._host.hello and self._host.hello.boot_id != hello.boot_id:
            self._event("bad", "the host was restarted")
        self._host.hello = hello

    def _inventory(self, message: dict[str, Any]) -> None:
        inventory = msgspec.convert(message["inventory"], Inventory)
        before, self._host.inventory = self._host.inventory, inventory
        if inventory.problem and (before is None or before.problem != inventory.problem):
            self._event("bad", inventory.problem)

    def _telemetry(self, message: dict[str, Any]) -> None:
        telemetry = msgspec.convert(message["telemetry"], Telemetry)
        before = {gpu.index: gpu.problem for gpu in (self._host.telemetry.gpus if self._host.telemetry else [])}
        self._host.telemetry, self._host.received_at = telemetry, time.monotonic()
        self._host.remember(telemetry)
        for gpu in telemetry.gpus:
            if bool(gpu.problem) != bool(before.get(gpu.index, "")):
                self._event("bad" if gpu.problem else "info", f"GPU {gpu.index}: {gpu.problem or 'answers again'}")

    def _run(self, message: dict[str, Any]) -> None:
        run = msgspec.convert(message["run"], Run)
        before = self._host.runs.get(run.id)
        self._host.runs[run.id] = run
        if before is None or before.state != run.state:
            self._event(*_run_event(run))
            if run.stage == "reset" and run.state in RUN_LIVE:
                self._reset_seen(run.id)

    def _reset(self, message: dict[str, Any]) -> None:
        events = msgspec.convert(message["events"], list[ResetEvent])
        if self._host.reset.run_id != message["run_id"]:  # another console's, or ours from before
            self._host.reset = ResetState(running=True, started_at=time.time(), run_id=message["run_id"])
        known = {(event.at_s, event.text) for event in self._host.reset.events}
        self._host.reset.events += [event for event in events if (event.at_s, event.text) not in known]

    def _note(self, message: dict[str, Any]) -> None:
        level = message.get("level") if message.get("level") in LEVELS else "info"
        self._event(str(level), printable(str(message["text"]), 500))

    def _xids(self, message: dict[str, Any]) -> None:
        """Tell of each new error; of those that the host had before this console first saw it, in one line."""
        found = msgspec.convert(message["xids"], list[Xid])
        known = {xid.id for xid in self._host.xids}
        fresh = [xid for xid in found if xid.id not in known]
        before, self._host.xids_gap = self._host.xids_gap, printable(str(message.get("gap") or ""), 500)
        old = bool(message.get("first")) and before is None
        self._host.xids = [*self._host.xids, *fresh][-XIDS_KEPT:]
        if old:
            self._old_xids([xid for xid in fresh if xid.level != "info"])
        for xid in [] if old else fresh:
            advice = f"; {xid.advice}" if xid.advice and xid.level == "bad" else ""
            level = xid.level if xid.level in LEVELS else "warn"
            self._event(level, printable(xid.in_words() + advice, 500))
        if self._host.xids_gap and self._host.xids_gap != before:
            self._event("info", self._host.xids_gap)

    def _old_xids(self, xids: list[Xid]) -> None:
        if xids:
            worst = "bad" if any(xid.level == "bad" for xid in xids) else "warn"
            count = sum(xid.count for xid in xids)
            newest = next((xid for xid in reversed(xids) if xid.level == worst), xids[-1])
            self._event(worst, printable(f"{count} XIDs in the kernel's log since boot; {newest.in_words()}", 500))

    def _event(self, level: str, text: str) -> None:
        self._told(host_event(self._host, level, text))


def _run_event(run: Run) -> tuple[str, str]:
    """Say in words what became of a run, and how bad that is."""
    name = run.label or run.stage
    if run.state in RUN_LIVE:
        return "info", f"{name} {run.state} ({run.id})"
    good = run.state == "exited" and run.exit_code == 0
    ended = "done" if good else f"{run.state}" + (f" with {run.exit_code}" if run.exit_code is not None else "")
    return ("info" if good else "bad"), f"{name} {ended}" + (f": {run.reason}" if run.reason else "") + f" ({run.id})"
