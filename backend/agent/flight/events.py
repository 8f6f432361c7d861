"""What happened on a host, as lines of JSON: told by the messages that a console would get, kept in two files."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

from backend.wire import CLEAN, LIMITED, RUN_LIVE, Inventory, Run, Telemetry, Xid, from_dict, printable
from backend.wire.flight import FlightEvent

CURRENT, BEFORE = "events.jsonl", "events.before.jsonl"
MOST_BYTES = 4 << 20
PAGE_BYTES = 180 * 1024
LONGEST_TEXT = 1000


class EventLog:
    """Appends events; the older of two files goes when the newer is full."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def append(self, event: FlightEvent) -> None:
        """Write one event. Raises OSError where the disk takes nothing."""
        event.text = printable(event.text, LONGEST_TEXT)
        path = os.path.join(self._folder, CURRENT)
        line = json.dumps(vars(event)).encode("ascii") + b"\n"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            before = os.fstat(fd).st_size
            torn = before and os.pread(fd, 1, before - 1) != b"\n"
            try:
                os.write(fd, b"\n" + line if torn else line)
            except OSError:
                os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)
        if before + len(line) > MOST_BYTES:
            os.replace(path, os.path.join(self._folder, BEFORE))


def read_events(folder: str, start: float, end: float, skip: int = 0) -> Dict[str, Any]:
    """Return {events, next}: what happened between two times, from number `skip` on; next None at the end."""
    page: List[FlightEvent] = []
    size, number = 0, 0
    for event in _all(folder):
        if not start <= event.at <= end:
            continue
        number += 1
        if number <= skip:
            continue
        size += len(event.text) * 6 + 200  # a character may become six in JSON
        if size > PAGE_BYTES:
            return {"events": page, "next": number - 1}
        page.append(event)
    return {"events": page, "next": None}


def _all(folder: str) -> Iterator[FlightEvent]:
    for name in (BEFORE, CURRENT):
        try:
            with open(os.path.join(folder, name), "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                event = from_dict(FlightEvent, json.loads(line))
                yield FlightEvent(float(event.at), str(event.kind), str(event.level), str(event.text), str(event.run),
                                  event.gpu if isinstance(event.gpu, int) else None)  # fmt: skip
            except (ValueError, TypeError, AttributeError):
                continue  # torn by a crash


class Witness:
    """Makes events of what a console would be told: GPUs that fail and come back, runs, resets, notes."""

    def __init__(self, told: Callable[[FlightEvent], None], since: float) -> None:
        self._told, self._since = told, since
        self._problems: Dict[int, str] = {}
        self._errors: Dict[int, float] = {}
        self._driver = ""
        self._states: Dict[str, str] = {}

    def telemetry(self, telemetry: Telemetry) -> None:
        """Tell of GPUs that stopped or began to answer, and of new uncorrected memory errors."""
        for gpu in telemetry.gpus:
            if bool(gpu.problem) != bool(self._problems.get(gpu.index)):
                level, text = ("bad", gpu.problem) if gpu.problem else ("info", "answers again")
                self._tell("gpu", level, "GPU %d: %s" % (gpu.index, text), gpu=gpu.index)
            self._problems[gpu.index] = gpu.problem
            reading = gpu.readings.get("ecc_uncorrected")
            errors = reading.number() if reading is not None else None
            before = self._errors.get(gpu.index)
            if errors is not None and before is not None and errors > before:
                text = "GPU %d: %d new uncorrected memory errors" % (gpu.index, errors - before)
                self._tell("gpu", "bad", text, gpu=gpu.index)
            if errors is not None:
                self._errors[gpu.index] = errors

    def xids(self, xids: List[Xid]) -> None:
        """Tell of errors that the driver told; those of before `since` are no news."""
        for one in xids:
            if one.at > self._since:
                self._tell("gpu", one.level, one.in_words(), gpu=one.gpu, at=one.at)

    def inventory(self, inventory: Inventory) -> None:
        """Tell of a driver that cannot be used."""
        if inventory.problem and inventory.problem != self._driver:
            self._tell("driver", "bad", inventory.problem)
        self._driver = inventory.problem

    def run(self, run: Run) -> None:
        """Tell of a run that began, changed its state or ended; what was so before `since` is no news."""
        before, self._states[run.id] = self._states.get(run.id), run.state
        live = run.state in RUN_LIVE
        at = run.started_at if live and before is None else time.time() if live else run.ended_at
        if before == run.state or (before is None and at <= self._since):
            return
        name = run.label or run.stage
        if live:
            self._tell("run", "info", "%s %s (%s)" % (name, run.state, run.id), run=run.id, at=at)
            return
        good = run.state == "exited" and run.exit_code == 0
        said = "done" if good else run.state + (" with %d" % run.exit_code if run.exit_code is not None else "")
        text = "%s %s%s (%s)" % (name, said, ": " + run.reason if run.reason else "", run.id)
        self._tell("run", "info" if good else "bad", text, run=run.id, at=at)

    def reset(self, run_id: str, events: List[Dict[str, Any]]) -> None:
        """Tell a reset's verdict."""
        for event in events:
            if isinstance(event, dict) and event.get("kind") == "verdict":
                word = (event.get("data") or {}).get("verdict")
                text = "reset: %s" % event.get("text")
                self._tell("reset", "info" if word in (CLEAN, LIMITED) else "bad", text, run=run_id)

    def note(self, message: Dict[str, Any]) -> None:
        """Keep a note that the console would show."""
        level = message.get("level")
        self._tell("host", level if level in ("info", "warn", "bad") else "info", str(message.get("text")))

    def _tell(
        self, kind: str, level: Any, text: str, run: str = "", gpu: Optional[int] = None, at: Optional[float] = None
    ) -> None:
        self._told(FlightEvent(time.time() if at is None else at, kind, str(level), text, run, gpu))
