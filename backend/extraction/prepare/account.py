"""The account of a preparation: every record that came in, what became of it, and what the extraction will need."""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from backend.extraction.writer import shard_bytes
from backend.wire import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.extraction.prepare.sources import Dataset, Found

OUTCOMES = ("kept", "cut", "dropped", "untrained", "duplicate", "refused")
"""What becomes of a record. The first two are in the corpus; a refused one is no usable record."""

REFUSALS = ("refused", "untrained")
MAX_LISTED = 20


class Account:
    """Counts by dataset, and the notes of everything that is not simply kept."""

    def __init__(self, datasets: list[Dataset]) -> None:
        self.counts: dict[str, Counter[str]] = {dataset.name: Counter() for dataset in datasets}
        self.notes: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def take(self, source: str, found: Found, what: str, why: str = "") -> None:
        """Count a record's outcome, and note it where there is a reason."""
        self.counts[source][what] += 1
        if why:
            self.note(source, found, what, why)

    def note(self, source: str, found: Found, what: str, why: str) -> None:
        """Note something about a record."""
        self.notes.append({"source": source, "at": found.place, "what": what, "why": why})

    def sample(self, source: str, tokens: int, trained: int) -> None:
        """Count a sample of the corpus."""
        self.lengths.append(tokens)
        self.counts[source].update(tokens=tokens, trained_tokens=trained)

    def total(self, what: str) -> int:
        """Return a count over all datasets."""
        return sum(counts[what] for counts in self.counts.values())

    def refusals(self, what: str) -> list[str]:
        """List the first records with this outcome, as PLACE: reason, and how many more there are."""
        lines = [f"{note['at']}: {note['why']}" for note in self.notes if note["what"] == what]
        return lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED:,} more"] if len(lines) > MAX_LISTED else [])

    def source(self, name: str) -> dict[str, int]:
        """Return a dataset's counts, zeros included."""
        counts = self.counts[name]
        records = sum(counts[what] for what in OUTCOMES)
        found = {what: counts[what] for what in (*OUTCOMES, "reported", "renamed", "tokens", "trained_tokens")}
        return {"records": records, "samples": counts["kept"] + counts["cut"], **found}

    def notes_file(self) -> bytes:
        """Return the notes as JSON lines."""
        return b"".join(json.dumps(note, separators=(",", ":")).encode("ascii") + b"\n" for note in self.notes)


def histogram(lengths: Iterable[int]) -> list[dict[str, int]]:
    """Count lengths by powers of two: `up_to` 256 are those of 129 to 256 tokens."""
    counts = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return [{"up_to": 1 << power, "samples": counts[power]} for power in sorted(counts)]


def extraction_needs(lengths: list[int], hidden_size: int, points: int, out: str) -> dict[str, Any]:
    """Say what the shards of these samples will take, to the byte, and what the disk of `out` has free."""

    @lru_cache(maxsize=1 << 16)
    def size(digits: int, tokens: int) -> int:
        return shard_bytes(10 ** (digits - 1), tokens, hidden_size, points)

    need = sum(size(len(str(number)), tokens) for number, tokens in enumerate(lengths))
    folder = os.path.abspath(out)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    return {"hidden_size": hidden_size, "capture_points": points, "bytes": need, "disk": folder, "free_bytes": free,
            "fits": need <= free}  # fmt: skip


def needs_line(needs: dict[str, Any]) -> str:
    """Say in one line whether the extraction will fit."""
    text = (
        f"extraction will write {size_words(needs['bytes'])} ({needs['capture_points']} capture points and the last, "
        f"hidden size {needs['hidden_size']:,}); {needs['disk']} has {size_words(needs['free_bytes'])} free"
    )
    short = needs["bytes"] - needs["free_bytes"]
    return text + (": it fits" if needs["fits"] else f": IT DOES NOT FIT, {size_words(short)} are missing")


def size_words(size_bytes: int) -> str:
    """Write bytes as people count a disk: TiB, GiB or MiB."""
    for unit, name in ((GIB << 10, "TiB"), (GIB, "GiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes / (1 << 20):,.1f} MiB"
