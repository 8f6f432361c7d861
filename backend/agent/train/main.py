"""The watcher of a training: it starts the trainer, reads what that prints, and ends as it ends.

The trainer writes into the run's log by itself; nothing stands between. So it goes on, and its log grows, whatever
becomes of the watcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from backend.agent import runfiles
from backend.agent.adopt.logtail import LogTail
from backend.agent.progress import write_progress
from backend.agent.runtree import RUN_DIR_ENV
from backend.agent.train.checkpoints import checkpoints
from backend.agent.train.lines import Bar, Reader
from backend.agent.train.metrics import MetricsFile, Update
from backend.agent.train.pace import Pace

EVERY_S = 1.0
CHECKPOINTS_EVERY_S = 30.0
NOT_STARTED = 127


def main(words: List[str]) -> int:
    """Train: `words` are an order as JSON ({out, data, max_steps, epochs}) and the trainer's whole argv."""
    watcher = Watcher(json.loads(words[0]), words[1:], os.environ.get(RUN_DIR_ENV, ""))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, watcher.stop)
    return watcher.run()


def corpus_of(data: str) -> Dict[str, int]:
    """Return {samples, tokens} of the shards, or of an export of them, as far as their records say."""
    for name in ("data_config.json", "export.json"):
        try:
            with open(os.path.join(os.path.expanduser(data), name), "rb") as file:
                record = json.loads(file.read())
            return {key: int(record[key]) for key in ("samples", "tokens")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


class Watcher:
    """One training from its start to its end."""

    def __init__(self, order: Dict[str, Any], argv: List[str], run_dir: str) -> None:
        self._argv, self._dir, self._out = argv, run_dir, str(order.get("out") or "")
        self._log = LogTail(os.path.join(run_dir, runfiles.LOG), bars=True)
        self._reader, self._metrics = Reader(), MetricsFile(run_dir)
        self._pace = Pace({**corpus_of(str(order.get("data") or "")), **order})
        self._bar: Optional[Bar] = None
        self._newest = ""
        self._looked_at = -CHECKPOINTS_EVERY_S
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._stopped = False

    def stop(self, *_: Any) -> None:
        """Have the trainer asked to end, once: who stops the run has asked its whole session already."""
        asked_all = os.path.exists(os.path.join(self._dir, runfiles.STOP))
        if self._child is not None and not self._stopped and not asked_all:
            self._child.send_signal(signal.SIGTERM)
        self._stopped = True

    def run(self) -> int:
        """Start the trainer, watch it, and return its exit status."""
        try:
            self._child = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL)
        except OSError as error:
            text = "%s: %s" % (self._argv[0], error.strerror)
            print(text, flush=True)
            self._tell("failed", [text])
            return NOT_STARTED
        code = self._child.poll()
        while code is None:
            self._look()
            self._tell("running" if self._pace.step else "starting", [])
            code = self._wait(self._child)
        return self._end(code)

    def _wait(self, child: "subprocess.Popen[bytes]") -> Optional[int]:
        try:
            return child.wait(EVERY_S)
        except subprocess.TimeoutExpired:
            return None

    def _look(self) -> None:
        """Read all that is new in the log."""
        while True:
            lines = self._log.read()
            if not lines:
                break
            now = time.time()
            updates: List[Update] = []
            for line in lines:
                updates += self._reader.take(line)
            self._take(now, updates)
        if time.monotonic() - self._looked_at >= CHECKPOINTS_EVERY_S:
            self._look_at_checkpoints()

    def _take(self, now: float, updates: List[Update]) -> None:
        self._pace.take(now, updates)
        bar = self._reader.bar
        if bar is not None and bar != self._bar:
            self._bar = bar
            updates = [*updates, self._pace.take_bar(now, bar)]
        self._metrics.add(now, [one for one in updates if one.values])

    def _look_at_checkpoints(self) -> None:
        self._looked_at = time.monotonic()
        found = checkpoints(self._out) if self._out else []
        self._newest = found[0]["name"] if found else ""

    def _tell(self, state: str, said: List[str]) -> None:
        said = [*said, self._metrics.problem] if self._metrics.problem else said
        progress = self._pace.progress(state, self._reader, said)
        progress.shard = self._newest
        problem = write_progress(self._dir, progress)
        if problem:
            sys.stderr.write("eightzeros train: %s\n" % problem)

    def _end(self, code: int) -> int:
        self._look()
        self._take(time.time(), self._reader.end())
        self._look_at_checkpoints()
        state = "done" if code == 0 else "stopped" if self._stopped else "failed"
        self._tell(state, [self._log.newest] if state == "failed" and self._log.newest else [])
        if code < 0:  # end as it did, so that the record says which signal it was
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code
