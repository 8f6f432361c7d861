"""A folder as machines leave it: what is a sample, what is a fault of the folder, and what is neither."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING

from backend.agent.shards.audit.faults import runs_of
from tests import auditing
from tests.auditing import age, codes, sample, write

if TYPE_CHECKING:
    from pathlib import Path

ROWS = "rows_0-2000"


def test_numbers_are_told_in_runs() -> None:
    assert runs_of([0, 1, 2, 5, 7, 8]) == ["0-2 (3)", "5", "7-8 (2)"]


def test_holes_and_doubles(tmp_path: Path) -> None:
    for index in (0, 1, 2, 5, 9):
        write(tmp_path, index)
    shutil.copy2(tmp_path / ROWS / "data_1.ckpt", tmp_path / "data_1.ckpt")
    os.link(tmp_path / ROWS / "data_2.ckpt", tmp_path / ROWS / "data_3.ckpt")
    write(tmp_path, 2004).rename(tmp_path / ROWS / "data_2004.ckpt")
    found = auditing.audit(tmp_path)
    runs = [text.partition(":")[0] for text in found["faults"]["missing-id"]["first"]]
    assert runs == ["3-4 (2)", "6-8 (3)", "10-2003 (1994)"]
    assert "id-twice" in codes(found, f"{ROWS}/data_1.ckpt") | codes(found, "data_1.ckpt")
    assert codes(found, f"{ROWS}/data_3.ckpt") == {"same-file"}
    assert codes(found, f"{ROWS}/data_2004.ckpt") == {"misplaced"}


def test_what_is_no_sample_and_what_a_writer_left(tmp_path: Path) -> None:
    for index in range(4):
        write(tmp_path, index)
    rows = tmp_path / ROWS
    good = (rows / "data_0.ckpt").read_bytes()
    for name in ("data_6.ckpt.tmp", ".data_7.ckpt.part", "data_01.ckpt", "data_0 (1).ckpt", "._data_0.ckpt"):
        (rows / name).write_bytes(good[:900])
        age(rows / name)
    for name in (".DS_Store", ".nfs00000001", "data_2.ckpt~", "notes.txt"):
        (rows / name).write_bytes(b"x")
    (tmp_path / "vocab").mkdir()
    shutil.copy2(rows / "data_0.ckpt", tmp_path / "vocab" / "vocab_mapping.pt")
    (rows / "data_10.ckpt").mkdir()
    os.mkfifo(rows / "data_9.ckpt")
    for link, to in (("loop", ".."), ("data_8.ckpt", "/nonexistent/x"), ("data_12.ckpt", "data_12.ckpt")):
        (rows / link).symlink_to(to)
    (tmp_path / "rows_2000-4000").symlink_to(rows)
    found = auditing.audit(tmp_path)
    assert found["files"] == 4 and found["others"] == 6
    for name in ("data_6.ckpt.tmp", ".data_7.ckpt.part"):
        assert codes(found, f"{ROWS}/{name}") == {"leftover"}
    for name in ("data_01.ckpt", "data_0 (1).ckpt"):
        assert codes(found, f"{ROWS}/{name}") == {"odd-name"}
    for name in ("data_9.ckpt", "data_10.ckpt"):
        assert codes(found, f"{ROWS}/{name}") == {"not-a-file"}
    for name in ("data_8.ckpt", "data_12.ckpt"):
        assert codes(found, f"{ROWS}/{name}") == {"dangling-link"}
    assert codes(found, f"{ROWS}/loop", "warning") == {"link-folder"} == codes(found, "rows_2000-4000")
    assert codes(found) == set()


def test_formats_are_not_mixed_and_json_is_json(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, suffix=".pt")
    (tmp_path / "data_config.json").write_text("{")
    (tmp_path / "sample_lengths.json").write_text("[]")
    (tmp_path / "journal.jsonl").write_text("{}\n{}\n")
    found = auditing.audit(tmp_path)
    assert "format-mix" in codes(found)
    assert codes(found, "data_config.json") == {"bad-json"} == codes(found, "sample_lengths.json")
    assert codes(found, "journal.jsonl") == {"bad-journal"}


def test_an_empty_folder_has_no_shards_and_none_is_a_usage_error(tmp_path: Path) -> None:
    assert codes(auditing.audit(tmp_path)) == {"no-shards"}
    process = auditing.start(tmp_path / "nothing")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2 and "is no folder" in err
    process = auditing.start(tmp_path, "--root", "/usr")
    assert process.communicate(timeout=30) and process.returncode == 2


def test_a_file_that_is_being_written_is_no_fault(tmp_path: Path) -> None:
    for index in range(3):
        write(tmp_path, index)
    young, locked = write(tmp_path, 3), write(tmp_path, 4)
    for path in (young, locked):
        path.write_bytes(path.read_bytes()[:500])
    age(locked)
    (tmp_path / ROWS / "data_5.ckpt.tmp").touch()
    with (tmp_path / ROWS / "data_4.ckpt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = auditing.audit(tmp_path)
    assert found["ok"] and found["remarks"]["in-flight"]["count"] == 3
    for path in (young, tmp_path / ROWS / "data_5.ckpt.tmp", tmp_path / ROWS / "data_4.ckpt.lock"):
        age(path)
    found = auditing.audit(tmp_path)
    assert found["faults"]["leftover"]["count"] == 2 and found["faults"]["truncated"]["count"] == 2


def test_files_named_by_conversation_are_samples_too(tmp_path: Path) -> None:
    for index in range(5):
        write(tmp_path, index).rename(tmp_path / f"conversation-{index:03x}.pt")
    (tmp_path / ROWS).rmdir()
    bad = tmp_path / "conversation-004.pt"
    bad.write_bytes(bad.read_bytes()[:-1])
    age(bad)
    found = auditing.audit(tmp_path)
    assert found["files"] == 5 and codes(found, bad.name) == {"truncated"} and codes(found) == set()


def test_samples_that_the_corpus_holds_twice_may_be_there_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    same = {"input_ids": [7, 8, 9, 10, 11], "loss_mask": [1] * 5}
    for index in range(4):
        write(out, index, sample(7, input_ids=auditing.ids(same["input_ids"])) if index in (1, 3) else None)
    assert "duplicate-ids" in auditing.audit(out)["faults"]
    rows = [{"input_ids": [index * 7, *range(10, 14)]} if index % 2 == 0 else same for index in range(4)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\ufeff\n" + "".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = auditing.audit(out, "--corpus", str(corpus))
    assert found["ok"] and found["corpus_compared"], found["faults"]
    rows[0]["input_ids"][0], rows[2]["loss_mask"] = 5, [1, 1, 1, 1, 0]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    found = auditing.audit(out, "--corpus", str(corpus))
    assert [next(iter(codes(found, f"{ROWS}/data_{index}.ckpt")), "") for index in (0, 2)] == [
        "other-ids",
        "other-mask",
    ]
    assert "no-such-sample" in codes(found, f"{ROWS}/data_3.ckpt")
