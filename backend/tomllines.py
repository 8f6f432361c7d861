"""Where each key of a TOML text stands, which tomllib does not say. The text must be valid TOML."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_PART = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*(\.?)""")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


def line_of(text: str, keys: Sequence[str | int]) -> int:
    """Return the line of a key, counted from 1; where it is absent, that of the table it should stand in."""
    found = _Scan(text).found
    for depth in range(len(keys), 0, -1):
        if (line := found.get(tuple(keys[:depth]))) is not None:
            return line
    return 1


class _Scan:
    """One pass over the text; `found` holds the line of each key by its path, list elements by their index."""

    def __init__(self, text: str) -> None:
        self.found: dict[tuple[str | int, ...], int] = {}
        self._text, self._at = text, 0
        table: tuple[str | int, ...] = ()
        counts: dict[tuple[str | int, ...], int] = {}
        self._skip()
        while self._at < len(text):
            if text.startswith("[", self._at):
                doubled = text.startswith("[[", self._at)
                start = self._at
                self._at += 2 if doubled else 1
                table = self._inside(self._key(), counts)
                if doubled:
                    number = counts[table] = counts.get(table, -1) + 1
                    self._note(table, start)
                    table = (*table, number)
                self._note(table, start)
                self._at += 2 if doubled else 1
            else:
                self._assignment(table)
            self._skip()

    def _inside(self, keys: tuple[str | int, ...], counts: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
        """Insert the number of the newest element behind every array of tables that a header passes through."""
        path: tuple[str | int, ...] = ()
        for key in keys[:-1]:
            path = (*path, key)
            if path in counts:
                path = (*path, counts[path])
        return (*path, *keys[-1:])

    def _note(self, path: tuple[str | int, ...], at: int) -> None:
        line = self._text.count("\n", 0, at) + 1
        for depth in range(1, len(path) + 1):
            self.found.setdefault(path[:depth], line)

    def _skip(self) -> None:
        match = _BLANK.match(self._text, self._at)
        assert match
        self._at = match.end()

    def _key(self) -> tuple[str | int, ...]:
        parts: list[str | int] = []
        while match := _PART.match(self._text, self._at):
            part = match.group(1)
            parts.append(part[1:-1] if part[0] in "\"'" else part)
            self._at = match.end()
            if not match.group(2):
                break
        return tuple(parts)

    def _assignment(self, table: tuple[str | int, ...]) -> None:
        start = self._at
        path = (*table, *self._key())
        self._note(path, start)
        self._at = self._text.find("=", self._at) + 1 or len(self._text)
        self._value(path)

    def _value(self, path: tuple[str | int, ...]) -> None:
        self._skip()
        opening = self._text[self._at : self._at + 1]
        if opening in ("[", "{"):
            self._at += 1
            self._group(path, opening)
            return
        for pattern in _STRINGS:
            if match := pattern.match(self._text, self._at):
                self._at = match.end()
                return
        match = _SCALAR.match(self._text, self._at)
        assert match
        self._at = match.end()

    def _group(self, path: tuple[str | int, ...], opening: str) -> None:
        """Pass over an array or an inline table."""
        closing, number = ("]" if opening == "[" else "}"), 0
        self._skip()
        while self._at < len(self._text) and not self._text.startswith(closing, self._at):
            if opening == "[":
                self._note((*path, number), self._at)
                self._value((*path, number))
                number += 1
            else:
                self._assignment(path)
            self._skip()
            if self._text.startswith(",", self._at):
                self._at += 1
                self._skip()
        self._at += 1
