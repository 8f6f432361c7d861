"""Segments: files of whole blocks, one behind the other. What a crash tore at an end is left out."""

from __future__ import annotations

import os
from typing import Iterator, List, NamedTuple, Tuple

from backend.wire.flight import HEAD, MAGIC, FlightError, Head, read_head, whole

SUFFIX = ".seg"


class Found(NamedTuple):
    """A block in a segment: its head, where it begins and ends there."""

    head: Head
    begin: int
    end: int


def segment_names(folder: str) -> List[str]:
    """List the segments, oldest first."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


def blocks_in(data: bytes) -> Iterator[Found]:
    """Find the blocks of a segment that are whole; where one is broken, go on at the next that begins."""
    at = 0
    while at >= 0 and len(data) - at >= HEAD.size:
        end = at
        try:
            head = read_head(data, at)
            end = at + HEAD.size + head.size
        except FlightError:
            pass
        if end > at and whole(data[at:end]):
            yield Found(head, at, end)
            at = end
        else:
            at = data.find(MAGIC, at + 1)


def read_segment(path: str) -> bytes:
    """Read a segment; one that was dropped meanwhile is empty."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def cut_torn(path: str) -> int:
    """Cut what is no whole block from a segment's end. Returns how many blocks it has."""
    data = read_segment(path)
    found = list(blocks_in(data))
    end = found[-1].end if found else 0
    if end < len(data):
        os.truncate(path, end)
    return len(found)


def newest_segment(folder: str) -> Tuple[str, int]:
    """Return the segment that was written last and the highest serial in it; ("", 0) where there is none.

    A segment's name ends in its first serial: by its time it may be older, where the clock was set back.
    """
    name = max(segment_names(folder), key=_first_serial, default="")
    if not name:
        return "", 0
    data = read_segment(os.path.join(folder, name))
    serials = [found.head.serial for found in blocks_in(data)]
    return name, max(serials, default=_first_serial(name) - 1)


def overlapping(folder: str, start: float, end: float, after: Tuple[str, int]) -> Iterator[Tuple[str, Found, bytes]]:
    """Yield (segment, block, its bytes) of the blocks between two times, from behind a position (segment, offset) on.

    A segment's name holds its first second, and the file's own time is that of its last.
    """
    for name in segment_names(folder):
        path = os.path.join(folder, name)
        if name < after[0] or int(name.split("-")[0]) > end:
            continue
        try:
            if os.stat(path).st_mtime < start - 1:
                continue
        except FileNotFoundError:
            continue
        data = read_segment(path)
        for found in blocks_in(data):
            behind = name > after[0] or found.begin >= after[1]
            if behind and found.head.last >= start and found.head.first <= end:
                yield name, found, data[found.begin : found.end]


def _first_serial(name: str) -> int:
    return int(name[: -len(SUFFIX)].rsplit("-", 1)[-1])
