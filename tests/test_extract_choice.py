"""Which samples are extracted and in which order, and the rehearsal that tells whether to go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from backend.extraction import extract, ledger
from backend.extraction.corpus import Corpus
from backend.extraction.selection import SelectionError, choose, rehearsed
from backend.shardfmt import layout
from tests.extracting import journal, write_corpus
from tests.fakeserver import Faults, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    lengths = [5, 3, 9, 3, 7]
    lines = [json.dumps({"input_ids": [1] * n, "id": f"s{i}"}) for i, n in enumerate(lengths)]
    (tmp_path / "small.jsonl").write_text("\n".join(lines))
    opened = Corpus(str(tmp_path / "small.jsonl"), 10)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("order", "limit", "chosen"),
    [
        ("corpus", None, [0, 1, 2, 3, 4]), ("corpus", 2, [0, 1]), ("shortest", None, [1, 3, 0, 4, 2]),
        ("longest", 3, [2, 4, 0]), ("seed:1", None, [2, 3, 4, 0, 1]),
    ],
)  # fmt: skip
def test_orders(corpus: Corpus, order: str, limit: int | None, chosen: list[int]) -> None:
    assert choose(corpus, None, order, limit) == chosen


def test_named_samples(corpus: Corpus, tmp_path: Path) -> None:
    assert choose(corpus, "s4, s1,#0", "corpus", None) == [0, 1, 4]
    assert choose(corpus, "s4,s1,#0", "longest", 2) == [4, 0]
    names = tmp_path / "names"
    names.write_text('s3\n\n#2\n{"index": 0, "reason": "x"}\n')
    assert choose(corpus, str(names), "corpus", None) == [0, 2, 3]
    with pytest.raises(SelectionError, match=r"not in the corpus: #5, s9; name ids"):
        choose(corpus, "s9,#5,s1", "corpus", None)


def test_a_rehearsal_takes_fifty_of_all_lengths() -> None:
    missing = list(range(0, 3000, 3))
    taken = rehearsed(missing)
    assert (len(taken), taken == sorted(taken), set(taken) <= set(missing)) == (50, True, True)
    assert taken == rehearsed(missing)
    assert taken[0] < 600 and taken[-1] > 2400
    assert rehearsed(missing[:20]) == missing[:20]


def run(corpus: Path, out: Path, *more: str) -> int:
    return extract.main(["--corpus", str(corpus), "--out", str(out), "--json", *more])


def test_only_what_is_named_is_extracted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c.jsonl", 12)
    assert run(tmp_path / "c.jsonl", tmp_path / "out", "--only", "s3,s7", "--order", "seed:4") == 0
    assert sorted(line["index"] for line in journal(tmp_path / "out")) == [3, 7]
    assert json.loads(capsys.readouterr().out)["samples_wanted"] == 2
    assert run(tmp_path / "c.jsonl", tmp_path / "out", "--only", "s3,nobody") == 1
    assert "not in the corpus: nobody" in json.loads(capsys.readouterr().out)["error"]


def test_the_order_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 12)
    assert run(tmp_path / "c.jsonl", tmp_path / "out", "--order", "shortest") == 0
    lengths = [len(records[line["index"]]["input_ids"]) for line in journal(tmp_path / "out")]
    assert lengths == sorted(lengths)
    assert extract.main(["--corpus", "c", "--out", "o", "--order", "seed:x"]) == 2
    assert "invalid order_of value" in capsys.readouterr().err


def verdict(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["rehearsal"]
    return found


def test_a_rehearsal_says_go_and_its_samples_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 80)
    with serving(tmp_path) as server:
        engine = ["--engine", "sglang", "--server", server.url]
        assert run(tmp_path / "c.jsonl", tmp_path / "out", *engine, "--rehearse") == 0
        found = verdict(capsys)
        assert (found["go"], found["reasons"], found["samples"], found["samples_left"]) == (True, [], 50, 30)
        there = {line["index"] for line in journal(tmp_path / "out")}
        left = [i for i in range(80) if i not in there]
        assert found["tokens_left"] == sum(len(records[i]["input_ids"]) for i in left)
        assert found["eta_s"] == pytest.approx(found["tokens_left"] / found["tokens_per_s"], rel=0.01)
        assert 0 < found["staging_high_bytes"] < found["staging_bound_bytes"] == 64 << 20
        assert run(tmp_path / "c.jsonl", tmp_path / "out", *engine) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] == 50
    written = sum((tmp_path / "out" / line["file"]).stat().st_size for line in journal(tmp_path / "out")[50:])
    assert found["bytes_needed"] == written


def test_a_rehearsal_of_the_embedded_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c.jsonl", 60)
    assert run(tmp_path / "c.jsonl", tmp_path / "out", "--rehearse") == 0
    assert verdict(capsys)["samples_left"] == 10


def test_a_disk_that_is_too_small_is_a_no_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c.jsonl", 60)
    monkeypatch.setattr(ledger, "free_bytes", lambda _: 1000)
    assert run(tmp_path / "c.jsonl", tmp_path / "out", "--rehearse") == 1
    found = verdict(capsys)
    assert (found["go"], found["samples"], len(found["reasons"])) == (False, 50, 1)
    assert "0.00 GiB free" in found["reasons"][0]


def test_a_sample_that_fails_is_a_no_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c.jsonl", 10)
    with serving(tmp_path, Faults(lambda index, attempt: "400" if attempt and index == 3 else "")) as server:
        engine = ["--engine", "sglang", "--server", server.url]
        assert run(tmp_path / "c.jsonl", tmp_path / "out", *engine, "--rehearse") == 1
    assert "1 samples could not be extracted, the first, 3, because: the server answered 400" in verdict(capsys)[
        "reasons"
    ][0]  # fmt: skip
    assert (tmp_path / "out" / layout.FAILED_NAME).exists()


def test_the_index_of_a_corpus_is_believed_for_the_same_bytes_only(tmp_path: Path) -> None:
    path, index = tmp_path / "c.jsonl", tmp_path / "index"
    records = write_corpus(path, 30)
    path.write_text(path.read_text() + "bad\n")
    first = Corpus(str(path), 4096, skip_bad=True)
    first.save_index(str(index))
    first.close()
    again = Corpus(str(path), 4096, skip_bad=True, index=str(index))
    assert [again.row(i).input_ids for i in range(30)] == [record["input_ids"] for record in records]
    assert (again.sha256, again.lines, again.skipped) == (first.sha256, 31, first.skipped)
    again.close()
    whole = index.read_bytes()
    for data in (
        b"",
        whole[:-1],
        whole[:50],
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:-40] + whole[-39:] + b"x",
    ):
        index.write_bytes(data)
        other = Corpus(str(path), 4096, skip_bad=True, index=str(index))
        assert len(other) == 30
        other.close()
    index.write_bytes(whole)
    path.write_text(json.dumps({"input_ids": [1, 2]}) + "\n")
    changed = Corpus(str(path), 4096, index=str(index))
    assert (len(changed), changed.row(0).input_ids) == (1, [1, 2])
    changed.close()
