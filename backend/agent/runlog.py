"""Pieces of a log that are safe to show, by byte offset."""

from __future__ import annotations

import os
from typing import Any, Dict, Tuple

from backend.wire import printable

LIMIT_BYTES = 40_000
"""The most that one answer holds: a byte that is no UTF-8 becomes six in JSON, and a wire line is 256 KiB."""

LEAST_BYTES = 16
"""Room for a whole character, so that every request moves on."""


def read_log(path: str, offset: int, limit: int, ended: bool) -> Dict[str, Any]:
    """Return {offset, next, size, text, partial} of a log; an absent log is an empty one.

    `text` holds whole lines. `partial` is the beginning of a line that is still being written, such as a
    progress bar: `next` stands before it, so that the next request reads it again. It becomes text when the
    run has `ended`, or when it alone is longer than `limit`. A negative `offset` asks for the last `limit`
    bytes, from a line's start.
    """
    limit = max(LEAST_BYTES, min(limit, LIMIT_BYTES))
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if offset < 0:
                start = max(0, size - limit)
                file.seek(max(0, start - 1))
                start, data = _from_line_start(start, file.read(size - max(0, start - 1)))
            else:
                start = min(offset, size)
                file.seek(start)
                data = file.read(limit)
    except FileNotFoundError:
        return {"offset": 0, "next": 0, "size": 0, "text": "", "partial": ""}
    whole, rest = _split(data, limit, at_end=ended and start + len(data) >= size)
    return {
        "offset": start,
        "next": start + len(whole),
        "size": size,
        "text": shown(whole),
        "partial": shown(rest),
    }


def shown(data: bytes) -> str:
    """Make a log safe to show: no control sequences, spaces for tabs, the last of an overwritten line."""
    return "\n".join(_line(line) for line in data.decode("utf-8", "replace").split("\n"))


def _line(line: str) -> str:
    last = line.rstrip("\r").rsplit("\r", 1)[-1].expandtabs(8)
    body = last.strip(" ")
    if not body:
        return last
    before = len(last) - len(last.lstrip(" "))
    return " " * before + printable(body, len(body)) + " " * (len(last) - before - len(body))


def _from_line_start(start: int, data: bytes) -> Tuple[int, bytes]:
    """Leave out the line that began before `start`; `data` begins one byte before that, unless at 0."""
    if start == 0:
        return 0, data
    cut = data.find(b"\n") + 1
    if cut == 0 or cut == len(data):
        cut = 1 + _continuation(data[1:])
    return start - 1 + cut, data[cut:]


def _continuation(data: bytes) -> int:
    """Count the bytes at the head that belong to a character that began before."""
    return next((n for n in range(min(3, len(data))) if data[n] & 0xC0 != 0x80), min(3, len(data)))


def _split(data: bytes, limit: int, at_end: bool) -> Tuple[bytes, bytes]:
    """Divide into whole lines and the beginning of one."""
    if at_end:
        return data, b""
    cut = data.rfind(b"\n") + 1
    if cut == 0 and len(data) >= limit:
        cut = len(data) - _unfinished(data)
    return data[:cut], data[cut:]


def _unfinished(data: bytes) -> int:
    """Count the bytes at the tail that are a UTF-8 character cut short."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return back if length > back else 0
    return 0
