"""A store of real runs in the test's own folder; what still runs at the end is killed by identity."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backend.agent import procfs, runtree
from backend.agent.devices import NvidiaDevices
from backend.agent.runs import RunStore
from backend.agent.seam import Driver, Machine
from backend.wire import RUN_ENDED, Run, RunSpec
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

RELAUNCH = str(Path(__file__).with_name("relaunch.py"))


def machine(*relaunch: str) -> Machine:
    """Return a machine whose runs are supervised by tests/relaunch.py, or by the given words."""
    return Machine(Driver, NvidiaDevices, list(relaunch) or [sys.executable, RELAUNCH])


def a_store(root: Path) -> Iterator[RunStore]:
    """Give a store; for a fixture."""
    store = RunStore(machine(), str(root))
    yield store
    for run in store.list():
        kill_all(store, run)


def kill_all(store: RunStore, run: Run) -> None:
    """Leave nothing of a run behind."""
    until(lambda: not any([runtree.signal_process(*one, signal.SIGKILL) for one in store.members(run.id)]))
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))


def spec(run_id: str, *argv: str, **fields: object) -> RunSpec:
    """Make a spec of a test's stage."""
    return RunSpec(run_id, "test", list(argv), **fields)  # type: ignore[arg-type]


def shell(run_id: str, script: str, **fields: object) -> RunSpec:
    """Make a spec that runs a shell script."""
    return spec(run_id, "sh", "-c", script, **fields)


def ended(store: RunStore, run_id: str, timeout_s: float = 15.0) -> Run:
    """Wait until a run has ended and return it."""

    def over() -> Run | None:
        run = store.get(run_id)
        return run if run is not None and run.state in RUN_ENDED else None

    run = until(over, timeout_s)
    assert run is not None
    return run


def logged(store: RunStore, run_id: str, text: str) -> None:
    """Wait until a run's log holds a text."""
    until(lambda: text in str(store.log(run_id, 0, 40_000)))
