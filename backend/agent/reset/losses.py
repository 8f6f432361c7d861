"""What the kill of a plan would lose, in words: hours of runs, samples that are not committed, time of others.

A run may lose without being killed: an extraction holds no GPU, and ends with the server that it asks.
"""

from __future__ import annotations

import time
import urllib.parse
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple

from backend.agent.listeners import listens
from backend.wire import RUN_LIVE, Process, Run

SERVER = "--server"
"""The word of an extraction's argv before the address of its server (backend/stages/extract.py)."""

LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def losses(killed: Dict[str, Run], victims: Sequence[Process], runs: Iterable[Run]) -> List[str]:
    """Say what is lost with the runs that are killed, with those that depend on a victim, and with other victims."""
    said = [_of_run(run) for _, run in sorted(killed.items())]
    said += ["%s, which asks a server that is killed" % _of_run(run) for run in _dependent(killed, victims, runs)]
    return said + list(_others(victims))


def _others(victims: Sequence[Process]) -> Iterator[str]:
    """Say what is lost that is no run of ours, in a line a user: a server has a process for each GPU."""
    by_user: Dict[str, List[Tuple[float, Process]]] = {}
    for one in victims:
        if not one.run_id and one.gpus and one.age_s is not None:
            by_user.setdefault(one.user, []).append((one.age_s, one))
    for user, members in sorted(by_user.items()):
        age_s, oldest = max(members, key=lambda member: member[0])
        if len(members) == 1:
            yield "%s of process %d (%s): %s" % (hours(age_s), oldest.pid, user, oldest.command[:60])
        else:
            text = "%s of %d processes (%s), the oldest %d: %s"
            yield text % (hours(age_s), len(members), user, oldest.pid, oldest.command[:60])


def _of_run(run: Run) -> str:
    text = "%s of run %s (%s)" % (hours(max(0.0, time.time() - run.started_at)), run.id, run.stage)
    if run.progress is not None and run.progress.samples_in_flight:
        text += ", %d uncommitted samples" % run.progress.samples_in_flight
    return text


def _dependent(killed: Dict[str, Run], victims: Sequence[Process], runs: Iterable[Run]) -> Iterator[Run]:
    """Find the live runs whose server is a victim: they go on for a moment, and fail."""
    for run in runs:
        number = _server_port(run.argv)
        if run.id in killed or run.state not in RUN_LIVE or not number:
            continue
        if listens(number, [one.pid for one in victims]):
            yield run


def _server_port(argv: Sequence[str]) -> int:
    """Return the port of this host that a run's server has; 0 where it names none here."""
    if SERVER not in argv[:-1]:
        return 0
    try:
        parts = urllib.parse.urlsplit(argv[list(argv).index(SERVER) + 1])
        return parts.port or 80 if parts.hostname in LOCAL else 0
    except ValueError:
        return 0


def hours(seconds: float) -> str:
    """Write a duration as the operator would say it: 40 s, 12 min, 5 h 12 min."""
    if seconds < 100:
        return "%.0f s" % seconds
    minutes = int(seconds // 60)
    return "%d h %02d min" % divmod(minutes, 60) if minutes >= 60 else "%d min" % minutes
