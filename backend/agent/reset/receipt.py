"""Evidence: the journal of a reset, written line by line as it goes, and the receipt at its end.

Neither may stop a reset. On a full disk the events are kept in memory, the verdict is still given, and it
says that it could not be written.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Any, Dict, List, Optional

from backend.agent.files import read_json, write_json
from backend.agent.paths import state_dir
from backend.wire import (
    SCHEMA,
    GpuVerdict,
    Leftover,
    Plan,
    Process,
    Reading,
    Receipt,
    Refused,
    ResetEvent,
    encode,
    from_dict,
)

JOURNAL = "journal.jsonl"
MEMORY = "/dev/shm"
PLAN_KEPT_S = 24 * 3600.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Journal:
    """A reset's events: each line is on disk before the next thing happens. Times are seconds since its
    start; one that is taken up again later goes on after its last."""

    def __init__(self, folder: Optional[str], began_s_ago: float = 0.0) -> None:
        self.began = time.monotonic() - began_s_ago
        self.events: List[ResetEvent] = []
        self.problem = ""
        self._fd = -1
        if folder is not None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(os.path.join(folder, JOURNAL), flags, 0o600)
            except OSError as error:
                self.problem = "the journal could not be written: %s" % error

    def now_s(self) -> float:
        """Return the seconds since the reset began."""
        return round(time.monotonic() - self.began, 4)

    def write(self, kind: str, text: str, **data: Any) -> ResetEvent:
        """Add an event and sync it to disk."""
        event = ResetEvent(self.now_s(), kind, text, data)
        self.events.append(event)
        if self._fd >= 0:
            try:
                os.write(self._fd, encode(event))
                os.fsync(self._fd)
            except OSError as error:
                self.problem = self.problem or "the journal could not be written: %s" % error
        return event

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def path_of(receipt_id: str) -> str:
    """Return where a receipt lies. Raises Refused on an id that is no file name."""
    if not _ID.match(receipt_id):
        raise Refused("bad-request", "`%s` is no id of a receipt" % receipt_id, "list them: eightzeros receipts")
    return os.path.join(state_dir("receipts"), receipt_id + ".json")


def spare_folder() -> str:
    """Return a folder in memory for what a full disk does not take; empty where it is not this user's own."""
    folder = os.path.join(MEMORY, "eightzeros-%d" % os.geteuid())
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return ""
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else ""


def store(receipt: Receipt) -> str:
    """Write a receipt and return an empty string, or why it could not be written where it belongs.

    On a full disk it goes to memory, where `load` finds it until the host restarts.
    """
    receipt.path = wanted = path_of(receipt.id)
    try:
        write_json(receipt.path, receipt)
        return ""
    except OSError as error:
        problem = "the receipt could not be written to %s: %s" % (wanted, error.strerror or error)
    receipt.notes.append(problem)
    folder = spare_folder()
    receipt.path = os.path.join(folder, os.path.basename(wanted)) if folder else ""
    try:
        if folder:
            write_json(receipt.path, receipt)
    except OSError:
        receipt.path = ""
    return problem


def load(receipt_id: str) -> Receipt:
    """Read a receipt. Raises Refused where there is none or it cannot be read."""
    path = path_of(receipt_id)
    try:
        data = read_json(path)
        if data is None:
            data = read_json(os.path.join(spare_folder() or "/nonexistent", os.path.basename(path)))
    except (OSError, ValueError) as error:
        raise Refused("bad-receipt", str(error)) from None
    if not isinstance(data, dict):
        text = "there is no receipt `%s` on this host" % receipt_id
        raise Refused("not-found", text, "eightzeros receipts lists them")
    return read(data)


def stored(receipt_id: str) -> bool:
    """Say whether a receipt lies where `load` looks."""
    path = path_of(receipt_id)
    return any(os.path.exists(os.path.join(folder, os.path.basename(path)))
               for folder in (os.path.dirname(path), spare_folder()) if folder)  # fmt: skip


def read(data: Dict[str, Any]) -> Receipt:
    """Turn a receipt's JSON into the record; one of an older version has what it lacks at its default."""
    receipt, plan = from_dict(Receipt, data), data.get("plan")
    if plan is not None:
        receipt.plan = from_dict(Plan, plan)
        receipt.plan.victims = _processes(plan["victims"])
        receipt.plan.spared = _processes(plan["spared"])
    receipt.before, receipt.after = _verdicts(receipt.before), _verdicts(receipt.after)
    receipt.killed, receipt.survivors = _processes(receipt.killed), _processes(receipt.survivors)
    receipt.leftovers = [from_dict(Leftover, row) for row in data.get("leftovers", [])]
    return receipt


def _processes(rows: List[Any]) -> List[Process]:
    found = [from_dict(Process, row) for row in rows]
    for one in found:
        one.used_bytes = Reading(*one.used_bytes)
    return found


def _verdicts(rows: List[Any]) -> List[GpuVerdict]:
    found = [from_dict(GpuVerdict, row) for row in rows]
    for one in found:
        one.used_bytes = Reading(*one.used_bytes)
    return found


def list_receipts() -> List[Dict[str, Any]]:
    """Return {id, kind, started_at, verdict, killed, total_s, interrupted} of every receipt, the newest first."""
    rows = []
    folder = state_dir("receipts")
    for name in os.listdir(folder):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            data = read_json(os.path.join(folder, name))
        except (OSError, ValueError):
            data = None
        if not isinstance(data, dict):
            rows.append({"id": name[:-5], "kind": "", "started_at": 0.0, "verdict": "unreadable", "killed": 0,
                         "total_s": 0.0, "interrupted": ""})  # fmt: skip
            continue
        rows.append({
            "id": str(data.get("id")), "kind": data.get("kind"), "started_at": data.get("started_at"),
            "verdict": data.get("verdict"), "killed": len(data.get("killed") or []),
            "total_s": (data.get("durations") or {}).get("total", 0.0), "interrupted": data.get("interrupted", ""),
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["started_at"] or 0.0, reverse=True)


def plan_path(name: str) -> str:
    """Return where a plan lies: under its digest when it was shown, under the reset's id once it was confirmed."""
    if not _ID.match(name):
        raise Refused("bad-request", "`%s` is no id of a reset" % name)
    return os.path.join(state_dir("plans"), name + ".json")


def keep_plan(name: str, victims: List[Process]) -> str:
    """Write whom a plan names, and return the file. Plans that nobody confirmed within a day are removed."""
    folder, path = state_dir("plans"), plan_path(name)
    for old in os.listdir(folder):
        try:
            if time.time() - os.stat(os.path.join(folder, old)).st_mtime > PLAN_KEPT_S:
                os.unlink(os.path.join(folder, old))
        except OSError:
            continue
    write_json(path, {"schema": SCHEMA, "victims": victims})
    return path


def confirmed(path: str) -> List[Process]:
    """Read the victims that the operator confirmed. Raises ValueError where the file is of no use."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("victims"), list):
        raise ValueError("%s: no confirmed plan of schema %d" % (path, SCHEMA))
    return _processes(data["victims"])


def forget_plan(path: Optional[str]) -> None:
    """Remove a confirmed plan that was carried out: the receipt holds it."""
    try:
        if path:
            os.unlink(path)
    except OSError:
        pass
