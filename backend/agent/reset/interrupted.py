"""A reset whose own process was killed still leaves a receipt: made afterwards from its journal.

Whoever next asks for receipts, or starts a reset, makes it. It says how far the reset went and claims nothing
about the GPUs: its verdict is UNKNOWN. The journal is then closed with that verdict, so that it is told once.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Dict, List

from backend.agent import procfs
from backend.agent.files import read_json, write_json
from backend.agent.paths import state_dir
from backend.agent.relay import read_events
from backend.agent.reset import receipt as receipts
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import RUN_ENDED, UNKNOWN, GpuVerdict, Receipt, Run

BEGUN = "begun.json"
"""What the receipt holds before the first signal: the plan that was agreed and what each GPU was."""

AGAIN = "reset the host again: it finds what is left"


def keep_begun(folder: str, receipt: Receipt) -> None:
    """Keep the beginning of a receipt in the reset's folder; on a full disk the journal has to do."""
    try:
        write_json(os.path.join(folder, BEGUN), receipt)
    except OSError:
        pass


def recover(machine: Machine) -> List[str]:
    """Make the receipt of every reset that ended without one. Returns their ids.

    That of a GPU reset waits for the end of its nvidia-smi, and puts back what it had left changed.
    """
    made = []
    for run in RunStore(machine).list():
        if run.stage != "reset" or run.state not in RUN_ENDED or receipts.stored(run.id):
            continue
        folder = os.path.join(state_dir("runs"), run.id)
        events = _events(folder)
        if not events or events[-1]["kind"] == "verdict":
            continue  # it was refused before it began, or its receipt was pruned
        said = _receipt(machine, run, folder, events)
        _end_torn_line(os.path.join(folder, receipts.JOURNAL))
        journal = receipts.Journal(folder, began_s_ago=events[-1]["at_s"])
        if not said.gpu_reset or _settled(machine, said, events, journal, folder):
            receipts.store(said)
            journal.write("verdict", "%s: interrupted %s" % (UNKNOWN, said.interrupted), verdict=UNKNOWN,
                          receipt=said.path, problem="")  # fmt: skip
            made.append(run.id)
        journal.close()
    return made


def _settled(
    machine: Machine, said: Receipt, events: List[Dict[str, Any]], journal: receipts.Journal, folder: str
) -> bool:
    from backend.agent.reset.gpureset.recovery import settle  # whose cycle keeps its beginning by this module

    return settle(machine, said, events, journal, folder)


def _events(folder: str) -> List[Dict[str, Any]]:
    """Read a journal whole; what is no event in it is left out."""
    found: List[Dict[str, Any]] = []
    offset, before = 0, -1
    while offset != before:
        before = offset
        some, offset = read_events(os.path.join(folder, receipts.JOURNAL), offset)
        found += [one for one in some if isinstance(one, dict) and "kind" in one and "at_s" in one]
    return found


def _end_torn_line(path: str) -> None:
    """End a line that the crash tore, so that what is appended is a line of its own."""
    try:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError:
        pass  # a full or read-only disk: the receipt is made again next time


def _receipt(machine: Machine, run: Run, folder: str, events: List[Dict[str, Any]]) -> Receipt:
    said = _begun(machine, run, folder)
    said.interrupted = _how_far(run, events)
    said.verdict = UNKNOWN
    said.durations["total"] = float(events[-1]["at_s"])
    said.signals = [_signal(one) for one in events if one["kind"] == "signal"]
    gone = {(one.get("data") or {}).get("pid") for one in events if one["kind"] == "gone"}
    victims = said.plan.victims if said.plan is not None else []
    asked = {one["pid"] for one in said.signals}
    said.killed = [one for one in victims if one.pid in gone & asked]  # some had ended before any signal
    said.survivors = [one for one in victims if procfs.alive(one.pid, one.start_ticks)]
    reason = "the reset was interrupted %s" % said.interrupted
    said.after = [GpuVerdict(one.index, one.uuid, UNKNOWN, reason, AGAIN, "eightzeros verify") for one in said.before]
    said.notes.append("interrupted %s; this receipt was made from its journal, %s" % (
        said.interrupted, os.path.join(folder, receipts.JOURNAL)))  # fmt: skip
    left = [one for one in victims if one not in said.killed and one not in said.survivors]
    if left:
        pids = " ".join(str(one.pid) for one in left)
        said.notes.append("gone since, by this reset or not: %s" % pids)
    if said.plan is not None:
        said.unseen = said.plan.unseen
    return said


def _begun(machine: Machine, run: Run, folder: str) -> Receipt:
    try:
        data = read_json(os.path.join(folder, BEGUN))
        if isinstance(data, dict):
            return receipts.read(data)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # spoilt by the crash: the journal alone has to do
    return Receipt(
        run.id, "reset", host=socket.gethostname(), virtual=machine.virtual, user=procfs.user_name(os.geteuid()),
        boot_id=run.boot_id, started_at=run.started_at,
    )  # fmt: skip


def _how_far(run: Run, events: List[Dict[str, Any]]) -> str:
    """Say where it was: the step, the last thing that it did in it, and how its process ended."""
    last = events[-1]
    phases = [str(one.get("text")) for one in events if one["kind"] == "phase"]
    text = "%.1f s after its start, at the step `%s`" % (float(last["at_s"]), phases[-1] if phases else "start")
    if last["kind"] != "phase":
        text += " after `%s`" % last.get("text")
    ended = run.reason or "its process ended with %s" % run.exit_code
    return "%s: %s" % (text, ended)


def _signal(event: Dict[str, Any]) -> Dict[str, Any]:
    data = event.get("data") or {}
    error = str(event.get("text")).partition(": ")[2]
    return {"at_s": event["at_s"], "pid": data.get("pid"), "signal": data.get("signal"), "error": error}
