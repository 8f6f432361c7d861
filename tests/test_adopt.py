"""Watching a run that was not started here: its folder, its server's log, its process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent import ops, procfs
from backend.agent.adopt.batches import Counter, parse
from backend.agent.adopt.folder import Folder, head_tokens
from backend.agent.adopt.logtail import LogTail
from backend.agent.ops import Context
from backend.agent.runs import RunStore
from backend.wire import Progress, Refused, Run
from tests import extracting
from tests.runstore import a_store, ended, machine
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = Path(__file__).with_name("cases") / "sglang_logs" / "batches.log"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make real shards once: 12 samples in a folder of ours."""
    folder = tmp_path_factory.mktemp("shards")
    extracting.write_corpus(folder / "corpus.jsonl", 12)
    code, _, err = extracting.finish(extracting.start(folder / "corpus.jsonl", folder / "out"))
    assert code == 0, err
    return folder / "out" / "rows_0-2000"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """Stand for the run of somebody else."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def tokens_of(folder: Path) -> int:
    return sum(head_tokens(str(path)) or 0 for path in folder.glob("data_*.ckpt"))


def age(path: Path, seconds: float = 1000.0) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def adopt(store: RunStore, **args: object) -> Run:
    agent = machine(sys.executable, "-m", "backend.agent.main")
    run = ops.TABLE["runs.adopt"].call(Context(agent, store), {"id": "adopt-1", **args})
    assert isinstance(run, Run)
    return run


def progress(store: RunStore, run_id: str = "adopt-1") -> Progress:
    run = store.get(run_id)
    assert run is not None
    return run.progress or Progress(0.0, "")


# --- the log ---------------------------------------------------------------------------------------------------------


def test_batch_lines_of_six_generations() -> None:
    lines = BATCHES.read_text().split("\n")
    read = [parse(line) for line in lines if line]
    assert [batch is not None for batch in read] == [True] * 9 + [False]
    first, decode, plain, fast, hybrid, expert, data = [batch for batch in read[:7] if batch is not None]
    assert (first.kind, first.new_tokens, first.cached_tokens, first.queue, first.running) == ("prefill", 310, 4, 6, 0)
    assert (first.tokens_per_s, first.rank) == (None, "TP0")
    assert (decode.kind, decode.queue, decode.running, decode.tokens_per_s) == ("decode", 6, 8, 45.5)
    assert (plain.new_tokens, plain.queue, plain.running, plain.rank) == (4000, 160, 28, "")
    assert (fast.new_tokens, fast.tokens_per_s) == (500, 1500.25)
    assert (hybrid.new_tokens, hybrid.pending_tokens, hybrid.tokens_per_s) == (42000, 100000, 15000.5)
    assert (expert.rank, expert.running, expert.tokens_per_s) == ("TP0 EP0", 1, 160.25)
    assert (data.rank, data.iteration, data.new_tokens, data.tokens_per_s) == ("DP0 TP0", 418, 7100, 34000.75)


def test_each_batch_counts_once_over_the_ranks_that_write_it() -> None:
    counter = Counter()
    taken = [counter.take(line) for line in BATCHES.read_text().split("\n")]
    assert taken[7] is None and taken[8] is not None  # another tensor rank; another data-parallel group
    assert counter.window_tokens == 7100 + 6400
    assert counter.cached_tokens == 124
    assert counter.waiting() == (121, 0)
    assert counter.tokens_per_s(counter.newest_at + 10) == pytest.approx(13500 / 10, rel=0.01)
    assert counter.tokens_per_s(counter.newest_at + 100) == 0.0


def test_a_log_is_followed_across_truncation_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\x1b[31mtwo\x1b[0m\nthr")
    tail = LogTail(str(path))
    assert tail.read() == ["one", "two"] and tail.newest == "thr"
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert tail.read() == ["three"]
    path.write_bytes(b"x\n")
    assert tail.read() == ["x"]
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"a new one, longer than before\n")
    assert tail.read() == ["a new one, longer than before"]
    path.unlink()
    assert tail.read() == [] and "No such file" in tail.problem


# --- the folder ------------------------------------------------------------------------------------------------------


def test_old_shards_count_at_once_and_their_tokens_are_read(tmp_path: Path, shards: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(shards, out / "rows_0-2000")
    for path in (out / "rows_0-2000").iterdir():
        age(path)
    (out / "notes.txt").write_text("no shard")
    (out / "rows_0-2000" / ".data_99.ckpt.tmp").write_bytes(b"being written")
    folder = Folder(str(out))
    folder.look()
    assert (folder.samples, folder.exact, folder.tokens) == (12, True, tokens_of(shards))
    assert folder.bytes == sum(path.stat().st_size for path in shards.glob("data_*.ckpt"))


def test_a_file_that_grows_is_no_sample_until_it_is_whole(tmp_path: Path, shards: Path) -> None:
    data = (shards / "data_0.ckpt").read_bytes()
    path = tmp_path / "data_7.pt"
    path.write_bytes(data[: len(data) // 2])
    folder = Folder(str(tmp_path))
    for _ in range(3):
        folder.look()
        assert folder.samples == 0 and list(folder.pending) == [str(path)]
    path.write_bytes(data)
    folder.look()
    folder.look()
    assert (folder.samples, folder.tokens) == (1, head_tokens(str(path)))
    folder.look()
    assert folder.bytes == len(data)


def test_a_torn_file_becomes_unreadable_and_a_vanished_one_is_forgotten(tmp_path: Path, shards: Path) -> None:
    data = (shards / "data_0.ckpt").read_bytes()
    torn, going = tmp_path / "data_1.ckpt", tmp_path / "data_2.ckpt"
    torn.write_bytes(data[:100])
    going.write_bytes(data[:100])
    folder = Folder(str(tmp_path))
    folder.look()
    age(torn)
    going.unlink()
    folder.look()
    assert (folder.samples, folder.unreadable, len(folder.pending), folder.bytes) == (1, 1, 0, 100)


def test_tokens_of_unread_heads_are_estimated_by_bytes(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.agent.adopt.folder.HEADS_A_LOOK", 6)
    shutil.copytree(shards, tmp_path / "rows_0-2000")
    for path in (tmp_path / "rows_0-2000").iterdir():
        age(path)
    folder = Folder(str(tmp_path))
    folder.look()
    assert (folder.samples, folder.exact) == (12, False)
    assert folder.tokens == pytest.approx(tokens_of(shards), rel=0.3)
    folder.look()
    assert folder.exact and folder.tokens == tokens_of(shards)


# --- the run ---------------------------------------------------------------------------------------------------------


def test_a_growing_folder_is_followed_until_its_process_ends(
    tmp_path: Path, shards: Path, store: RunStore, worker: subprocess.Popen[bytes]
) -> None:
    out, log = tmp_path / "out", tmp_path / "server.log"
    (out / "rows_0-2000").mkdir(parents=True)
    log.write_bytes(BATCHES.read_bytes())
    run = adopt(store, out=str(out), log=str(log), pid=worker.pid, samples=12, label="theirs")
    assert (run.stage, run.label, run.adopted, run.out_dir) == ("adopt", "theirs (adopted)", True, str(out))
    for number in range(8):
        shutil.copy(shards / f"data_{number}.ckpt", out / "rows_0-2000")
    until(lambda: progress(store).samples_done == 8)
    said = progress(store)
    assert said.state == "running" and said.samples_total == 12
    assert said.tokens_done == tokens_of(out / "rows_0-2000") and said.tokens_total > said.tokens_done
    assert said.tokens_per_s > 0 and said.eta_s() and said.disk_free_bytes
    assert "124 tokens came from the prefix cache" in said.message and "0 running, 121 queued" in said.message
    for number in range(8, 12):
        shutil.copy(shards / f"data_{number}.ckpt", out / "rows_0-2000")
    worker.kill()
    worker.wait()
    over = ended(store, "adopt-1")
    assert (over.exit_code, over.progress and over.progress.samples_done) == (0, 12)
    assert over.progress is not None and over.progress.state == "done"
    assert "has ended with 12 of 12 samples" in over.progress.message


def test_a_run_that_ends_short_of_its_total_has_failed(
    tmp_path: Path, shards: Path, store: RunStore, worker: subprocess.Popen[bytes]
) -> None:
    shutil.copytree(shards, tmp_path / "out")
    adopt(store, out=str(tmp_path / "out"), pid=worker.pid, samples=100)
    until(lambda: progress(store).samples_done == 12)
    worker.kill()
    worker.wait()
    over = ended(store, "adopt-1")
    assert over.exit_code == 1 and over.progress is not None
    assert "12 of 100 samples" in over.progress.message


def test_to_stop_the_watching_is_not_to_stop_the_run(
    tmp_path: Path, store: RunStore, worker: subprocess.Popen[bytes]
) -> None:
    adopt(store, out=str(tmp_path), pid=worker.pid)
    until(lambda: progress(store).state == "running")
    members = {pid for pid, _ in store.members("adopt-1")}
    assert worker.pid not in members and store.run_of(worker.pid) is None
    store.stop("adopt-1", 10.0)
    over = ended(store, "adopt-1")
    assert over.exit_code == 0 and "stopped on request" in over.reason
    assert f"process {worker.pid} goes on" in (over.progress.message if over.progress else "")
    assert worker.poll() is None


def test_the_watch_outlives_its_starter_and_needs_no_process(tmp_path: Path, store: RunStore) -> None:
    run = adopt(store, out=str(tmp_path))
    until(lambda: "watched until stopped" in progress(store).message)
    supervisor = procfs.stat(run.supervisor_pid)
    assert supervisor is not None and supervisor.sid == run.supervisor_pid != os.getsid(0)
    assert adopt(store, out=str(tmp_path)).pid == run.pid  # asked again, it starts nothing
    os.kill(run.pid, signal.SIGTERM)
    assert ended(store, "adopt-1").exit_code == 0


def test_what_cannot_be_watched_is_refused(tmp_path: Path, store: RunStore) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for args, words in (
        ({"out": "relative"}, "no absolute path"),
        ({"out": str(tmp_path / "no")}, "is no folder"),
        ({"out": str(tmp_path), "log": str(tmp_path / "no")}, "is no file"),
        ({"out": str(tmp_path), "pid": gone.pid}, f"no process {gone.pid}"),
        ({"out": str(tmp_path), "samples": -1}, "`samples` must be a whole number"),
        ({"out": str(tmp_path), "roots": ["/nowhere"]}, "outside the configured roots"),
    ):
        with pytest.raises(Refused, match=words):
            adopt(store, **args)
    assert store.list() == []
