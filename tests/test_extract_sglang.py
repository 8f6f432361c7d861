"""An extraction from a server: every fault of a request is tried again, listed where it stays, and never written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction import absence, durable, extract, ledger, pipeline, progress, watch
from backend.extraction.bfloat16 import bfloat16_words, to_float32
from backend.extraction.engines.sglang import ServerGone
from backend.shardfmt import layout
from backend.wire import Progress, from_dict
from tests.extracting import check_folder, finish, journal, read_shard, start, write_corpus
from tests.fakeserver import ENGINE, RUN, Fake, Faults, serving
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Result = tuple[int, dict[str, Any]]


def run(server: Fake, corpus: Path, out: Path, *more: str) -> int:
    """Extract in this process."""
    argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(corpus), "--out", str(out), *more]
    return extract.main(argv)


@pytest.fixture
def extracted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return what extracts a corpus of some samples and gives exit code and result."""
    monkeypatch.setattr("backend.extraction.flights.FIRST_PAUSE_S", 0.01)

    def extracted(faults: Faults, *more: str, samples: int = 12, **info: Any) -> Result:
        write_corpus(tmp_path / "c.jsonl", samples)
        with serving(tmp_path, faults, **info) as server:
            code = run(server, tmp_path / "c.jsonl", tmp_path / "out", "--json", *more)
        return code, json.loads(capsys.readouterr().out)

    return extracted


def config(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / layout.CONFIG_NAME).read_bytes())
    return found


def told(run_dir: Path) -> Progress:
    path = run_dir / "progress.json"
    return from_dict(Progress, json.loads(path.read_bytes())) if path.exists() else Progress(0.0, "")


def staged(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder / "staging") if name.startswith(f"{RUN}-")]


def test_a_whole_extraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 60)
    with serving(tmp_path) as server:
        assert run(server, tmp_path / "c.jsonl", tmp_path / "out", "--json", "--concurrency", "8") == 0
        assert 2 <= server.most_in_flight <= 8
    result = json.loads(capsys.readouterr().out)
    assert (result["state"], result["samples"], result["failed"], result["repeated"]) == ("done", 60, [], 0)
    check_folder(tmp_path / "out", records, ENGINE)
    assert staged(tmp_path) == []
    about = config(tmp_path / "out")
    assert (about["state"], about["engine"], about["capture_points"]) == ("complete", "sglang", [2, 4, 5])
    assert (about["server"]["version"], about["capture"]["effective_layers"]) == ("0.5.99", {"0": [2, 4, 5]})
    assert about["canary"]["head"].startswith("lm_head.weight gives the server's next token")
    assert about["model"].startswith("model sha256-16:")
    assert (about["failed"], about["failed_file"]) == ([], "")


def test_float32_states_are_rounded_to_bfloat16(tmp_path: Path) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 3)
    with serving(tmp_path, dtype="float32") as server:
        server.dtype = "float32"
        assert run(server, tmp_path / "c.jsonl", tmp_path / "out") == 0
    check_folder(tmp_path / "out", records, ENGINE)
    words = ENGINE.states(records[0]["input_ids"]).last
    assert np.array_equal(bfloat16_words(to_float32(words)), words)
    assert config(tmp_path / "out")["capture"]["dtype"] == "float32"


FAULTS = {
    "500": "the server answered 500: ",
    "400": "the server answered 400: ",
    "reset": "the connection to the server broke: ",
    "failed": "no slot became free",
    "lost": "the server answered, and no states came within 0.3 s",
    "short": "rows were captured of",
    "width": "wide, not 192 and 64",
    "nan": "last holds 1 NaN or infinite values, the first at [0, 3]",
    "ids": "the rows are of other tokens, from place",
    "garbage": "are too few for",
    "layers": "the effective layers are [3, 5, 6], not [2, 4, 5]",
    "wrong-id": "the server answered another request, other",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again(extracted: Callable[..., Result], tmp_path: Path, fault: str) -> None:
    """Once is overcome, always is listed, and both times every other sample is whole."""

    def plan(index: int, attempt: int) -> str:
        return fault if attempt and (index == 7 or (index == 3 and attempt == 1)) else ""

    faults = Faults(plan)
    code, result = extracted(faults, "--retries", "2", "--record-wait", "0.3")
    final = fault == "400"
    lost = [3, 7] if final else [7]
    late = fault == "wrong-id"  # the states were there before the answer: they are checked by themselves
    if late and code == 0:
        lost = []
    assert (code, result["samples"]) == (1 if lost else 0, 12 - len(lost))
    assert [failed["index"] for failed in result["failed"]] == lost
    assert all(FAULTS[fault] in failed["reason"] for failed in result["failed"])
    if lost:
        assert result["failed"][-1]["attempts"] == (1 if final else 3)
        lines = [json.loads(line) for line in (tmp_path / "out" / layout.FAILED_NAME).read_text().splitlines()]
        assert [(line["index"], line["id"]) for line in lines] == [(index, f"s{index}") for index in lost]
        assert config(tmp_path / "out")["failed"] == result["failed"]
    assert staged(tmp_path) == []
    assert len(journal(tmp_path / "out")) == 12 - len(lost)
    assert list((tmp_path / "out").glob("rows_*/.*")) == []
    assert len(set(faults.seen)) == len(faults.seen), "a rid was used twice"


def test_what_was_listed_is_extracted_by_the_next_run(extracted: Callable[..., Result], tmp_path: Path) -> None:
    code, _ = extracted(Faults(lambda index, attempt: "500" if attempt and index in (2, 5) else ""), "--retries", "0")
    assert code == 1
    out = tmp_path / "out"
    code, result = extracted(Faults(lambda index, attempt: "500" if attempt and index == 5 else ""),
                             "--retries", "0", "--only", str(out / layout.FAILED_NAME))  # fmt: skip
    assert (code, result["samples_wanted"], result["samples"]) == (1, 2, 1)
    assert [json.loads(line)["index"] for line in (out / layout.FAILED_NAME).read_text().splitlines()] == [5]
    code, result = extracted(Faults())
    assert (code, result["resumed"], result["samples"]) == (0, 11, 12)
    assert not (out / layout.FAILED_NAME).exists()


def test_a_server_that_hangs_is_timed_out(extracted: Callable[..., Result]) -> None:
    faults = Faults(lambda index, attempt: "hang" if attempt and index == 4 else "")
    code, result = extracted(faults, "--retries", "1", "--request-timeout", "0.4")
    assert (code, result["failed"][0]["reason"]) == (1, "the server did not answer within 0.4 s")


def test_the_server_went_away_for_good(
    extracted: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "PROBE_EVERY_S", 0.05)

    def gone(engine: Any) -> None:
        raise ServerGone("Connection refused")

    monkeypatch.setattr("backend.extraction.engines.sglang.SglangEngine.alive", gone)
    faults = Faults(lambda index, attempt: "reset" if attempt and index == 4 else "")
    code, result = extracted(faults, "--server-wait", "0.3", "--concurrency", "2")
    assert (code, result["state"], result["failed"]) == (1, "failed", [])
    assert "has been away for 0.3 s (Connection refused)" in result["message"]
    assert 0 < len(journal(tmp_path / "out")) == result["samples"] < 12
    assert config(tmp_path / "out")["state"] == "incomplete"


def test_a_server_that_comes_back_is_gone_on_with(tmp_path: Path) -> None:
    """Killed in the middle and started again on its port; the extraction waits and misses nothing."""
    records = write_corpus(tmp_path / "c.jsonl", 150)
    first = served(tmp_path, 0)
    assert first.stdout is not None
    url = first.stdout.readline().strip()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    client = start(tmp_path / "c.jsonl", tmp_path / "out", "--engine", "sglang", "--server", url, run_dir=run_dir)
    until(lambda: len(journal(tmp_path / "out")) > 10)
    end(first)
    until(lambda: "the server does not answer" in told(run_dir).message)
    second = served(tmp_path, int(url.rpartition(":")[2]), "staging2")  # each launch has a folder of its own
    try:
        code, _, errors = finish(client)
    finally:
        end(second)
    assert (code, errors) == (0, "")
    check_folder(tmp_path / "out", records, ENGINE, every=5)


def test_a_sample_that_the_server_dies_of_is_found_out(
    extracted: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is away for a moment whenever sample 4 comes; those in flight beside it are not blamed."""
    monkeypatch.setattr(absence, "PROBE_EVERY_S", 0.02)
    away = [0]

    def plan(index: int, attempt: int) -> str:
        if attempt and index == 4:
            away[0] = 2
        return "reset" if attempt and away[0] else ""

    def alive(engine: Any) -> None:
        if away[0]:
            away[0] -= 1
            raise ServerGone("Connection refused")

    monkeypatch.setattr("backend.extraction.engines.sglang.SglangEngine.alive", alive)
    code, result = extracted(Faults(plan, delay_s=0.02), "--concurrency", "4", "--retries", "1")
    assert (code, result["samples"]) == (1, 11)
    assert [(failed["index"], failed["attempts"]) for failed in result["failed"]] == [(4, 3)]
    assert "the server goes away whenever it gets this sample, also alone" in result["failed"][0]["reason"]
    check = [line["index"] for line in journal(tmp_path / "out")]
    assert sorted(check) == [index for index in range(12) if index != 4]


def served(folder: Path, port: int, staging: str = "staging") -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.fakeserver", str(folder), str(port), "0.02", staging]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_stop_finishes_what_is_in_flight(tmp_path: Path) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 80)
    faults = Faults(delay_s=0.1)
    with serving(tmp_path, faults) as server:
        client = start(tmp_path / "c.jsonl", tmp_path / "out", "--engine", "sglang", "--server", server.url,
                       "--concurrency", "8", "--json")  # fmt: skip
        until(lambda: len(journal(tmp_path / "out")) > 5)
        client.terminate()
        code, printed, _ = finish(client)
        result = json.loads(printed)
        assert (code, result["state"]) == (128 + signal.SIGTERM, "stopped")
        asked = {index for index, attempt in faults.seen if attempt}
        assert {line["index"] for line in journal(tmp_path / "out")} == asked
        assert len(asked) == result["samples"] < 80
        assert staged(tmp_path) == []
        faults.delay_s = 0.0
        assert run(server, tmp_path / "c.jsonl", tmp_path / "out") == 0
    check_folder(tmp_path / "out", records, ENGINE, every=10)


def test_a_stop_gives_up_what_does_not_end(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 20)
    faults = Faults(lambda index, attempt: "hang" if attempt and index >= 10 else "")
    with serving(tmp_path, faults) as server:
        client = start(tmp_path / "c.jsonl", tmp_path / "out", "--engine", "sglang", "--server", server.url,
                       "--drain", "0.2", "--json")  # fmt: skip
        until(lambda: len(journal(tmp_path / "out")) == 10)
        client.terminate()
        code, printed, _ = finish(client)
    assert (code, json.loads(printed)["samples"], staged(tmp_path)) == (128 + signal.SIGTERM, 10, [])


def test_signals_at_any_moment_never_hold_up_the_end(tmp_path: Path) -> None:
    """A get with a timeout on queue.SimpleQueue waits for ever where a signal comes at its deadline (CPython 3.11)."""
    write_corpus(tmp_path / "c.jsonl", 20)
    faults = Faults(lambda index, attempt: "hang" if attempt and index >= 10 else "")
    with serving(tmp_path, faults) as server:
        client = start(tmp_path / "c.jsonl", tmp_path / "out", "--engine", "sglang", "--server", server.url,
                       "--drain", "3", "--json")  # fmt: skip
        until(lambda: len(journal(tmp_path / "out")) == 10)

        sent = 0

        def ended() -> bool:
            nonlocal sent
            sent += 1
            if sent < 600:  # then it drains still
                client.terminate()
            return client.poll() is not None

        until(ended, 40.0, 0.0005)
        code, _, _ = finish(client)
    assert code == 128 + signal.SIGTERM


def test_a_full_disk_pauses_and_goes_on(
    extracted: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, real, calls, seen = tmp_path / "run", ledger.free_bytes, [0], []
    run_dir.mkdir()
    lock = threading.Lock()

    def reserve(fd: int, at: int, size: int) -> None:
        with lock:
            calls[0] += 1
            if 10 <= calls[0] < 25:
                raise OSError(errno.ENOSPC, "No space left on device")

    def free(path: str) -> int:
        seen.append((told(run_dir).state, told(run_dir).message))
        return real(path)

    monkeypatch.setenv(progress.RUN_DIR, str(run_dir))
    monkeypatch.setattr(pipeline, "FULL_POLL_S", 0.05)
    monkeypatch.setattr(ledger, "free_bytes", free)
    monkeypatch.setattr(durable.os, "posix_fallocate", reserve)
    code, result = extracted(Faults(), "--concurrency", "6", "--retries", "0", samples=40)
    assert (code, result["samples"]) == (0, 40)
    assert any(state == "paused" and "disk full (No space left on device)" in message for state, message in seen)
    assert (told(run_dir).state, told(run_dir).message) == ("done", "")
    check_folder(tmp_path / "out", write_corpus(tmp_path / "c.jsonl", 40), ENGINE)


def test_a_disk_is_not_filled_to_the_brim(
    extracted: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the next sample has no room, nothing is sent until there is some."""
    looks = iter([1 << 30] * 3 + [1000] * 20)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(pipeline, "FULL_POLL_S", 0.02)
    monkeypatch.setattr(ledger, "free_bytes", lambda _: next(looks, 1 << 30))
    code, result = extracted(Faults(), "--concurrency", "2")
    assert (code, result["samples"], result["failed"]) == (0, 12, [])
    assert next(looks, None) is None, "the disk was not looked at"


def test_little_room_in_the_staging_folder_means_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "c.jsonl", 40)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    with serving(tmp_path, Faults(delay_s=0.01)) as server:
        server.info["forward_hooks"][0]["config"]["bound_bytes"] = 64_000
        assert run(server, tmp_path / "c.jsonl", tmp_path / "out", "--concurrency", "32") == 0
        assert server.most_in_flight <= 12  # of the shortest; 4 of mean length
        assert server.high_water <= 64_000
    assert len(journal(tmp_path / "out")) == 40


def test_a_stall_is_said(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 6)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    faults = Faults(lambda index, attempt: "hang" if attempt and index == 2 else "")
    with serving(tmp_path, faults) as server:
        client = start(tmp_path / "c.jsonl", tmp_path / "out", "--engine", "sglang", "--server", server.url,
                       "--stall", "0.3", "--drain", "0.1", run_dir=run_dir)  # fmt: skip
        until(lambda: "stalled: nothing has come for" in told(run_dir).message)
        assert (told(run_dir).state, told(run_dir).requests_in_flight) == ("running", 1)
        assert told(run_dir).staging_bound_bytes == 64 << 20
        assert told(run_dir).capture_wait_s == 0.25
        client.terminate()
        finish(client)


def test_what_an_earlier_reader_left_is_removed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 3)
    with serving(tmp_path) as server:
        for name in ("fake-old-5-1-20.states", "fake-old-6-1-20.failed", "other-old-5-1-20.states"):
            (server.staging / name).write_bytes(b"x")
        assert run(server, tmp_path / "c.jsonl", tmp_path / "out") == 0
        assert sorted(os.listdir(server.staging)) == [".fake.reader", "other-old-5-1-20.states", "rank0.json"]


def test_shards_may_be_called_pt(extracted: Callable[..., Result], tmp_path: Path) -> None:
    code, _ = extracted(Faults(), "--suffix", ".pt", samples=3)
    assert (code, sorted(path.name for path in (tmp_path / "out").glob("rows_*/*"))) == (
        0, ["data_0.pt", "data_1.pt", "data_2.pt"],
    )  # fmt: skip
    assert config(tmp_path / "out")["format"] == "torch zip, rows_A-B/data_N.pt"
    assert read_shard(tmp_path / "out/rows_0-2000/data_0.pt")["hidden_state"].shape[2] == 64
    code, result = extracted(Faults(), samples=3)
    assert (code, "another file suffix: '.pt', now '.ckpt'" in result["error"]) == (1, True)


def test_a_commit_that_ends_with_the_threads_is_counted(
    extracted: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop on a full disk does not wait for a commit in progress: what it made safe counts all the same."""
    real = pipeline.Pipeline._drain

    def hurried(self: pipeline.Pipeline) -> None:
        self._is_full("for the test", 1)
        real(self)

    monkeypatch.setattr(pipeline.Pipeline, "_drain", hurried)
    monkeypatch.setattr(pipeline.Pipeline, "_loop", stop_at_a_commit)
    code, result = extracted(Faults(), samples=30)
    assert result["samples"] == len(journal(tmp_path / "out")) >= 1
    assert (code, result["state"]) == (1, "failed")
    assert list((tmp_path / "out").glob("rows_*/.*")) == []


def stop_at_a_commit(self: pipeline.Pipeline, throttle: float | None) -> None:
    """Turn as `_loop` does, and leave in the middle of a commit."""
    while not self._committing:
        self._step()
        self._send(throttle)
    self._why = "left in the middle"
