"""What an audit finds, and which of it means that a file must not be used."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional

from backend.agent.shards.findings import ERROR, WARNING
from backend.wire import printable

__all__ = ["ERROR", "KEPT", "WARNING", "Fault", "Faults", "movable", "runs_of"]

MAX_TEXT_CHARS = 400

KEPT: FrozenSet[str] = frozenset(
    ("id-twice", "duplicate-ids", "misplaced", "leftover", "odd-name", "not-a-file", "dangling-link", "same-file",
     "not-committed", "link-folder", "unreadable", "forbidden", "no-answer", "reader-died", "length-index")
)  # fmt: skip
"""Faults that name a file and do not prove it bad: which of two is the wrong one, or what a disk would have said,
is for the operator to decide. All other faults of a file are of its contents."""


class Fault(NamedTuple):
    """One finding. `path` is relative to the folder and empty where the folder as a whole is meant."""

    code: str
    level: str  # error: a fault; warning: a remark, which is told and fails nothing
    path: str
    sample: Optional[int]
    text: str


class Faults:
    """The findings of one audit, in the order in which they were found."""

    def __init__(self) -> None:
        self.all: List[Fault] = []

    def add(self, code: str, text: str, path: str = "", sample: Optional[int] = None, level: str = ERROR) -> None:
        """Take a finding, once."""
        self.all.append(Fault(code, level, printable(path, 300), sample, printable(text, MAX_TEXT_CHARS)))

    def counts(self, level: str = ERROR) -> Dict[str, int]:
        """Count the findings of a level by kind, the most frequent first."""
        found: Dict[str, int] = {}
        for fault in self.all:
            if fault.level == level:
                found[fault.code] = found.get(fault.code, 0) + 1
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def movable(fault: Fault) -> bool:
    """Say whether a finding proves that its file must not be trained on."""
    return fault.level == ERROR and bool(fault.path) and fault.code not in KEPT


def runs_of(numbers: List[int]) -> List[str]:
    """Write sorted numbers as runs: 3, 7-9 (3)."""
    found: List[List[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ["%d" % lo if lo == hi else "%d-%d (%d)" % (lo, hi, hi - lo + 1) for lo, hi in found]
