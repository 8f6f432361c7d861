"""What is found in a file, while it is being read, and how that is told: bounded, and safe to show."""

from __future__ import annotations

import json
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from backend.agent.shards.findings import ERROR, Finding
from backend.wire import printable

MAX_ENTRIES = 2000
MAX_VALUES = 200
MAX_FINDINGS = 100
BUDGET_BYTES = {"entries": 150 * 1024, "findings": 32 * 1024, "values": 24 * 1024, "metadata": 16 * 1024}
"""JSON beyond this is counted, not listed: a reply is one line of at most 256 KiB."""


class Part(NamedTuple):
    """A run of stored bytes: the record's name, the key of a tensor in it, where it lies, what it should sum to.

    `crc32` is None where none was stored. `floating` says whether its tensors are floating-point numbers.
    """

    name: str
    key: str
    at: int
    size_bytes: int
    crc32: Optional[int]
    floating: bool


class Report:
    """Entries, values and findings of one file. See `show` for the fields of an entry.

    `parts` are its stored bytes; `content` is the Source that their offsets count in, where it is not the file
    itself (gzip). `sums` are (offset, bytes, CRC-32) of what a deep look has summed.
    """

    def __init__(self, format_name: str = "") -> None:
        self.format = format_name
        self.entries: List[Dict[str, Any]] = []
        self.values: List[Dict[str, str]] = []
        self.findings: List[Finding] = []
        self.metadata: Dict[str, str] = {}
        self.parts: List[Part] = []
        self.sums: List[Tuple[int, int, int]] = []
        self.content: Any = None
        self.tensors = 0
        self.logical_bytes = 0
        self.stored_bytes = 0
        self.findings_left_out = 0
        self.values_left_out = 0
        self.full = False
        self._left = dict(BUDGET_BYTES)
        self._keys: Dict[str, int] = {}

    def note(self, code: str, text: str, level: str = ERROR, subject: str = "") -> None:
        """Add a finding, whose code is one of `findings.MEANINGS`."""
        finding = Finding(code, level, printable(text, 500), printable(subject, 200))
        if finding in self.findings:
            return
        if len(self.findings) < MAX_FINDINGS and self._fits("findings", finding.as_note()):
            self.findings.append(finding)
        else:
            self.findings_left_out += 1

    def count(self, size_bytes: Optional[int]) -> None:
        """Count a tensor that is not listed, which is cheap: there may be many."""
        self.tensors += 1
        self.logical_bytes += size_bytes or 0

    def tensor(self, entry: Dict[str, Any]) -> None:
        """Add a tensor. Its key is made distinct, so that two rows can always be told apart."""
        self.count(entry["bytes"])
        if self.full:
            return
        entry["key"] = self._distinct(entry["key"])
        self.full = len(self.entries) >= MAX_ENTRIES or not self._fits("entries", entry)
        if not self.full:
            self.entries.append(entry)

    def value(self, key: str, text: str) -> None:
        """Add something that is no tensor."""
        value = {"key": key, "text": printable(text, 200)}
        if len(self.values) < MAX_VALUES and self._fits("values", value):
            self.values.append(value)
        else:
            self.values_left_out += 1

    def meta(self, name: str, text: str) -> None:
        """Add a fact of the file's own header."""
        name, text = printable(name, 100), printable(text, 500)
        if self._fits("metadata", [name, text]):
            self.metadata[name] = text

    def _fits(self, what: str, item: Any) -> bool:
        self._left[what] -= len(json.dumps(item, separators=(",", ":"))) + 1
        return self._left[what] >= 0

    def _distinct(self, key: str) -> str:
        name = key
        while name in self._keys:
            self._keys[key] += 1
            name = "%s #%d" % (key, self._keys[key])
        self._keys[name] = 1
        return name

    @property
    def ok(self) -> bool:
        """Say whether nothing found here would keep a reader from the right values."""
        return not any(finding.level == ERROR for finding in self.findings)


def entry(key: str, dtype: str, shape: Any, size_bytes: Optional[int]) -> Dict[str, Any]:
    """Return a tensor's row with the fields that every format fills; a contiguous tensor by itself."""
    return {
        "key": key,
        "dtype": dtype,
        "shape": list(shape),
        "bytes": size_bytes,
        "stride": None,
        "offset": None,
        "storage": "",
        "contiguous": True,
        "whole": True,
        "note": "",
    }
