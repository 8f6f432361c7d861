"""What is found in a file, while it is being read, and how that is told: bounded, and safe to show."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Set

from backend.wire import printable

MAX_ENTRIES = 2000
MAX_VALUES = 200
MAX_NOTES = 100
MAX_LISTED_BYTES = 180 * 1024
"""Entries beyond this many bytes of JSON are counted, not listed: a reply is one line of at most 256 KiB."""

INFO, WARNING, ERROR = "info", "warning", "error"


class Report:
    """Entries, values and notes of one file. See `show` for the fields."""

    def __init__(self, format_name: str = "") -> None:
        self.format = format_name
        self.entries: List[Dict[str, Any]] = []
        self.values: List[Dict[str, str]] = []
        self.notes: List[Dict[str, str]] = []
        self.metadata: Dict[str, str] = {}
        self.tensors = 0
        self.logical_bytes = 0
        self.stored_bytes = 0
        self.notes_left_out = 0
        self.values_left_out = 0
        self._listed_bytes = 0
        self.full = False
        self._keys: Set[str] = set()

    def note(self, code: str, text: str, level: str = ERROR) -> None:
        """Add a finding."""
        note = {"code": code, "level": level, "text": printable(text, 500)}
        if note in self.notes:
            return
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)
        else:
            self.notes_left_out += 1

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
        self._listed_bytes += len(json.dumps(entry, separators=(",", ":"))) + 1
        self.full = len(self.entries) >= MAX_ENTRIES or self._listed_bytes > MAX_LISTED_BYTES
        if not self.full:
            self.entries.append(entry)

    def value(self, key: str, text: str) -> None:
        """Add something that is no tensor."""
        if len(self.values) < MAX_VALUES:
            self.values.append({"key": key, "text": printable(text, 200)})
        else:
            self.values_left_out += 1

    def _distinct(self, key: str) -> str:
        name, number = key, 2
        while name in self._keys:
            name, number = "%s #%d" % (key, number), number + 1
        self._keys.add(name)
        return name

    @property
    def ok(self) -> bool:
        """Say whether nothing found here would keep a reader from the right values."""
        return not any(note["level"] == ERROR for note in self.notes)


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
