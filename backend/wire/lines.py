"""Messages as lines of JSON, and text that is safe to show."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Dict, Type, TypeVar

PROTOCOL = 1
"""Raised when an older peer could misread a message."""

SCHEMA = 1
"""The version that every file which outlives a process carries (runs, journals, baselines, receipts)."""

MAX_LINE_BYTES = 256 * 1024
"""The longest line either side writes or accepts (DESIGN section 4)."""

GIB = 1 << 30
MIB = 1 << 20

T = TypeVar("T")


class Refused(Exception):
    """A request that the host answered with a reason. `code` is for programs, `hint` says what to do."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message + (" (" + hint + ")" if hint else ""))
        self.code, self.message, self.hint = code, message, hint


class WireError(Exception):
    """A line that is no message of this protocol."""


def encode(message: Any) -> bytes:
    """Write a message as one line. Raises WireError where it would be longer than MAX_LINE_BYTES."""
    line = json.dumps(message, default=vars, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise WireError("a message of %d bytes is over the limit of %d" % (len(line), MAX_LINE_BYTES))
    return line


def decode(line: bytes) -> Dict[str, Any]:
    """Read one line. Raises WireError where it is no JSON object or is too long."""
    if len(line) > MAX_LINE_BYTES:
        raise WireError("a line of %d bytes is over the limit of %d" % (len(line), MAX_LINE_BYTES))
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError("not JSON: %s" % error) from None
    if not isinstance(message, dict):
        raise WireError("not a JSON object")
    return message


def reply(number: Any, result: Any) -> Dict[str, Any]:
    """Make the answer to a request."""
    return {"t": "reply", "id": number, "ok": True, "result": result}


def refusal(number: Any, error: Exception) -> Dict[str, Any]:
    """Make the answer that says why not."""
    if isinstance(error, Refused):
        said = {"code": error.code, "message": error.message, "hint": error.hint}
    else:
        said = {"code": "failed", "message": "%s: %s" % (type(error).__name__, error), "hint": ""}
    return {"t": "reply", "id": number, "ok": False, "error": said}


def plain(record: Any) -> Any:
    """Turn a record into what json writes of it: dictionaries, lists and scalars."""
    return json.loads(json.dumps(record, default=vars))


def from_dict(kind: Type[T], data: Dict[str, Any]) -> T:
    """Read a flat record back, leaving out fields that this version does not know."""
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ESCAPES = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[ -/]*[0-~])")


def printable(text: str, limit: int = 4096) -> str:
    """Make remote text harmless for a terminal: escape sequences go, other control characters become spaces.

    Titles of processes and log lines are whatever some program chose to write (facts: transport, section 5).
    """
    return _UNPRINTABLE.sub(" ", _ESCAPES.sub("", text[:limit])).strip()
