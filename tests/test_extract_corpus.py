"""Corpora as people have them: lines end at LF alone (case D1), and every bad line is named before anything starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from backend.extraction import corpus as corpus_module
from backend.extraction.corpus import Corpus, CorpusError

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 263


def line(**record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def read(path: Path, **how: Any) -> list[tuple[str, list[int]]]:
    corpus = Corpus(str(path), VOCAB, **how)
    rows = [corpus.row(index) for index in range(len(corpus))]
    corpus.close()
    return [(row.id, row.input_ids) for row in rows]


def refused(path: Path, **how: Any) -> str:
    with pytest.raises(CorpusError) as error:
        Corpus(str(path), VOCAB, **how)
    return str(error.value)


@pytest.fixture
def d1(tmp_path: Path) -> Path:
    """Make case D1 with token ids: separators in the text, a mark at the head, blank lines, one record cut."""
    path = tmp_path / "d1.jsonl"
    texts = [
        "plain",
        "line sep\u2028 and para sep\u2029 raw",
        "next line \x85 raw",
        "carriage return",
        "nul \x00 tab \t",
    ]
    with path.open("wb") as file:
        file.write(b"\xef\xbb\xbf" + line(id="0", input_ids=[0, 1], text=texts[0]) + b"\n")
        file.write(line(id="1", input_ids=[1, 1], text=texts[1]) + b"\n")
        file.write(line(id="2", input_ids=[2, 1], text=texts[2]) + b"\n\n   \n")
        file.write(line(id="3", input_ids=[3, 1], text=texts[3]) + b"\r\n")
        file.write(line(id="99", input_ids=[9, 9], text="cut")[:-9] + b"\n")
        file.write(line(id="4", input_ids=[4, 1], text=texts[4]) + b"\n")
        file.write(line(id="5", input_ids=[5, 1], text="x" * 300_000) + b"\n")
        file.write(line(id="6", input_ids=[6, 1], text="no newline after me"))
    return path


def test_d1_refuses_the_cut_record_by_its_line(d1: Path) -> None:
    text = refused(d1)
    assert f"{d1}:7: not JSON" in text
    assert "--skip-bad" in text
    assert text.count(f"{d1}:") == 1


def test_d1_keeps_all_others(d1: Path) -> None:
    assert read(d1, skip_bad=True) == [(str(i), [i, 1]) for i in range(7)]
    corpus = Corpus(str(d1), VOCAB, skip_bad=True)
    corpus.close()
    assert ([bad.line for bad in corpus.skipped], corpus.lines) == ([7], 10)
    assert corpus.bytes == d1.stat().st_size


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"loss_mask": [1]}, 'no "input_ids"'),
        ({"input_ids": []}, '"input_ids" is empty'),
        ({"input_ids": [97.0, 98.5]}, '"input_ids" is not a flat list of whole numbers'),
        ({"input_ids": [[97, 98]]}, '"input_ids" is not a flat list of whole numbers'),
        ({"input_ids": [True, 5]}, '"input_ids" is not a flat list of whole numbers'),
        ({"input_ids": "97"}, '"input_ids" is not a flat list of whole numbers'),
        ({"input_ids": [97, 263]}, "token 263 is outside the vocabulary (0 to 262)"),
        ({"input_ids": [97, -100]}, "token -100 is outside the vocabulary"),
        ({"input_ids": [97] * 20, "loss_mask": [1] * 19}, '"loss_mask" has 19 values for 20 tokens'),
        ({"input_ids": [97] * 4, "loss_mask": [0, 2, 2, 2]}, '"loss_mask" is not a flat list of 0 and 1'),
        ({"input_ids": [97], "loss_mask": [[1]]}, '"loss_mask" is not a flat list of 0 and 1'),
        ({"input_ids": [97], "loss_mask": [1.0]}, '"loss_mask" is not a flat list of 0 and 1'),
        ({"input_ids": [97], "id": ["x"]}, '"id" is neither text nor a whole number'),
        ([97], "not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, record: Any, problem: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"input_ids": [1]}\n' + json.dumps(record) + "\n")
    assert f"{path}:2: {problem}" in refused(path)


def test_broken_json_that_is_deep_or_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"input_ids": ' + b"[" * 200_000 + b"\n" + b'{"input_ids": [1], "id": "\xff"}\n')
    text = refused(path)
    assert f"{path}:1: " in text
    assert f"{path}:2: not JSON" in text


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("nonsense\n" * 50)
    text = refused(path)
    assert (text.count("not JSON"), "and 30 more" in text) == (20, True)


def test_masks_and_ids_are_optional(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    lines = ['{"input_ids": [1, 2]}', '{"input_ids": [3], "loss_mask": [false], "id": 12}']
    path.write_text("\n".join([*lines, '{"input_ids": [3], "id": "\\u001b[2J"}']))
    corpus = Corpus(str(path), VOCAB)
    rows = [corpus.row(index) for index in range(3)]
    corpus.close()
    assert [(row.index, row.id, row.loss_mask) for row in rows] == [(0, "0", [1, 1]), (1, "12", [0]), (2, "2", [1])]


def test_a_file_that_is_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in refused(tmp_path / "gone")
    assert "directory" in refused(tmp_path)
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    assert "there is no sample in it" in refused(empty)
    monkeypatch.setattr(corpus_module, "MAX_LINE_BYTES", 100)
    empty.write_bytes(b"x" * 1000)
    assert f"{empty}:1: over" in refused(empty)


def test_a_corpus_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 4]}\n')
    corpus = Corpus(str(path), VOCAB)
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 4, 5]}\n')
    with pytest.raises(CorpusError, match="sample 1 changed"):
        corpus.row(1)
    corpus.close()
