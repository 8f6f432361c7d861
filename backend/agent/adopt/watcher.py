"""The watcher: a run of ours whose process only looks at somebody else's, and writes progress like any run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from backend.agent import ours, pidfd, procfs
from backend.agent.adopt.batches import Counter
from backend.agent.adopt.folder import Folder
from backend.agent.adopt.logtail import LogTail
from backend.agent.progress import write_progress
from backend.agent.runtree import RUN_DIR_ENV
from backend.wire import Progress

EVERY_S = 1.0
LONGEST_S = 30.0
DUTY = 20.0
"""A look is followed by this many times its own duration without one: at most 5 % of a core and of the disk's calls."""

WINDOW_S = 60.0


def main(words: List[str]) -> int:
    """Watch what `words` (one JSON object: out, log, pid, pid_start, samples, tokens) names, until it ends.

    Returns 0 where it ended or we were asked to stop, 1 where it ended before its total was reached.
    """
    watcher = Watcher(json.loads(words[0]), os.environ.get(RUN_DIR_ENV, ""))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, watcher.stop)
    mark = ours.register("adopt")
    try:
        return watcher.run()
    finally:
        ours.forget(mark)


class Watcher:
    """One adopted run from now to its end."""

    def __init__(self, order: Dict[str, Any], run_dir: str) -> None:
        self._dir = run_dir
        self._pid, self._start = int(order.get("pid") or 0), int(order.get("pid_start") or 0)
        self._samples, self._tokens = int(order.get("samples") or 0), int(order.get("tokens") or 0)
        self._folder = Folder(str(order["out"]))
        self._log = LogTail(str(order["log"])) if order.get("log") else None
        self._counter = Counter()
        self._history: Deque[Tuple[float, int, int, int]] = deque()
        self._advanced_at = 0.0
        self._stopped = False

    def stop(self, *_: Any) -> None:
        """Watch no longer; what is watched goes on."""
        self._stopped = True

    def run(self) -> int:
        """Look again and again."""
        bound = self._bind()
        said = "watching %s" % self._folder.path
        sys.stdout.write(said + (", process %d %s\n" % (self._pid, procfs.command(self._pid)) if bound else "\n"))
        sys.stdout.flush()
        try:
            while True:
                gone = self._gone(bound)
                began = time.monotonic()
                self._look()
                if gone or self._stopped:
                    break
                self._tell("running", self._words())
                self._pause(bound, min(LONGEST_S, max(EVERY_S, DUTY * (time.monotonic() - began))))
        finally:
            if bound is not None:
                bound.close()
        return self._end()

    def _bind(self) -> Optional[pidfd.Bound]:
        """Hold the process that was named; None where none was, where it has ended, or on a kernel before 5.3."""
        if not self._pid:
            return None
        try:
            bound = pidfd.Bound.open(self._pid)
        except OSError:
            return None
        if bound is not None and bound.identity.start_ticks != self._start:
            bound.close()
            return None
        return bound

    def _gone(self, bound: Optional[pidfd.Bound]) -> bool:
        """Say whether the process has ended; without one it never has."""
        if bound is not None:
            return bound.gone()
        return self._pid > 0 and not procfs.alive(self._pid, self._start)

    def _pause(self, bound: Optional[pidfd.Bound], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < end:
            left = min(0.2, max(0.0, end - time.monotonic()))
            if bound is None:
                time.sleep(left)
            elif not pidfd.wait([bound], time.monotonic() + left):
                return

    def _look(self) -> None:
        before = self._folder.samples
        self._folder.look()
        for line in self._log.read() if self._log else []:
            self._counter.take(line)
        now = time.time()
        if self._folder.samples > before or not self._history:
            self._advanced_at = now
        self._history.append((now, self._folder.samples, self._folder.tokens, self._folder.bytes))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()

    def _rates(self) -> List[float]:
        """Return samples, tokens and bytes a second over the last minute, tokens by bytes: estimates jump."""
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return [0.0, 0.0, 0.0]
        samples, size = (last[1] - first[1]) / seconds, (last[3] - first[3]) / seconds
        tokens = size * last[2] / last[3] if last[3] else 0.0
        return [max(0.0, samples), max(0.0, tokens), max(0.0, size)]

    def progress(self, state: str, message: str) -> Progress:
        """Return how far it is. A total in samples alone makes one in tokens by the mean so far, and so an ETA."""
        folder = self._folder
        samples_per_s, tokens_per_s, bytes_per_s = self._rates()
        done, tokens = folder.samples, folder.tokens
        mean = tokens / done if done else 0.0
        total = self._tokens or (round(self._samples * mean) if self._samples else 0)
        per_token = folder.bytes / tokens if tokens else 0.0
        return Progress(
            at=time.time(), state=state, samples_done=done, samples_total=self._samples, tokens_done=tokens,
            tokens_total=max(total, tokens) if total else 0, bytes_written=folder.bytes,
            bytes_total=max(round(total * per_token), folder.bytes) if total else 0,
            shard=folder.newest, samples_failed=folder.unreadable, samples_in_flight=len(folder.pending),
            samples_per_s=samples_per_s, tokens_per_s=tokens_per_s or self._server_rate(),
            bytes_per_s=bytes_per_s, advanced_at=self._advanced_at, message=message,
        )  # fmt: skip

    def _server_rate(self) -> float:
        """Return the server's tokens a second, 0 where it has been silent: its clock's zone is not ours to know."""
        if self._log is None:
            return 0.0
        return self._counter.tokens_per_s(self._counter.newest_at + max(0.0, time.time() - self._log.written_at))

    def _words(self) -> str:
        counter, log = self._counter, self._log
        said = [self._folder.problem, log.problem if log else ""]
        if counter.new_tokens:
            queue, running = counter.waiting()
            said.append("server: %d tokens/s, %d running, %d queued" % (round(self._server_rate()), running, queue))
        if counter.cached_tokens:
            said.append("%d tokens came from the prefix cache: their rows are missing" % counter.cached_tokens)
        if not self._folder.exact:
            said.append("tokens are estimated until every head is read")
        if not self._pid:
            said.append("no process was named: it is watched until stopped")
        if log and log.newest:
            said.append(log.newest)
        return "; ".join(word for word in said if word)

    def _end(self) -> int:
        folder = self._folder
        deadline = time.monotonic() + 2 * EVERY_S
        while not self._stopped and (folder.pending or not folder.exact) and time.monotonic() < deadline:
            time.sleep(0.1)  # what was written last is whole once it stays as it is
            self._look()
        short = self._samples and folder.samples < self._samples
        of = " of %d" % self._samples if self._samples else ""
        if self._stopped:
            text, state, code = "no longer watched", "done", 0
            text += "; process %d goes on" % self._pid if self._pid else ""
        else:
            text = "process %d has ended with %d%s samples; its exit status is not ours to know" % (
                self._pid, folder.samples, of)  # fmt: skip
            state, code = ("failed", 1) if short else ("done", 0)
        last = self._log.newest if self._log else ""
        self._tell(state, text + ("; its log ends: " + last if last else ""))
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return code

    def _tell(self, state: str, message: str) -> None:
        problem = write_progress(self._dir, self.progress(state, message[:900]))
        if problem:
            sys.stdout.write(problem + "\n")
