"""A folder of shards as a tree of lines: listed page by page, folded, filtered, and followed while it grows.

Lines are (folder, index) pairs; rows are made of them only when they are painted, so that 37,312 files cost no more
than those in sight.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Entry = dict[str, Any]

PART = re.compile(r"rows_\d+-\d+|hidden_states")
"""Folders that are parts of one run: they are listed without being asked for, so that the sums are of the run."""


class Line(NamedTuple):
    """One line: an entry of a folder (relative to the top; empty: the top itself). Number -1 is the top's own line."""

    folder: str
    number: int


@dataclass
class Folder:
    """What is known of one folder. `following` is the offset of the next page, None when all of it is listed."""

    entries: list[Entry] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    following: int | None = 0
    total: int = 0
    open: bool = False
    shards: int = 0
    bytes: int = 0
    newest_at: float = 0.0
    folders: int = 0
    texts: list[str] = field(default_factory=list)

    def index(self, since: int) -> None:
        """Bring up to date what is looked up by name, from an entry on; folders come first."""
        for at, entry in enumerate(self.entries[since:], since):
            self.known[str(entry.get("name"))] = at
        self.texts[since:] = [
            f"{entry.get('name')} {entry.get('note') or ''}".lower() for entry in self.entries[since:]
        ]
        self.folders = next(
            (at for at, one in enumerate(self.entries) if one.get("kind") != "folder"), len(self.entries)
        )

    def count(self, entry: Entry, sign: int = 1) -> None:
        """Add an entry to the sums, or take it out."""
        if entry.get("kind") == "shard":
            self.shards += sign
            self.bytes += sign * int(entry.get("bytes") or 0)
            self.newest_at = max(self.newest_at, float(entry.get("modified_at") or 0.0))


class ShardTree:
    """The folders below one top folder, as far as they are listed."""

    def __init__(self, top: str) -> None:
        self.top = top
        self.folders: dict[str, Folder] = {"": Folder(open=True)}
        self.words: list[str] = []
        self.lines: list[Line] = [Line("", -1)]

    # --- what the host said ---

    def take(self, name: str, listing: dict[str, Any]) -> None:
        """Add a page of a folder."""
        folder = self.folders.setdefault(name, Folder())
        folder.total = int(listing.get("total") or 0)
        folder.following = listing.get("next")
        self._add(name, listing)

    def grow(self, name: str, listing: dict[str, Any]) -> bool:
        """Add what has come or changed since; return whether anything has."""
        folder = self.folders.setdefault(name, Folder())
        folder.total = max(folder.total, int(listing.get("total") or 0))
        return self._add(name, listing)

    def _add(self, name: str, listing: dict[str, Any]) -> bool:
        folder, changed = self.folders[name], False
        before = len(folder.entries)
        for entry in listing.get("entries") or []:
            at = folder.known.get(str(entry.get("name")))
            if at is not None and folder.entries[at] == entry:
                continue
            changed = True
            if at is not None:
                folder.count(folder.entries[at], -1)
                folder.entries[at] = entry
            else:
                folder.entries.append(entry)
            folder.count(entry)
        gone = {f".{entry.get('name')}.tmp" for entry in folder.entries[before:]} & folder.known.keys()
        if gone:  # it has its name now: a page of what is new does not say what went
            folder.entries = [entry for entry in folder.entries if entry.get("name") not in gone]
            folder.known, before = {}, 0
        if not _ordered(folder.entries[max(0, before - 1) :]):
            folder.entries.sort(key=_order)
            before = 0
        folder.index(before)
        if changed:
            self.lay_out()
        return changed

    def parts(self, name: str) -> list[str]:
        """Return the folders in one that belong to the same run and are not listed yet."""
        found = [self.below(name, entry) for entry in self.folders[name].entries if entry.get("kind") == "folder"]
        return [one for one in found if PART.fullmatch(posixpath.basename(one)) and one not in self.folders]

    # --- lines ---

    def lay_out(self) -> None:
        """Make the lines anew: of what is open, or of what matches the filter wherever it is listed."""
        self.lines = [Line("", -1), *self._lines("")]

    def _lines(self, name: str) -> Iterator[Line]:
        folder, words = self.folders[name], self.words
        first = folder.folders
        for number, entry in enumerate(folder.entries[:first]):
            below = self.folders.get(self.below(name, entry))
            inner = list(self._lines(self.below(name, entry))) if below and (below.open or words) else []
            if not words or inner or all(word in folder.texts[number] for word in words):
                yield Line(name, number)
                yield from inner
        if not words:
            yield from [Line(name, number) for number in range(first, len(folder.entries))]
        elif len(words) == 1:
            yield from [Line(name, first + at) for at, text in enumerate(folder.texts[first:]) if words[0] in text]
        else:
            texts = enumerate(folder.texts[first:])
            yield from [Line(name, first + at) for at, text in texts if all(word in text for word in words)]

    def filter(self, text: str) -> None:
        """Show only names (or notes) that hold every word; nothing shows all."""
        self.words = text.lower().split()
        self.lay_out()

    def entry(self, line: Line) -> Entry:
        """Return a line's entry; of the top's own line a folder without a name."""
        return self.folders[line.folder].entries[line.number] if line.number >= 0 else {"name": "", "kind": "folder"}

    def inside(self, line: Line) -> str:
        """Return the folder that a line is of, relative to the top."""
        return self.below(line.folder, self.entry(line)) if line.number >= 0 else ""

    def path(self, line: Line) -> str:
        """Return a line's path on the host."""
        return posixpath.join(self.top, self.inside(line)) if line.number >= 0 else self.top

    @staticmethod
    def below(name: str, entry: Entry) -> str:
        """Return an entry's path relative to the top."""
        return posixpath.join(name, str(entry.get("name", "")))

    def find(self, path: str) -> int | None:
        """Return the number of the line of a path relative to the top, where it is shown."""
        folder, name = posixpath.split(path)
        index = self.folders[folder].known.get(name) if folder in self.folders else None
        if index is None:
            return None
        if folder == "" and not self.words and len(self.lines) == len(self.folders[""].entries) + 1:
            return index + 1  # nothing is unfolded
        try:
            return self.lines.index(Line(folder, index))
        except ValueError:
            return None

    def unfold(self, name: str, opened: bool = True) -> None:
        """Open or fold a folder."""
        self.folders.setdefault(name, Folder()).open = opened
        self.lay_out()

    # --- sums ---

    def sums(self, name: str) -> tuple[int, int, bool]:
        """Return (shards, bytes, whether all of it is listed) of a folder and of the parts below it."""
        folder = self.folders.get(name)
        if folder is None:
            return 0, 0, False
        shards, size, whole = folder.shards, folder.bytes, folder.following is None
        for entry in folder.entries[: folder.folders]:
            more = self.sums(self.below(name, entry))
            part = PART.fullmatch(str(entry.get("name", ""))) is not None
            shards, size, whole = shards + more[0], size + more[1], whole and (more[2] or not part)
        return shards, size, whole

    @property
    def listed(self) -> int:
        """Return how many entries are known."""
        return sum(len(folder.entries) for folder in self.folders.values())

    @property
    def newest(self) -> Line | None:
        """Return the shard that was written last."""
        best: tuple[float, Line] | None = None
        for name, folder in self.folders.items():
            for index, entry in enumerate(folder.entries) if folder.newest_at >= (best[0] if best else 0.0) else ():
                at = float(entry.get("modified_at") or 0.0)
                if entry.get("kind") == "shard" and (best is None or at > best[0]):
                    best = at, Line(name, index)
        return best[1] if best else None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Make the key that sorts data_9 before data_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part.lower()) for part in parts if part]


def _order(entry: Entry) -> tuple[bool, list[tuple[int, int, str]]]:
    return entry.get("kind") != "folder", natural(str(entry.get("name", "")))


def _ordered(entries: list[Entry]) -> bool:
    """Say whether entries are in the host's order: what came in later may break it."""
    return all(one <= other for one, other in pairwise(map(_order, entries)))
