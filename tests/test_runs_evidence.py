"""A run's state follows from evidence: reboots, reused pids, dead supervisors, torn files, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import procfs, progress, runfiles
from backend.wire import Progress
from tests.runstore import a_store, ended, logged, shell, spec
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backend.agent.runs import RunStore


TORN = (
    b'{"at": 1, "sta',
    b"[1]",
    b"null",
    b'{"at": 1}',
    b'{"at": 1, "state": 3}',
    b'{"at": 1, "state": "x", "samples_done": "many"}',
    b'{"at": NaN, "state": "x"}',
    b"\xff\xfe",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


@pytest.fixture
def forged(store: RunStore, tmp_path: Path) -> Iterator[Any]:
    """Start a run and let the test change what its record says; the truth is put back for the clean-up."""
    store.start(spec("one", "sleep", "100"))
    path = tmp_path / "runs/one/run.json"
    real = path.read_text()

    def forge(**fields: object) -> RunStore:
        path.write_text(json.dumps(dict(json.loads(real), **fields)))
        return store

    yield forge
    path.write_text(real)


def test_supervisor_killed_and_child_alive(store: RunStore) -> None:
    run = store.start(shell("one", "echo up; sleep 100"))
    os.kill(run.supervisor_pid, signal.SIGKILL)
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))
    now = store.get("one")
    assert now is not None
    assert (now.state, now.supervised) == ("running", False)
    os.kill(run.pid, signal.SIGKILL)
    now = ended(store, "one")
    assert (now.state, now.exit_code, now.supervised) == ("lost", None, False)
    assert "it ended together with its supervisor" in now.reason
    assert now.ended_at >= run.started_at - 1


def test_reboot(forged: Any) -> None:
    run = forged(boot_id="0" * 36).get("one")
    assert (run.state, run.reason) == ("lost", "the host was restarted while it ran")
    assert forged(boot_id="0" * 36).members("one") == set()


def test_pids_that_were_reused(forged: Any) -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    run = forged(pid=me.pid, pid_start=1, supervisor_pid=me.pid, supervisor_start=1).get("one")
    assert run.state == "lost"
    assert "exit status is unknown" in run.reason


def test_container_restart(forged: Any) -> None:
    run = forged(pid=1 << 22, supervisor_pid=1 << 22, pid_namespace="pid:[1]").get("one")
    assert run.state == "lost"
    assert "the container was restarted" in run.reason


def test_out_of_memory_kills_are_evidence(forged: Any) -> None:
    where, count = runfiles.oom_kills()
    if count is None:
        pytest.skip("this kernel counts no out-of-memory kills")
    run = forged(pid=1 << 22, supervisor_pid=1 << 22, oom_kills=count - 2).get("one")
    assert f"the out-of-memory killer struck 2 times since the start ({where})" in run.reason


def test_a_zombie_is_dead(forged: Any) -> None:
    zombie = subprocess.Popen(["true"])
    try:
        until(lambda: (procfs.stat(zombie.pid) or pytest.fail("reaped")).state == "Z")
        stat = procfs.stat(zombie.pid)
        assert stat is not None
        fields = {"pid": zombie.pid, "pid_start": stat.start_ticks}
        run = forged(supervisor_pid=zombie.pid, supervisor_start=stat.start_ticks, **fields).get("one")
        assert run.state == "lost"
    finally:
        zombie.wait()


@pytest.mark.parametrize("name", ["run.json", "exit.json", "spec.json"])
def test_a_spoilt_record_is_named_and_harms_no_other(store: RunStore, tmp_path: Path, name: str) -> None:
    store.start(shell("one", "exit 0"))
    store.start(shell("two", "exit 0"))
    ended(store, "one")
    ended(store, "two")
    (tmp_path / "runs/one" / name).write_bytes(b'{"torn')
    if name == "spec.json":
        (tmp_path / "runs/one/run.json").unlink()
    states = {run.id: run for run in store.list()}
    assert states["two"].state == "exited"
    assert states["one"].state == ("lost" if name == "exit.json" else "failed")
    if name != "exit.json":
        assert name in states["one"].reason


@pytest.mark.parametrize("record", [{}, {"pid": "x"}, {"boot_id": procfs.boot_id(), "id": "one", "pid": None}])
def test_a_record_that_makes_no_sense_harms_no_other(
    store: RunStore, tmp_path: Path, record: dict[str, object]
) -> None:
    store.start(shell("one", "exit 0"))
    store.start(shell("two", "exit 0"))
    ended(store, "one")
    ended(store, "two")
    (tmp_path / "runs/one/exit.json").unlink()
    (tmp_path / "runs/one/run.json").write_text(json.dumps(dict(record, host=socket.gethostname())))
    states = {run.id: run.state for run in store.list()}
    assert states == {"one": "lost", "two": "exited"}
    assert {run.id for run in store.poll()} == {"one", "two"}


def test_progress_is_read_and_a_torn_one_keeps_the_last(store: RunStore, tmp_path: Path) -> None:
    store.start(spec("one", "sleep", "100", out_dir=str(tmp_path / "not" / "there" / "yet")))
    path = tmp_path / "runs/one/progress.json"
    path.write_text(json.dumps(vars(Progress(at=time.time(), state="running", samples_done=5, tokens_total=9))))
    run = store.get("one")
    assert run is not None
    assert run.progress is not None
    assert (run.progress.samples_done, run.progress.tokens_total, run.reason) == (5, 9, "")
    assert run.progress.disk_free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert [found.id for found in store.poll()] == ["one"]
    for torn in TORN:
        path.write_bytes(torn)
        run = store.get("one")
        assert run is not None
        assert run.progress is not None
        assert run.progress.samples_done == 5
        assert "progress.json cannot be read" in run.reason
    path.write_text('{"at": 1, "state": "run\\u001b[31mning", "samples_done": 6, "unknown": [1]}')
    run = store.get("one")
    assert run is not None
    assert run.progress is not None
    assert (run.progress.samples_done, run.progress.state, run.reason) == (6, "running", "")


def test_a_filesystem_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    monkeypatch.setattr(progress, "free_bytes", lambda _path: until(lambda: go.exists() and 42, 60))
    room = progress.DiskRoom("/somewhere")
    assert room.free_bytes() is None
    child = room._child
    assert room.free_bytes() is None
    assert room._child == child, "one child hangs, not one a second"
    go.touch()
    assert until(room.free_bytes) == 42


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small filesystem cannot be mounted: " + mounted.stderr.decode().strip())
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096):
            pass


def test_the_exit_status_is_recorded_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    stores = a_store(small_disk / "runs")
    store = next(stores)
    run = store.start(shell("one", f"echo up; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo lost; exit 6"))
    logged(store, "one", "up")
    fill(small_disk / "ballast")
    (tmp_path / "go").touch()
    assert ended(store, "one").exit_code == 6
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))
    assert list(stores) == []


def test_a_start_on_a_full_disk_is_refused(small_disk: Path) -> None:
    stores = a_store(small_disk / "runs")
    store = next(stores)
    fill(small_disk / "ballast")
    with pytest.raises(Exception, match="No space left on device"):
        store.start(shell("one", "true"))
    assert store.get("one") is None
    assert list(stores) == []


def test_a_worker_that_was_forked_while_the_disk_was_asked_takes_nobodys_answer(tmp_path: Path) -> None:
    room = progress.DiskRoom(str(tmp_path))
    room._ask()
    pid = os.fork()
    if pid == 0:
        try:
            room.free_bytes()  # must neither eat the answer nor wait for a process that is not its child
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert until(room.free_bytes) > 0
