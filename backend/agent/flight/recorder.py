"""The recorder: a detached role of the agent that samples for as long as somebody may want to look.

It starts with a run, or when a console asks for it, and leaves a moment after the last run has ended and the last agent
of this user is gone. Whoever takes the lock is the one recorder of the host; a second one leaves at once.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any, Dict, List, Sequence

from backend.agent import ours, procfs
from backend.agent.files import read_json, write_json
from backend.agent.flight.columns import columns_of
from backend.agent.flight.events import Witness
from backend.agent.flight.place import flight_dir, take_lock
from backend.agent.flight.record import Record
from backend.agent.relay import RunsSource
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.agent.telemetry import TelemetrySource
from backend.agent.xid.source import XidSource
from backend.wire import RUN_LIVE, SCHEMA, Run, Telemetry
from backend.wire.flight import FlightEvent

LOOK_EVERY_S = 2.0
LINGER_S = 15.0
"""How long it goes on alone: memory comes back seconds after a run has ended."""

ABOUT = "about.json"


def record(machine: Machine) -> int:
    """Record until nobody needs it. Returns 0, also where another recorder is at it."""
    folder = flight_dir()
    lock = take_lock(folder)
    if lock is None:
        return 0
    os.chdir("/")  # keeps no filesystem busy
    mark = ours.register("recorder")
    try:
        Recorder(machine, folder).run()
    finally:
        ours.forget(mark)
        os.close(lock)
    return 0


class Recorder:
    """One recorder's life."""

    def __init__(self, machine: Machine, folder: str) -> None:
        self._folder = folder
        self._record = Record(folder)
        telemetry = TelemetrySource(machine)
        self._sources = (telemetry, XidSource(machine, telemetry), RunsSource(RunStore(machine)))
        self._witness = Witness(self._record.event, max(self._record.newest_at, time.time() - 60.0))
        self._runs: Dict[str, Run] = {}
        self._ended = False

    def run(self) -> None:
        """Sample and write until told to end, or until nobody has needed it for LINGER_S."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._begin()
        look_at, needed_at = 0.0, time.monotonic()
        try:
            while not self._ended:
                self._turn()
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + LOOK_EVERY_S
                    needed_at = now if self._needed() else needed_at
                    if now - needed_at > LINGER_S or not os.path.isdir(self._folder):
                        return
        finally:
            for source in self._sources:
                source.close()
            self._record.close()

    def _begin(self) -> None:
        """Say that recording (re)starts, and whether the host was restarted since."""
        path, boot = os.path.join(self._folder, ABOUT), procfs.boot_id()
        try:
            before = read_json(path)
        except (OSError, ValueError):
            before = None
        if isinstance(before, dict) and before.get("boot_id") != boot:
            self._record.event(FlightEvent(time.time(), "host", "bad", "the host was restarted"))
        try:
            write_json(path, {"schema": SCHEMA, "boot_id": boot, "pid": os.getpid(), "at": time.time()})
        except OSError:
            pass  # a full disk: the next recorder compares with an older boot

    def _end(self, number: int, frame: Any) -> None:
        self._ended = True

    def _turn(self) -> None:
        readers = [fd for source in self._sources for fd in source.filenos()]
        due = min(source.due() for source in self._sources)
        ready: Sequence[int] = []
        ready, _, _ = select.select(readers, [], [], max(0.0, min(due - time.monotonic(), LOOK_EVERY_S)))
        for source in reversed(self._sources):  # runs first, so that a row has their newest progress
            self._take(source.step(set(ready)))

    def _take(self, messages: List[Dict[str, Any]]) -> None:
        for message in messages:
            kind = message["t"]
            if kind == "telemetry":
                self._row(message["telemetry"])
            elif kind == "inventory":
                self._witness.inventory(message["inventory"])
            elif kind == "run":
                self._runs[message["run"].id] = message["run"]
                self._witness.run(message["run"])
            elif kind == "reset":
                self._witness.reset(message["run_id"], message["events"])
            elif kind == "xids":
                self._witness.xids(message["xids"])
            elif kind == "note":
                self._witness.note(message)

    def _row(self, telemetry: Telemetry) -> None:
        self._witness.telemetry(telemetry)
        self._record.append(telemetry.at, columns_of(telemetry, self._runs.values()))
        # A run that has ended is in one more row, the one that shows its end.
        self._runs = {run.id: run for run in self._runs.values() if run.state in RUN_LIVE}

    def _needed(self) -> bool:
        return bool(self._runs) or ours.role_lives("agent")
