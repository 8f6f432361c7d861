"""`audit`: every shard of a folder looked at, and all of them together. Exit status: 0 no fault, 1 faults, 2 usage.

Stopped by SIGTERM it ends with 143: what was looked at is kept, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from backend.agent import ours
from backend.agent.runtree import RUN_DIR_ENV
from backend.agent.shards.audit import corpus, results, rules
from backend.agent.shards.audit.cache import Cache
from backend.agent.shards.audit.faults import ERROR, WARNING, Faults, movable
from backend.agent.shards.audit.folder import File, Tree, missing
from backend.agent.shards.audit.look import look, worst
from backend.agent.shards.audit.pool import Pool, Task
from backend.agent.shards.audit.quarantine import Quarantine
from backend.agent.shards.audit.rules import Seen
from backend.agent.shards.audit.said import Said
from backend.agent.shards.audit.tell import Teller
from backend.agent.shards.formats.alike import Alike
from backend.agent.shards.values import withnumpy
from backend.wire import SCHEMA, Refused

OK, FAULTS, USAGE = 0, 1, 2
MAX_LISTED = 10_000
"""Findings that --json lists one by one; all of them are in faults.jsonl."""

CORPUS = "corpus"


def main(words: List[str]) -> int:
    """Audit as the words say, and return the exit status."""
    try:
        args = parser().parse_args(words)
    except SystemExit as usage:
        return int(usage.code or 0)
    gc.set_threshold(100_000)  # what was seen of each file stays, and leaves no cycles
    mark = ours.register("audit")
    try:
        audit = Audit(args)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, audit.stop)
        return audit.run()
    except Refused as refused:
        sys.stderr.write("audit: %s\n" % refused)
        return USAGE
    finally:
        ours.forget(mark)


def parser() -> argparse.ArgumentParser:
    """Return what reads the words."""
    made = argparse.ArgumentParser("eightzeros shards audit", description="Look at every shard of a folder.")
    made.add_argument("path", help="the folder")
    made.add_argument("--corpus", default="", help="compare with this corpus; by default the one in the journal")
    made.add_argument("--deep", action="store_true", help="read every byte: checksums, NaN, infinity, zero rows")
    made.add_argument("--fresh", action="store_true", help="look at every file again, also at those seen before")
    made.add_argument("--max-tokens", type=int, default=0, metavar="N", help="a longer sample is a fault")
    made.add_argument("--quarantine", default="", metavar="DIR", help="move bad files there, to be extracted again")
    made.add_argument("--root", action="append", default=[], help="refuse folders outside of these")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


class Audit:
    """One audit of one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._began = args, time.monotonic()
        self._root = _folder(args.path, args.root)
        if args.max_tokens < 0:
            raise Refused("bad-request", "--max-tokens must be a whole number above 0")
        self._quarantine = Quarantine(self._root, args.quarantine) if args.quarantine else None
        self._teller = Teller(args.json)
        self._found = results.Found(os.environ.get(RUN_DIR_ENV, ""))
        self._stopped = 0
        self._rows: List[List[str]] = []

    def stop(self, number: int, _frame: Any) -> None:
        """End soon, and keep what was looked at."""
        self._stopped = number

    def run(self) -> int:
        """Look, compare, tell."""
        self._teller.tell("starting", "listing %s" % self._root, force=True)
        cache = Cache(self._root, self._args.fresh)
        tree = Tree(self._root).walk()
        said = Said(self._root)
        try:
            seen = self._look(tree, cache, said)
        finally:
            cache.close(tree.files)
            self._found.close()
        if self._stopped:
            self._teller.tell("stopping", "stopped; start it again to go on", force=True)
            return 128 + self._stopped
        agreed = rules.agree(seen, said)
        faults = self._judge(tree, said, seen, agreed)
        moved = self._move(seen, faults)
        summary = self._summary(tree, said, seen, agreed, faults, moved)
        results.write(os.environ.get(RUN_DIR_ENV) or cache.folder, summary, faults)
        self._tell(summary, faults)
        return OK if summary["ok"] else FAULTS

    # --- looking ---

    def _look(self, tree: Tree, cache: Cache, said: Said) -> List[Seen]:
        known: Dict[str, Any] = {file.path: cache.get(file, self._args.deep) for file in tree.files}
        todo = [file for file in tree.files if known[file.path] is None]
        for file in tree.files:
            self._show(tree, file, known[file.path])
        self.looked_at = len(todo)
        self._teller.begin(len(tree.files), len(tree.files) - len(todo))
        tasks: List[Task] = self._corpus_task(said, cache) + [[file.path] for file in todo]
        by_path = {file.path: file for file in todo}
        root, deep = self._root, self._args.deep
        work = _worker(root, deep)
        for task, answer, why in Pool(work, len(tasks)).run(tasks, lambda: bool(self._stopped)):
            if task[0] == CORPUS and len(task) > 1:
                self._take_corpus(task, answer, why, said, cache)
                continue
            file = by_path[task[0]]
            if answer is None:
                code, _, text = why.partition(": ")
                answer = _unread(code, text)
            else:
                cache.put(file, answer)
            known[file.path] = answer
            self._show(tree, file, answer)
            self._teller.looked(dict.fromkeys(worst(answer)))
        return [Seen(file, known[file.path]) for file in tree.files if known[file.path] is not None]

    def _show(self, tree: Tree, file: File, answer: Optional[Dict[str, Any]]) -> None:
        """Tell what was found in a file at once, but for what may turn out to be no fault of it."""
        if answer is None or not answer["notes"] or file.path in tree.locked or file.young(time.time()):
            return
        own = Faults()
        rules.own(Seen(file, answer), [], own)
        own.all = [fault for fault in own.all if fault.code != "mask-empty"]  # the corpus may have such a mask
        self._found.add(own)

    def _corpus_task(self, said: Said, cache: Cache) -> List[Task]:
        """Return the task that reads the corpus, unless it was read before and has not changed."""
        path = self._args.corpus or said.corpus.get("path") or ""
        if not path:
            return []
        try:
            found = os.stat(path)
        except OSError as error:
            level = ERROR if self._args.corpus else WARNING
            said.faults.add("corpus-absent", "not compared with %s: %s" % (path, error.strerror), level=level)
            return []
        stamp = File(os.path.abspath(path), None, found.st_size, found.st_mtime_ns, found.st_ino)
        skipped = said.skipped_lines() if said.journal is not None else None
        task: Task = [CORPUS, *stamp, skipped]
        known = cache.get(stamp, False)
        if known is None or known.get("skipped") != skipped:
            return [task]
        self._take_corpus(task, known["read"], "", said, cache)
        return []

    def _take_corpus(self, task: Task, read: Any, why: str, said: Said, cache: Cache) -> None:
        stamp = File(*task[1:6])
        if read is not None:
            cache.put(stamp, {"read": read, "skipped": task[6]})
        wanted = said.corpus.get("sha256")
        if read is None or read["problem"]:
            said.faults.add("corpus-unread", (read or {}).get("problem") or why)
        elif wanted and not self._args.corpus and read["sha256"] != wanted:
            said.faults.add("corpus-changed", "%s is not what was extracted (SHA-256)" % stamp.path)
        else:
            self._rows = read["rows"]

    # --- judging ---

    def _judge(self, tree: Tree, said: Said, seen: List[Seen], agreed: rules.Agreement) -> Faults:
        faults = Faults()
        faults.all += tree.faults.all
        have = {file.sample for file in tree.files if file.sample is not None}
        words = "in the journal, and not in the folder" if said.journal is not None else "no file of that number"
        missing(have, said.wanted(have, tree.ranges), said.holes, faults, words)
        said.note_unfinished()
        faults.all += said.faults.all
        if agreed.problem:
            faults.add("no-majority", agreed.problem)
        rules.against_config(agreed, said, faults)
        own = Faults()
        for one in seen:
            rules.own(one, self._rows, own)
            rules.check(one, agreed, said, self._args.max_tokens, own)
        rules.against_journal(seen, said, said.state == "complete", own)
        if self._rows:
            rules.against_corpus(seen, self._rows, said, own)
        rules.twins(seen, self._rows, own)
        faults.all += _settled(own, seen, tree, said).all
        return faults

    def _move(self, seen: List[Seen], faults: Faults) -> Optional[Dict[str, Any]]:
        if self._quarantine is None:
            return None
        why: Dict[str, List[str]] = {}
        for fault in faults.all:
            if movable(fault):
                why.setdefault(fault.path, []).append("%s: %s" % (fault.code, fault.text))
        bad = [one.file for one in seen if one.file.path in why]
        if not bad:
            return None
        try:
            return self._quarantine.move(bad, why)
        except Refused as refused:
            return {"folder": "", "manifest": "", "files": 0, "given_back": 0, "left": [str(refused)]}

    # --- telling ---

    def _summary(
        self, tree: Tree, said: Said, seen: List[Seen], agreed: rules.Agreement, faults: Faults,
        moved: Optional[Dict[str, Any]],
    ) -> Dict[str, Any]:  # fmt: skip
        seconds = time.monotonic() - self._began
        bad = {fault.path for fault in faults.all if fault.level == ERROR and fault.path}
        count = sum(faults.counts().values())
        return {
            "schema": SCHEMA, "path": self._root, "at": time.time(), "deep": self._args.deep, "ok": not count,
            "files": len(tree.files), "bytes": sum(file.size for file in tree.files), "others": tree.others,
            "tokens": sum(one.tokens or 0 for one in seen), "looked_at": self.looked_at,
            "cached": len(tree.files) - self.looked_at, "seconds": round(seconds, 3),
            "hidden_size": agreed.hidden_size, "layers": agreed.layers,
            "tensors": [[key, dtype, list(shape)] for key, dtype, shape in sorted(agreed.schema.elements(), key=str)],
            "corpus_compared": bool(self._rows), "excused": len(said.holes), "fault_count": count,
            "faulty_files": len(bad), "faults": results.kinds(faults, ERROR),
            "remarks": results.kinds(faults, WARNING), "quarantine": moved,
        }  # fmt: skip

    def _tell(self, summary: Dict[str, Any], faults: Faults) -> None:
        lines = results.lines_of(summary)
        self._teller.progress.samples_failed = summary["faulty_files"]
        self._teller.tell("done", lines[-1], force=True)
        if self._args.json:
            listed = [fault._asdict() for fault in faults.all[:MAX_LISTED]]
            print(json.dumps(dict(summary, list=listed, listed_all=len(listed) == len(faults.all))), flush=True)
        else:
            print("\n".join(lines), flush=True)


def _folder(path: str, roots: List[str]) -> str:
    whole = os.path.expanduser(path)
    real = os.path.realpath(whole)
    if not os.path.isdir(real):
        raise Refused("bad-path", "%s is no folder" % whole, "name the folder that the shards are in")
    allowed = [os.path.realpath(os.path.expanduser(root)) for root in roots]
    if allowed and not any(os.path.commonpath([real, root]) == root for root in allowed):
        raise Refused("outside-roots", "%s is outside the configured roots" % whole, "roots: " + ", ".join(allowed))
    if not os.access(real, os.R_OK | os.X_OK):
        raise Refused("forbidden", "%s may not be listed by this user" % whole)
    return real


def _worker(root: str, deep: bool) -> Callable[[Task, Callable[[], None]], Any]:
    alike, numpy = Alike(), withnumpy.load() if deep else None

    def work(task: Task, tick: Callable[[], None]) -> Any:
        if task[0] == CORPUS and len(task) > 1:
            return corpus.read(task[1], task[6], tick)
        try:
            return look(os.path.join(root, task[0]), deep, tick, alike, numpy)
        except MemoryError:
            return _unread("too-large", "looking at it needs more memory than there is")
        except Exception as error:  # a file must never end the audit of the others
            return _unread("reader-died", "%s: %s" % (type(error).__name__, error))

    return work


def _unread(code: str, text: str) -> Dict[str, Any]:
    """Return the look at a file that could not be looked at."""
    return {"format": "", "notes": [[code, ERROR, text]], "tensors": [], "ids": None, "mask": None, "rows": "",
            "crc32": None, "deep": False}  # fmt: skip


def _settled(own: Faults, seen: List[Seen], tree: Tree, said: Said) -> Faults:
    """Take the faults of files that are being written for what they are: no faults yet. A committed one is whole."""
    now, journal = time.time(), said.journal or {}
    young: Dict[str, Optional[int]] = {}
    for file in [one.file for one in seen]:
        line = journal.get(-1 if file.sample is None else file.sample)
        if (file.young(now) and line is None) or file.path in tree.locked:
            young[file.path] = file.sample
    writing: Dict[str, str] = {}
    settled = Faults()
    for fault in own.all:
        if fault.path in young and fault.level == ERROR:
            writing.setdefault(fault.path, fault.code)
        else:
            settled.all.append(fault)
    for path, code in writing.items():
        settled.add("in-flight", "being written, so far: %s" % code, path, young[path], WARNING)
    return settled
