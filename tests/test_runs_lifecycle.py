"""A run is started once, outlives whoever started it, and ends with the status that it really had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent import ours, procfs, runs
from backend.agent.runs import RunStore
from backend.wire import Refused, Run
from tests.runstore import RELAUNCH, a_store, ended, kill_all, logged, machine, shell, spec
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


def waits_for(path: Path, then: str) -> str:
    """Return a script that does something once a file is there."""
    return f"echo up; until [ -e {path} ]; do sleep 0.02; done; {then}"


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill $$", -15)])
def test_exit_status(store: RunStore, script: str, code: int) -> None:
    run = store.start(shell("one", script))
    assert run.state in ("running", "exited")
    run = ended(store, "one")
    assert (run.state, run.exit_code) == ("exited", code)
    assert run.ended_at >= run.started_at > 0
    assert run.reason.startswith("ended by SIG") if code < 0 else run.reason == ""


def test_the_record_has_the_identities(store: RunStore) -> None:
    run = store.start(spec("one", "sleep", "100", label="a sleep", out_dir="/tmp"))
    child, supervisor = procfs.stat(run.pid), procfs.stat(run.supervisor_pid)
    assert child is not None
    assert supervisor is not None
    assert (child.sid, child.ppid, child.start_ticks) == (run.pid, run.supervisor_pid, run.pid_start)
    assert (supervisor.sid, supervisor.start_ticks) == (run.supervisor_pid, run.supervisor_start)
    assert supervisor.ppid != os.getpid(), "the supervisor belongs to nobody"
    assert (run.supervisor_pid, run.supervisor_start) in ours.ours()
    assert (run.boot_id, run.label, run.supervised) == (procfs.boot_id(), "a sleep", True)
    assert store.members("one") == {(run.pid, run.pid_start)}
    assert store.run_of(run.pid) == store.run_of(run.supervisor_pid) == "one"
    assert store.run_of(os.getpid()) is None


def test_what_the_child_inherits(store: RunStore, tmp_path: Path) -> None:
    script = (
        "import os, signal, json; print(json.dumps({"
        "'fds': sorted(int(n) for n in os.listdir('/proc/self/fd')), 'stdin': os.readlink('/proc/self/fd/0'),"
        "'status': {l.split(':')[0]: l.split()[1] for l in open('/proc/self/status') if l.startswith('Sig')},"
        "'env': {k: v for k, v in os.environ.items() if 'EIGHTZEROS_RUN' in k or 'PYTHONUN' in k or k == 'GIVEN'},"
        "'cwd': os.getcwd()}))"
    )
    store.start(spec("one", sys.executable, "-S", "-c", script, env={"GIVEN": "x y"}, cwd=str(tmp_path)))
    ended(store, "one")
    said = json.loads(store.log("one", 0, 4000)["text"])
    assert said["env"] == {
        "EIGHTZEROS_RUN": "one", "EIGHTZEROS_RUN_DIR": str(tmp_path / "runs" / "one"), "GIVEN": "x y",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert said["fds"] == [0, 1, 2, 3], "3 is the listing itself"
    assert (said["stdin"], said["cwd"]) == ("/dev/null", str(tmp_path))
    assert int(said["status"]["SigBlk"], 16) == 0
    python_ignores = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert int(said["status"]["SigIgn"], 16) & ~python_ignores == 0
    assert os.stat(tmp_path / "runs" / "one" / "log").st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("argv", "cwd", "words"),
    [
        (["/no/such/program"], "", "/no/such/program: No such file"),
        (["no-such-program-at-all"], "", "no-such-program-at-all: No such file"),
        (["/etc/passwd"], "", "/etc/passwd: Permission denied (make it executable"),
        (["true"], "/no/such/folder", "working folder /no/such/folder: No such file"),
    ],
)
def test_what_cannot_start_is_refused_in_words(store: RunStore, argv: list[str], cwd: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        store.start(spec("one", *argv, cwd=cwd))
    assert refused.value.code == "cannot-start"
    assert words in str(refused.value)
    run = ended(store, "one")
    assert (run.state, run.exit_code) == ("failed", None)
    assert refused.value.message == run.reason
    assert store.start(spec("one", "true")).state == "failed", "the id is used up"


def test_a_missing_interpreter_is_named(store: RunStore, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(Refused, match="interpreter in its first line is not"):
        store.start(spec("one", str(script)))


@pytest.mark.parametrize("run_id", ["", "../x", ".hidden", "a/b", "a" * 65, "a\n", "-a"])
def test_ids_that_are_no_file_names_are_refused(store: RunStore, run_id: str) -> None:
    with pytest.raises(Refused) as refused:
        store.start(spec(run_id, "true"))
    assert refused.value.code == "bad-id"
    assert store.get(run_id) is None


def test_a_repeated_start_returns_the_run(store: RunStore, tmp_path: Path) -> None:
    first = store.start(shell("one", f"echo x >> {tmp_path}/count; sleep 100"))
    until(lambda: (tmp_path / "count").exists() and (tmp_path / "count").read_text())
    again = store.start(shell("one", f"echo y >> {tmp_path}/count"))
    assert again.pid == first.pid
    assert (tmp_path / "count").read_text() == "x\n"


def test_two_starts_that_race_start_one(tmp_path: Path) -> None:
    stores = [RunStore(machine(), str(tmp_path / "runs")) for _ in range(4)]
    found: list[Run] = []
    gate = threading.Barrier(len(stores))

    def start(store: RunStore) -> None:
        gate.wait()
        found.append(store.start(shell("one", f"echo x >> {tmp_path}/count; sleep 100")))

    threads = [threading.Thread(target=start, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        until(lambda: (tmp_path / "count").exists() and (tmp_path / "count").read_text())
        assert len(found) == len(stores)
        assert len({run.pid for run in found if run.pid}) == 1, "0 is one that is still starting"
        assert (tmp_path / "count").read_text() == "x\n"
        assert [name for name in os.listdir(tmp_path / "runs") if name.startswith(".")] == []
    finally:
        run = stores[0].get("one")
        assert run is not None
        kill_all(stores[0], run)


def test_a_run_outlives_the_agent_that_started_it(store: RunStore, tmp_path: Path) -> None:
    starter = (
        f"import sys; sys.path.insert(0, {str(Path(RELAUNCH).parent.parent)!r})\n"
        "from tests.runstore import *\n"
        f"print(RunStore(machine(), {str(tmp_path / 'runs')!r})"
        f".start(shell('one', {waits_for(tmp_path / 'go', 'echo done; exit 5')!r})).pid, flush=True)\n"
        "sys.stdin.read()"
    )
    agent = subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        agent.send_signal(signal.SIGKILL)
    run = store.get("one")
    assert run is not None
    assert (run.pid, run.state, run.supervised) == (pid, "running", True)
    (tmp_path / "go").touch()
    assert ended(store, "one").exit_code == 5
    assert store.log("one", 0, 1000)["text"] == "up\ndone\n"


def test_a_start_that_dies_half_way_is_failed(tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    broken = RunStore(machine(sys.executable, "-c", "raise SystemExit('no module of that name')"), root)
    with pytest.raises(Refused, match="the supervisor ended at once: no module of that name"):
        broken.start(shell("one", "true"))
    run = broken.get("one")
    assert run is not None
    assert (run.state, run.stage, run.argv) == ("failed", "test", ["sh", "-c", "true"])
    assert "died before it was started" in run.reason
    assert RunStore(machine(), root).start(shell("one", "true")).state == "failed"


def test_a_slow_start_shows_as_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ANSWER_S", 0.1)
    slow = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    store = RunStore(machine(sys.executable, "-S", "-c", slow), str(tmp_path / "runs"))
    assert store.start(shell("one", "true")).state == "starting"
    assert [run.state for run in store.poll()] == ["starting"]
    (tmp_path / "go").touch()
    until(lambda: [run.state for run in store.poll()] == ["failed"])
    until(lambda: store.poll() == [] and not store._slow)


def test_what_is_still_starting_cannot_be_stopped_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ANSWER_S", 0.1)
    slow = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    store = RunStore(machine(sys.executable, "-S", "-c", slow), str(tmp_path / "runs"))
    store.start(shell("one", "true"))
    with pytest.raises(Refused, match="still being started"):
        store.stop("one", 1)
    (tmp_path / "go").touch()
    until(lambda: ended(store, "one").state == "failed" and store.poll() is not None and not store._slow)


def test_drafts_of_dead_starters_are_swept(tmp_path: Path) -> None:
    for name, age_s in (("old", 7200), ("new", 0)):
        (tmp_path / f".new-{name}").mkdir()
        (tmp_path / f".new-{name}" / "lock").touch()
        os.utime(tmp_path / f".new-{name}", (time.time() - age_s, time.time() - age_s))
    assert RunStore(machine(), str(tmp_path)).list() == []
    assert os.listdir(tmp_path) == [".new-new"]


def test_poll_tells_what_changed(store: RunStore, tmp_path: Path) -> None:
    assert store.poll() == []
    store.start(shell("one", waits_for(tmp_path / "go", "exit 3")))
    logged(store, "one", "up")
    assert [(run.id, run.state) for run in store.poll()] == [("one", "running")]
    assert store.poll() == []
    (tmp_path / "go").touch()
    changed = until(store.poll)
    assert [(run.id, run.state, run.exit_code) for run in changed] == [("one", "exited", 3)]
    assert store.poll() == []
    assert [run.id for run in store.list()] == ["one"]


def test_leftovers_are_counted_and_left_alone(store: RunStore) -> None:
    store.start(shell("one", "setsid sleep 100 & exit 0"))
    run = ended(store, "one")
    assert run.exit_code == 0
    assert "1 of its processes still run" in run.reason
    assert "sleep 100" in run.reason
    assert len(store.members("one")) == 1, "found by its environment, though its supervisor is gone"
    (left,) = store.members("one")
    assert store.run_of(left[0]) == "one"


def test_another_hosts_run_in_a_shared_home_is_not_ours(store: RunStore, tmp_path: Path) -> None:
    store.start(shell("one", "true"))
    ended(store, "one")
    path = tmp_path / "runs" / "one" / "run.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), host="other")))
    assert store.get("one") is None
    assert RunStore(machine(), str(tmp_path / "runs")).list() == []
    with pytest.raises(Refused) as refused:
        store.start(shell("one", "true"))
    assert refused.value.code == "id-taken"


def test_under_python_38(tmp_path: Path) -> None:
    python = shutil.which("python3.8")
    if python is None or subprocess.run([python, "-c", "pass"], capture_output=True).returncode:
        pytest.skip("no working python3.8 on PATH")
    store = RunStore(machine(python, "-S", "-E", RELAUNCH), str(tmp_path / "runs"))
    store.start(shell("one", "exit 4"))
    assert ended(store, "one").exit_code == 4
    store.start(shell("two", "trap '' TERM; echo up; while :; do sleep 0.1; done"))
    logged(store, "two", "up")
    assert store.stop("two", 0.1).state == "stopping"
    assert ended(store, "two").exit_code == -9
