"""Audits of our own extractions: clean, damaged, interrupted, and with the bad samples extracted again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from backend.agent import files as agent_files
from backend.agent.shards.audit import quarantine
from backend.agent.shards.audit.folder import Tree
from backend.extraction.engines import open_engine
from tests import auditing, extracting
from tests.auditing import codes
from tests.waiting import until

SAMPLES = 64
MOVED = (3, 17, 40)


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Extract once; tests take copies."""
    folder = tmp_path_factory.mktemp("extraction")
    records = extracting.write_corpus(folder / "corpus.jsonl", SAMPLES)
    code, _, err = extracting.finish(extracting.start(folder / "corpus.jsonl", folder / "out"))
    assert code == 0, err
    return folder, records


@pytest.fixture
def out(extraction: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    shutil.copytree(extraction[0] / "out", tmp_path / "out")
    for path in (tmp_path / "out").rglob("data_*"):
        auditing.age(path)
    return tmp_path / "out"


def shard(out: Path, index: int) -> Path:
    return out / f"rows_0-2000/data_{index}.ckpt"


def damage(out: Path) -> None:
    """Cut one file, flip a bit in another, and put a copy of a fourth in place of a third."""
    cut, flipped, mixed = (shard(out, index) for index in MOVED)
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    shutil.copy(shard(out, 41), mixed)
    for path in (cut, flipped, mixed):
        auditing.age(path)


def cache_of(home: Path) -> Path:
    [found] = (home / ".local/state/eightzeros/audits").glob("*/looks.jsonl")
    return found


# --- what is right, and what our own records say ----------------------------------------------------------------------


def test_a_clean_extraction_is_clean_and_an_audit_is_remembered(out: Path) -> None:
    found = auditing.audit(out, "--deep")
    assert found["ok"] and found["faults"] == {} and found["corpus_compared"]
    assert (found["files"], found["looked_at"], found["hidden_size"]) == (SAMPLES, SAMPLES, 64)
    again = auditing.audit(out)
    assert again["ok"] and (again["looked_at"], again["cached"]) == (0, SAMPLES)
    auditing.age(shard(out, 5), 50)
    assert auditing.audit(out, "--deep")["looked_at"] == 1
    assert auditing.audit(out, "--fresh")["looked_at"] == SAMPLES


def test_a_journal_that_a_crash_tore_and_listed_failures_are_no_faults(out: Path) -> None:
    journal, config = out / "journal.jsonl", out / "data_config.json"
    lines = journal.read_bytes().split(b"\n")
    [lost] = [line for line in lines[1:-1] if json.loads(line)["index"] == 9]
    lines.remove(lost)
    journal.write_bytes(b"\n".join(lines) + lost[:20])
    shard(out, 9).unlink()
    (out / "failed.jsonl").write_text(json.dumps({"index": 9, "reason": "NaN"}) + "\n")
    config.write_text(json.dumps({**json.loads(config.read_text()), "state": "incomplete"}))
    found = auditing.audit(out)
    assert found["ok"] and found["excused"] == 1, found["faults"]
    (out / "failed.jsonl").unlink()
    found = auditing.audit(out)
    assert found["ok"] and "not-extracted" in found["remarks"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "state": "complete"}))
    assert codes(auditing.audit(out)) == {"missing-id"}


def test_files_are_held_against_the_journal_and_the_corpus(
    out: Path, extraction: tuple[Path, list[dict[str, Any]]]
) -> None:
    journal = out / "journal.jsonl"
    header, *lines = (json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1])
    by_index = {line["index"]: line for line in lines}
    by_index[1]["bytes"] += 1
    by_index[2]["crc32"] ^= 1
    by_index[3]["tokens"] += 1
    by_index[4]["id"] = "somebody"
    del by_index[5]
    shard(out, 6).unlink()
    header["corpus"] = str(out / "moved.jsonl")
    shutil.copy(extraction[0] / "corpus.jsonl", out / "moved.jsonl")
    journal.write_text("".join(json.dumps(line) + "\n" for line in (header, *by_index.values())))
    found = auditing.audit(out, "--deep")
    wanted = {1: "journal-bytes", 2: "journal-crc", 3: "journal-tokens", 4: "other-id", 5: "not-committed"}
    for index, code in wanted.items():
        assert codes(found, f"rows_0-2000/data_{index}.ckpt") == {code}
    assert codes(found) == {"missing-id"}
    with (out / "moved.jsonl").open("a") as file:
        file.write('{"input_ids": [1]}\n')
    assert "corpus-changed" in codes(auditing.audit(out))
    (out / "moved.jsonl").unlink()
    assert "corpus-absent" in auditing.audit(out)["remarks"]


# --- interrupted ------------------------------------------------------------------------------------------------------


def many(folder: Path, files: int) -> Path:
    auditing.write(folder, 0)
    for index in range(1, files):
        auditing.age(shutil.copyfile(shard(folder, 0), shard(folder, index)))
    return folder


MANY = 2000
"""So many that an audit is still at it when it is stopped."""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_audit_goes_on_from_what_it_had_seen(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    folder = many(tmp_path / "shards", MANY)
    process = auditing.start(folder, "--deep")
    until(lambda: list((home / ".local/state/eightzeros/audits").glob("*/looks.jsonl")))
    until(lambda: cache_of(home).read_bytes().count(b"\n") > 20)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    with cache_of(home).open("ab") as file:
        file.write(b'["rows_0-2000/data_1')  # a line that the kill tore
    found = auditing.audit(folder, "--deep")
    assert found["files"] == MANY and 20 <= found["cached"] == MANY - found["looked_at"] < MANY
    assert auditing.audit(folder, "--deep")["cached"] == MANY


def test_two_audits_of_one_folder_do_not_meet(tmp_path: Path, home: Path) -> None:
    folder = many(tmp_path / "shards", 2)
    auditing.audit(folder)
    with (cache_of(home).parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = auditing.run(folder)
    assert status == 2 and "under way" in err


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_quarantined_samples_and_no_others_are_extracted_again(
    out: Path, tmp_path: Path, extraction: tuple[Path, list[dict[str, Any]]]
) -> None:
    damage(out)
    kept = {line["index"]: line for line in extracting.journal(out) if line["index"] not in MOVED}
    found = auditing.audit(out, "--deep", "--quarantine", str(tmp_path / "bad"))
    moved = found["quarantine"]
    assert (moved["files"], moved["given_back"], moved["left"]) == (3, 3, [])
    listed = [json.loads(line) for line in Path(moved["manifest"]).read_text("ascii").splitlines()]
    assert sorted(line["sample"] for line in listed) == list(MOVED)
    for line in listed:
        assert os.path.exists(line["to"]) and not os.path.exists(line["from"]) and line["why"]
    assert {line["index"]: line for line in extracting.journal(out)} == kept
    config = json.loads((out / "data_config.json").read_text())
    assert (config["state"], config["samples"]) == ("incomplete", SAMPLES - 3)
    assert auditing.audit(out, "--deep")["ok"]
    code, told, err = extracting.finish(extracting.start(extraction[0] / "corpus.jsonl", out, "--json"))
    assert code == 0, err
    assert json.loads(told)["resumed"] == SAMPLES - 3
    for name in ("journal.jsonl", "data_config.json"):
        assert (out / name).stat().st_mode & 0o777 == 0o644
    extracting.check_folder(out, extraction[1], open_engine("embedded"))
    assert auditing.audit(out, "--deep")["ok"]


def test_nothing_is_moved_while_an_extraction_writes_or_to_a_bad_place(out: Path, tmp_path: Path) -> None:
    damage(out)
    with (out / ".eightzeros.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        process = auditing.start(out, "--quarantine", str(tmp_path / "bad"))
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2 and "4711" in err
    for place in (out / "bad", "/dev/shm/eightzeros-elsewhere"):
        process = auditing.start(out, "--quarantine", str(place))
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2 and ("inside" in err or "another filesystem" in err)
    assert all(shard(out, index).exists() for index in MOVED)


class _Crash(BaseException):
    pass


def test_a_crash_at_any_step_of_a_quarantine_leaves_a_folder_that_resumes(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the journal names is there as it was committed, or gone: both a resume understands."""
    calls = [0]

    def stop_at(step: int) -> None:
        for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir")):
            real = getattr(module, name)

            def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == step:
                    raise _Crash
                return real(*args, **kwargs)

            monkeypatch.setattr(module, name, counted)

    for step in range(1, 40):
        copy = tmp_path / f"copy{step}"
        shutil.copytree(out, copy)
        bad = [file for file in Tree(str(copy)).walk().files if file.sample in MOVED]
        place = quarantine.Quarantine(str(copy), str(tmp_path / f"bad{step}"))
        calls[0] = 0
        with monkeypatch.context():
            stop_at(step)
            try:
                place.move(bad, {})
                ended = True
            except _Crash:
                ended = False
            monkeypatch.undo()
        lines = extracting.journal(copy)
        named = {line["index"] for line in lines}
        for line in lines:
            path = copy / line["file"]
            assert not path.exists() or zlib.crc32(path.read_bytes()) == line["crc32"]
        gone = {index for index in range(SAMPLES) if not shard(copy, index).exists()}
        assert gone <= set(MOVED) and set(range(SAMPLES)) - named <= gone
        state = json.loads((copy / "data_config.json").read_text())["state"]
        assert state == "incomplete" or not gone
        shutil.rmtree(copy)
        if ended:
            assert step > 12 and named == set(range(SAMPLES)) - set(MOVED)
            return
    raise AssertionError("a quarantine of three files has fewer steps than this")


def test_what_changed_since_it_was_looked_at_is_left(out: Path, tmp_path: Path) -> None:
    bad = [file for file in Tree(str(out)).walk().files if file.sample in MOVED]
    auditing.age(shard(out, MOVED[0]), 10)
    told = quarantine.Quarantine(str(out), str(tmp_path / "bad")).move(bad, {})
    assert told["files"] == 2 and "changed" in told["left"][0]
    assert agent_files.read_json(str(out / "data_config.json"))["samples"] == SAMPLES - 2
