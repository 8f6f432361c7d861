"""`retire ORDER`: delete one folder as it was confirmed. Exit status: 0 deleted, 1 not or not wholly, 2 refused.

Stopped by SIGTERM it ends with 143; the same command goes on. Its journal is in its run's folder, and so is the
receipt at its end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Dict, Optional

from backend.agent import ours
from backend.agent.files import read_json, write_json
from backend.agent.progress import write_progress
from backend.agent.retire.place import Place
from backend.agent.retire.plan import make_plan
from backend.agent.retire.removal import Removal
from backend.agent.runs import RunStore
from backend.agent.runtree import RUN_DIR_ENV
from backend.agent.seam import Machine
from backend.wire import SCHEMA, Progress, Refused

JOURNAL_NAME, RECEIPT_NAME = "retire.jsonl", "retire.json"
EVERY_S = 0.5
DELETED, PARTLY, REFUSED = "deleted", "partly deleted", "refused"


def main(machine: Machine, words: str) -> int:
    """Delete as the order says, and return the exit status."""
    mark = ours.register("retire")
    try:
        return Retirement(machine, json.loads(words), os.environ[RUN_DIR_ENV]).run()
    finally:
        ours.forget(mark)


class Retirement:
    """One confirmed deletion, its journal and its receipt."""

    def __init__(self, machine: Machine, order: Dict[str, Any], run_dir: str) -> None:
        self._order, self._dir = order, run_dir
        self._store = RunStore(machine)
        self._journal = os.open(
            os.path.join(run_dir, JOURNAL_NAME), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._progress = Progress(at=time.time(), state="starting")
        self._began = self._told_at = time.monotonic()
        self._stop = 0
        self._plan: Dict[str, Any] = {}
        self._removal: Optional[Removal] = None

    def run(self) -> int:
        """Look again, delete, leave a receipt."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._halt)
        try:
            verdict, reason = self._retire()
        except Refused as refused:
            verdict, reason = self._so_far(), str(refused)
        except OSError as error:
            verdict, reason = self._so_far(), "%s: %s" % (error.filename or "", error.strerror)
        self._receipt(verdict, reason)
        print("%s: %s%s" % (self._order["path"], verdict, ": " + reason if reason else ""), flush=True)
        return 128 + self._stop if self._stop else {DELETED: 0, PARTLY: 1}.get(verdict, 2)

    def _retire(self) -> "tuple[str, str]":
        order = self._order
        place = Place(order["path"], order["roots"], order["other_users"])
        try:
            self._plan, tree = make_plan(place, self._store, order["other_users"], os.path.basename(self._dir))
            if self._plan["refused"]:
                first = self._plan["refused"][0]
                raise Refused(first["code"], first["text"])
            if self._plan["digest"] != order["digest"]:
                raise Refused("plan-changed", "the folder is not as it was confirmed", "ask for a new plan")
            self.say("begin", path=place.path, target=place.target, digest=order["digest"],
                     files=tree.files, folders=tree.folders, bytes=tree.bytes)  # fmt: skip
            self._progress.samples_total, self._progress.bytes_total = tree.files, tree.bytes
            self._removal = Removal(place, tree, self._tick, self.say)
            self._removal.run()
        finally:
            place.close()
        if self._removal.stopped:
            return PARTLY, "stopped; the same command goes on"
        return DELETED, ""

    def _so_far(self) -> str:
        """Name what has come of it where it ended by a failure: partly, as soon as it was set aside."""
        place = self._plan.get("path", self._order["path"])
        return REFUSED if self._removal is None or os.path.lexists(place) else PARTLY

    def _halt(self, number: int, _frame: Any) -> None:
        self._stop = number

    def _tick(self) -> bool:
        """Tell how far it is now and then; return whether to stop."""
        now = time.monotonic()
        if now - self._told_at >= EVERY_S and self._removal is not None:
            self._told_at = now
            self._tell("running")
        return bool(self._stop)

    def _tell(self, state: str) -> None:
        done, progress = self._removal.done if self._removal else {"files": 0, "bytes": 0}, self._progress
        progress.state, progress.at, progress.advanced_at = state, time.time(), time.time()
        progress.samples_done, progress.bytes_written = done["files"], done["bytes"]
        progress.samples_per_s = done["files"] / max(0.001, time.monotonic() - self._began)
        progress.message = "%d of %d files are deleted" % (done["files"], progress.samples_total)
        write_progress(self._dir, progress)

    def say(self, step: str, **facts: Any) -> None:
        """Keep one step, synced before the next begins."""
        record = dict(facts, schema=SCHEMA, step=step, at=time.time())
        os.write(self._journal, json.dumps(record).encode("ascii") + b"\n")
        os.fsync(self._journal)

    def _receipt(self, verdict: str, reason: str) -> None:
        done = self._removal.done if self._removal else {"files": 0, "folders": 0, "bytes": 0}
        self.say("end", verdict=verdict, reason=reason, **done)
        self._tell("done" if verdict == DELETED else "failed")
        write_json(os.path.join(self._dir, RECEIPT_NAME), {
            "schema": SCHEMA, "kind": "retire", "at": time.time(), "path": self._order["path"],
            "verdict": verdict, "reason": reason, "deleted": done, "seconds": time.monotonic() - self._began,
            "uid": os.geteuid(), "confirmed": self._order.get("confirmed", ""), "plan": self._plan,
        })  # fmt: skip


def receipt_of(run_dir: str) -> Dict[str, Any]:
    """Return a deletion's receipt; of one that was killed, what its journal says. Raises Refused `not-found`."""
    found = read_json(os.path.join(run_dir, RECEIPT_NAME))
    if isinstance(found, dict):
        return found
    try:
        with open(os.path.join(run_dir, JOURNAL_NAME), "rb") as file:
            lines = [json.loads(line) for line in file.read().split(b"\n")[:-1]]
    except (OSError, ValueError):
        lines = []
    if not lines:
        raise Refused("not-found", "this run has deleted nothing and left no receipt", "see its log")
    step = lines[-1]["step"]
    aside = step in ("renaming", "renamed", "removed")
    return {
        "schema": SCHEMA, "kind": "retire", "at": lines[-1]["at"], "path": lines[0].get("path", ""),
        "verdict": DELETED if step == "removed" else "interrupted" if aside else REFUSED,
        "reason": "it has not come to its end; its last step was `%s`" % step, "deleted": None, "steps": lines,
    }  # fmt: skip
