"""Logs are read by byte offset, in whole lines, with nothing in them that a terminal would obey."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backend.agent.runlog import LIMIT_BYTES, read_log, shown
from backend.wire import encode

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def all_of(path: Path, limit: int, ended: bool = True) -> str:
    """Read a log piece by piece, as the console does."""
    text, offset = "", 0
    while True:
        piece = read_log(str(path), offset, limit, ended)
        assert piece["offset"] == offset
        if piece["next"] == offset:
            return text + str(piece["partial"])
        text, offset = text + str(piece["text"]), piece["next"]


@pytest.mark.parametrize("limit", [16, 17, 18, 19, 33, 1000])
def test_characters_are_never_cut(log: Path, limit: int) -> None:
    content = "".join(f"{n} é 漢字 😀\n" for n in range(40)) + "é漢😀" * 20 + "\n"
    log.write_text(content, encoding="utf-8")
    assert all_of(log, limit) == content


def test_escape_sequences_are_gone(log: Path) -> None:
    log.write_bytes(b"\x1b]0;owned\x07a\x1b[31mred\x1b[0m\x00\x9b2J\xc2\x9b2Jb\n\x1b[2J\n")
    text = all_of(log, 1000)
    assert not any((ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160 for letter in text)
    assert text.startswith("ared")
    assert text.count("\n") == 2


def test_overwritten_lines_keep_what_stood_last(log: Path) -> None:
    log.write_bytes(b"start\r\n 10%\r 50%\r100%\nnext\tcolumn\n    indented\n")
    assert all_of(log, 1000) == "start\n100%\nnext    column\n    indented\n"


def test_a_line_that_is_being_written_is_partial(log: Path) -> None:
    log.write_bytes(b"one\n10%\r20%")
    piece = read_log(str(log), 0, 1000, ended=False)
    assert (piece["text"], piece["partial"], piece["next"], piece["size"]) == ("one\n", "20%", 4, 11)
    with log.open("ab") as file:
        file.write(b"\r30%\n")
    piece = read_log(str(log), 4, 1000, ended=False)
    assert (piece["text"], piece["partial"], piece["next"]) == ("30%\n", "", 16)


def test_the_last_line_of_an_ended_run_is_text(log: Path) -> None:
    log.write_bytes(b"one\nKilled")
    piece = read_log(str(log), 0, 1000, ended=True)
    assert (piece["text"], piece["partial"], piece["next"]) == ("one\nKilled", "", 10)


def test_the_end_starts_at_a_line(log: Path) -> None:
    log.write_bytes(b"".join(b"line %03d\n" % n for n in range(100)))
    piece = read_log(str(log), -1, 40, ended=False)
    assert piece["text"] == "line 096\nline 097\nline 098\nline 099\n"
    assert (piece["offset"], piece["next"]) == (864, 900)
    assert read_log(str(log), -1, 36, ended=False)["offset"] == 864, "a line that fits whole is not left out"
    assert read_log(str(log), -1, 5000, ended=False)["offset"] == 0


def test_the_end_of_one_endless_line_starts_at_a_character(log: Path) -> None:
    log.write_text("漢" * 100, encoding="utf-8")
    piece = read_log(str(log), -1, 20, ended=True)
    assert piece["text"] == "漢" * 6


def test_offsets_outside(log: Path) -> None:
    nothing = {"offset": 0, "next": 0, "size": 0, "text": "", "partial": ""}
    assert read_log(str(log), 5, 100, ended=False) == nothing
    log.write_bytes(b"one\n")
    assert read_log(str(log), 500, 100, ended=False)["next"] == 4


def test_the_worst_bytes_fit_a_line_of_the_wire(log: Path) -> None:
    log.write_bytes(b"\xff" * (3 * LIMIT_BYTES))
    encode({"t": "reply", "id": 1, "ok": True, "result": read_log(str(log), -1, 1 << 30, ended=False)})


def test_long_lines_are_whole() -> None:
    assert shown(b"x" * 20_000) == "x" * 20_000
