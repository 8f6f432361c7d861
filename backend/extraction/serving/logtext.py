"""A server's log as records: a line with its own head, and what belongs to it (a traceback, a JSON dump).

A record that says itself that it is no trouble (an optional import, a fallback) is noise with all its lines. A log
that is appended to holds several starts; only the last one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OUR_MARK = "eightzeros: "
"""Begins the launcher's own lines in the same log."""

READY = "The server is fired up and ready to roll"
"""What SGLang says once it serves: whatever it complained of before was no trouble."""

_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]? ?")
"""What a container's log driver puts before a line."""

_HEAD = re.compile(
    r"^(?:\[(?:[a-z]*\d+\]:)?\[?[A-Z]?\d{2,4}[- ]?\d\d|\[\d{4}-|\d{4}-\d\d-\d\d |[IWEF]\d{4} |"
    r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\b|Traceback \(|usage: |Process |\[rank\d+\]:)"
)
_NOISE = re.compile(
    r"ignore import error|ignoring import|falling back|fall back to|optional|deprecat|UserWarning|FutureWarning|"
    r"skipp?(?:ing|ed)\b|\bretry(?:ing)?\b|not (?:a )?fatal|using .{1,40} instead",
    re.IGNORECASE,
)
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_START = re.compile(r"\bserver_args=(?:ServerArgs\(|\{)")


@dataclass
class Record:
    """Lines that belong together. `noise` records are no cause of anything."""

    lines: list[str] = field(default_factory=list)
    noise: bool = False


def clean(line: str) -> str:
    """Return what a line shows in the end: without a container's stamp, the last of an overwritten bar."""
    return _STAMP.sub("", line.rstrip("\r").rsplit("\r", 1)[-1]).rstrip()


def records(lines: list[str]) -> list[Record]:
    """Divide the log of the last start into records, without the launcher's own lines."""
    found: list[Record] = []
    chained = False
    for line in last_start([clean(line) for line in lines]):
        if line.startswith(OUR_MARK):
            continue
        begins = bool(_HEAD.match(line)) and not (chained and line.startswith("Traceback ("))
        if begins or not found:
            found.append(Record(noise=bool(_NOISE.search(line))))
        found[-1].lines.append(line)
        if line.strip():
            chained = line.startswith(_CHAINED)
    return found


def is_start(line: str) -> bool:
    """Say whether a line is a server's own first one: all its arguments, which name what is no trouble."""
    return _START.search(line) is not None


def last_start(lines: list[str]) -> list[str]:
    """Leave out what earlier servers wrote into the same file, and how this one started where it became ready."""
    marks = [number for number, line in enumerate(lines) if is_start(line) or READY in line]
    return lines[marks[-1] :] if marks else lines
