"""Datasets as people have them (cases D1, D3, D6): how lines end, how turns are spelled, what masks train on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.preparing import answer, corpus, lines, manifest, notes, prepare, prepared, talk, write_lines

if TYPE_CHECKING:
    from pathlib import Path


def human(*values: Any, **more: Any) -> dict[str, Any]:
    """Return a record in ShareGPT's words, the human first."""
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[n % 2], "value": v} for n, v in enumerate(values)], **more}


# D1: lines

TEXTS = [
    "plain",
    "a\u2028b\u2029c",
    "a\x85b",
    "at the end of a CRLF line",
    "\x00\t\x0b\x1c",
    "x" * 100_000,
    "no LF after this",
]


@pytest.fixture
def odd_lines(tmp_path: Path) -> Path:
    raw = [
        json.dumps(talk(f"q{n}", text, id=f"t{n}"), ensure_ascii=n != 1 and n != 2).encode()
        for n, text in enumerate(TEXTS)
    ]
    cut = json.dumps(talk("q", "cut", id="cut")).encode()[:-7]
    blank = b"\n   \n"
    data = b"\xef\xbb\xbf" + raw[0] + b"\n" + raw[1] + b"\n" + raw[2] + b"\n" + blank + raw[3] + b"\r\n" + cut + b"\n"
    path = tmp_path / "lines.jsonl"
    path.write_bytes(data + raw[4] + b"\n" + raw[5] + b"\n" + raw[6])
    return path


def test_lines_end_at_lf_alone(odd_lines: Path, tmp_path: Path) -> None:
    prepared(tmp_path / "out", "--skip-bad", "--order", "given", odd_lines)
    assert [(s["id"], answer(s)) for s in corpus(tmp_path / "out")] == [(f"t{n}", text) for n, text in enumerate(TEXTS)]


def test_a_cut_record_is_refused_by_file_and_line(
    odd_lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert prepare(out, odd_lines) == 1
    assert f"{odd_lines}:7: not JSON" in capsys.readouterr().err
    assert not list(out.glob("*.json*")), "a refusal writes nothing"


# D3: shapes

USED = [
    human("q", "a", id=1),
    human("q2", "a2", "q3", "a3", id="1", system="be brief"),
    {"id": 3, "conversations": [{"from": "human", "value": "q"}, {"role": "assistant", "content": "mixed"}]},
    {"id": 4, "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'},
                                {"from": "observation", "value": "r"}, {"from": "gpt", "value": "used a tool"}]},
    talk("no id", "a"),
    talk("a bad name", "a", id="../../etc/\x00" + "y" * 300),
    {"id": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "in "},
                                                               {"type": "text", "text": "two"}]},
                                 {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
    {"prompt": "q", "response": "pair"},
    {"instruction": "sum", "input": "1 2", "output": "alpaca"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "lists"}]},
]  # fmt: skip
REPORTED = [
    {"conversations": [{"from": "gpt", "value": "first"}, *human("q", "a")["conversations"]]},
    {"conversations": [{"from": "human", "value": "one"}, *human("two", "a")["conversations"]]},
    {**talk("m", "m"), **human("c", "c")},
    human("q", "a", "a question without an answer"),
]  # fmt: skip
REFUSED = [
    ({"conversations": []}, "empty"),
    ({"conversations": [{"from": "system", "value": "s"}]}, "only a system prompt"),
    ({"conversations": [{"from": "alien", "value": "q"}, {"from": "gpt", "value": "a"}]}, "unknown role 'alien'"),
    (human(None, None), "no content"),
    (human("q"), "no turn of the assistant"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
    (talk("q", ""), "says anything"),
    (talk("q", "\ud800"), "surrogate"),
    ({"text": "no turns"}, "neither turns"),
    ({"messages": ["q", "a"]}, "no object with a role"),
    (["q", "a"], "not a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize("record", USED)
def test_every_dialect_is_read(record: dict[str, Any], tmp_path: Path) -> None:
    found = prepared(tmp_path / "out", write_lines(tmp_path / "d.jsonl", [record]))
    assert (found["samples"], found["reported"]) == (1, 0)
    assert answer(corpus(tmp_path / "out")[0])


@pytest.mark.parametrize("record", REPORTED)
def test_what_is_odd_is_kept_and_reported(record: dict[str, Any], tmp_path: Path) -> None:
    found = prepared(tmp_path / "out", write_lines(tmp_path / "d.jsonl", [record]))
    assert (found["samples"], found["reported"]) == (1, 1)
    assert [(note["at"], note["what"]) for note in notes(tmp_path / "out")] == [(f"{tmp_path}/d.jsonl:1", "reported")]


@pytest.mark.parametrize(("record", "why"), REFUSED)
def test_what_cannot_be_used_is_refused_with_its_reason(
    record: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "d.jsonl", [talk("q", "a"), record])
    assert prepare(tmp_path / "out", path) == 1
    said = capsys.readouterr().err
    assert f"{path}:2: " in said and why in said and "--skip-bad" in said
    assert prepared(tmp_path / "out", "--skip-bad", path)["refused"] == 1
    assert len(corpus(tmp_path / "out")) == 1


def test_clashing_ids_and_a_conversation_that_is_there_twice(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [talk("q", "a", id=1), talk("q2", "a", id="1")])
    two = write_lines(
        tmp_path / "two.jsonl", [talk("other", "text", id="1"), human("q", "a", id="again"), talk("x", "y", id="two:1")]
    )
    array = tmp_path / "array.json"
    array.write_text(json.dumps([talk("an array", "not lines", id="arr")], indent=2))
    found = prepared(tmp_path / "out", "--order", "given", one, two, array)
    names = [sample["id"] for sample in corpus(tmp_path / "out")]
    assert names == ["1", "one:1", "two:1", "two:two:1", "arr"]
    assert [source["name"] for source in found["sources"]] == ["one", "two", "array"]
    assert (found["duplicate"], found["renamed"]) == (1, 3)
    assert {note["at"] for note in notes(tmp_path / "out") if note["what"] == "duplicate"} == {f"{two}:2"}
    assert prepared(tmp_path / "all", "--keep-duplicates", one, two, array)["samples"] == 6


def test_a_weird_id_is_no_name_of_a_file_and_harmless_on_a_screen(tmp_path: Path) -> None:
    prepared(tmp_path / "out", write_lines(tmp_path / "d.jsonl", [talk("q", "a", id="../x\x00\x1b[31m" + "y" * 300)]))
    name = corpus(tmp_path / "out")[0]["id"]
    assert name.isprintable() and len(name) <= 200


# D6: masks, at most 64 tokens, a vocabulary of 263

MASKS = [
    ("kept", {"input_ids": list(range(97, 117)), "loss_mask": [0] * 10 + [1] * 10}),
    ("kept", {"input_ids": [97] * 6, "loss_mask": [False, True] * 3}),
    ("cut", {"input_ids": [97] * 80, "loss_mask": [0] * 50 + [1] * 30}),
    ("untrained", {"input_ids": [97] * 20, "loss_mask": [0] * 20}),
    ("untrained", {"input_ids": [97] * 80, "loss_mask": [0] * 70 + [1] * 10}),
    ("untrained", {"input_ids": [97] * 5, "loss_mask": [0, 0, 0, 0, 1]}),
    ("untrained", talk("q" * 200, "a")),
    ("cut", talk("q", "a" * 200)),
    ("kept", talk("q", "a")),
    ("refused", {"input_ids": [97] * 20, "loss_mask": [1] * 19}),
    ("refused", {"input_ids": [97] * 20, "loss_mask": [1] * 21}),
    ("refused", {"input_ids": [97] * 4, "loss_mask": [0, 2, 2, 2]}),
    ("refused", {"input_ids": [97, 263], "loss_mask": [1, 1]}),
    ("refused", {"input_ids": [97, -100], "loss_mask": [1, 1]}),
    ("refused", {"input_ids": [97.0, 98.5], "loss_mask": [1, 1]}),
    ("refused", {"input_ids": [[97, 98]], "loss_mask": [[1, 1]]}),
    ("refused", {"input_ids": [], "loss_mask": []}),
    ("refused", talk("q", "")),
]


@pytest.mark.parametrize(("want", "record"), MASKS)
def test_what_a_mask_trains_on(want: str, record: dict[str, Any], tmp_path: Path) -> None:
    good = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    words = ["--vocab-size", 263, "--max-tokens", 64, write_lines(tmp_path / "d.jsonl", [good, record])]
    assert prepare(tmp_path / "strict", *words) == (0 if want in ("kept", "cut") else 1)
    found = prepared(tmp_path / "out", "--skip-bad", "--skip-untrained", *words)
    assert found["sources"][0][want] == (2 if want == "kept" else 1)
    samples = corpus(tmp_path / "out")
    assert len(samples) == 1 + (want in ("kept", "cut")) == found["samples"]
    assert all(any(s["loss_mask"][:-1]) and len(s["input_ids"]) <= 64 for s in samples)


def test_the_whole_of_the_masks_is_accounted_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [record for _, record in MASKS])
    prepared(tmp_path / "out", "--skip-bad", "--skip-untrained", "--vocab-size", 263, "--max-tokens", 64, path)
    wants = [want for want, _ in MASKS]
    source = manifest(tmp_path / "out")["sources"][0]
    assert {want: source[want] for want in wants} == {want: wants.count(want) for want in wants}
    assert source["records"] == len(MASKS)
    told = {note["at"] for note in lines(tmp_path / "out" / "notes.jsonl")}
    assert told == {f"{path}:{n}" for n, want in enumerate(wants, 1) if want != "kept"}
