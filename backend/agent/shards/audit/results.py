"""What an audit leaves behind: a summary, and a line a finding, which others read page by page."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List

from backend.agent.files import read_json, write_atomic, write_json
from backend.agent.shards.audit.faults import Fault, Faults
from backend.wire import Refused

SUMMARY_NAME, FAULTS_NAME, FOUND_NAME = "audit.json", "faults.jsonl", "found.jsonl"
FIRST = 5
MAX_PAGE_BYTES = 180 * 1024
"""A reply is one line of at most 256 KiB."""


def kinds(faults: Faults, level: str) -> Dict[str, Dict[str, Any]]:
    """Return {code: {count, files, first}} of a level: `first` are the first few texts."""
    found: Dict[str, Dict[str, Any]] = {}
    for code, count in faults.counts(level).items():
        of_kind = [fault for fault in faults.all if fault.level == level and fault.code == code]
        first = [(fault.path + ": " if fault.path else "") + fault.text for fault in of_kind[:FIRST]]
        found[code] = {"count": count, "files": len({fault.path for fault in of_kind}), "first": first}
    return found


class Found:
    """What an audit finds in single files, told as it comes to who looks while it runs. Without a folder, to nobody.

    It is not the result: what only all files together can tell, and what of it is no fault after all, comes at the end.
    """

    def __init__(self, folder: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(os.path.join(folder, FOUND_NAME), flags, 0o600) if folder else -1

    def add(self, faults: Faults) -> None:
        """Tell some findings. A full disk costs these lines and nothing else."""
        if self._fd >= 0 and faults.all:
            try:
                os.write(self._fd, b"".join(map(_line, faults.all)))
            except OSError:
                self.close()

    def close(self) -> None:
        """Tell nothing more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write(folder: str, summary: Dict[str, Any], faults: Faults) -> None:
    """Write both files, the summary last: where it is, the findings are whole."""
    write_atomic(os.path.join(folder, FAULTS_NAME), b"".join(map(_line, faults.all)))
    write_json(os.path.join(folder, SUMMARY_NAME), summary)


def _line(fault: Fault) -> bytes:
    return json.dumps(fault._asdict(), separators=(",", ":")).encode("ascii") + b"\n"


def summary_of(folder: str) -> Dict[str, Any]:
    """Read the summary of an audit that has ended. Raises Refused `not-found` before."""
    found = read_json(os.path.join(folder, SUMMARY_NAME))
    if not isinstance(found, dict):
        raise Refused("not-found", "this audit has left no result", "see the log of its run")
    return found


def page(folder: str, offset: int, code: str) -> Dict[str, Any]:
    """Return {faults, next, at, live}: findings from a byte offset on, of one kind or (empty) of all.

    `next` is None at the end; `at` is where it stopped. `live` says that these are what an audit that still runs has
    found so far: more may follow at `at`, and the result has offsets of its own.
    """
    live = not os.path.exists(os.path.join(folder, FAULTS_NAME))
    found: List[Any] = []
    cost = 0
    try:
        with open(os.path.join(folder, FOUND_NAME if live else FAULTS_NAME), "rb") as file:
            file.seek(max(0, offset))
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break  # it is being written
                fault = json.loads(line)
                if not code or fault["code"] == code:
                    cost += len(line)
                    if cost > MAX_PAGE_BYTES:
                        return {"faults": found, "next": offset, "at": offset, "live": live}
                    found.append(fault)
                offset += len(line)
    except FileNotFoundError:
        raise Refused("not-found", "this audit has left no result", "see the log of its run") from None
    return {"faults": found, "next": None, "at": offset, "live": live}


def lines_of(summary: Dict[str, Any]) -> List[str]:
    """Write a summary as plain lines of text."""
    s = summary
    head = "%s: %d files, %d bytes, %d tokens, %.1f s (%d files were looked at, %d were as seen before)"
    lines = [head % (s["path"], s["files"], s["bytes"], s["tokens"], s["seconds"], s["looked_at"], s["cached"])]
    lines += ["  hidden size %s, %s layers" % (s["hidden_size"] or "?", s["layers"] or "?")] if s["files"] else []
    for title, level in (("FAULT", "faults"), ("remark", "remarks")):
        for code, kind in s[level].items():
            lines.append("  %s %s: %d" % (title, code, kind["count"]))
            lines += ["      " + text for text in kind["first"]]
            more = kind["count"] - len(kind["first"])
            lines += ["      and %d more" % more] if more > 0 else []
    lines += ["  %d samples are not there and are listed as failed" % s["excused"]] if s["excused"] else []
    moved = s["quarantine"]
    if moved:
        text = "  quarantined: %d files in %s; %d samples were given back to the journal"
        lines.append(text % (moved["files"], moved["folder"], moved["given_back"]))
        lines += ["      left: %s" % text for text in moved["left"][:FIRST]]
    lines.append("no fault" if s["ok"] else "%d faults in %d files" % (s["fault_count"], s["faulty_files"]))
    return lines
