"""The lock of the host between users, and what they may do to it: real processes of two uids."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent.devices import NvidiaDevices
from backend.agent.reset import hostlock
from backend.agent.reset.hostlock import one_at_a_time
from backend.wire import Refused
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = str(Path(__file__).resolve().parent.parent)
ALICE, MALLORY = 61001, 61002

HOLD = """
import os, sys
uid, home, scope = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from backend.agent.devices import NvidiaDevices
from backend.agent.reset import hostlock
from backend.wire import Refused
os.environ["HOME"] = home
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
try:
    with hostlock.one_at_a_time("reset of the other", scope) as held:
        print("held", held.passed, flush=True)
        sys.stdin.read()
except Refused as error:
    print(error, flush=True)
"""

SQUAT = """
import fcntl, os, socket, sys
uid, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
place = socket.socket(socket.AF_UNIX)
place.bind("\\0" + name)
place.listen(int(sys.argv[5]))
file = open(path, "w")
ticks = open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19]
file.write(sys.argv[4].replace("PID", str(os.getpid())).replace("TICKS", ticks))
file.flush()
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user is played")


class Place:
    """A shared folder like /dev/shm, with processes of other users that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scope = folder / "shm", str(folder / "shm")
        self.folder.mkdir()
        self.folder.chmod(0o1777)
        self.started: list[subprocess.Popen[str]] = []
        with one_at_a_time("a first one", self.scope):
            (self.file,) = self.folder.iterdir()
        self.file.unlink()

    def run(self, program: str, *words: str) -> tuple[subprocess.Popen[str], str]:
        """Start a program and return it with the line that it says first."""
        argv = [sys.executable, "-c", program, *words]
        env = {**os.environ, "PYTHONPATH": ROOT}
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.started.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20)[0]
        return process, process.stdout.readline()

    def other(self) -> tuple[subprocess.Popen[str], str]:
        """Have another user take the lock."""
        home = self.folder.parent / "alice"
        home.mkdir(exist_ok=True)
        os.chown(home, ALICE, ALICE)
        return self.run(HOLD, str(ALICE), str(home), self.scope)

    def squat(self, record: str = "", backlog: int = 100) -> subprocess.Popen[str]:
        """Have another user take the places of the lock without being a reset."""
        return self.run(SQUAT, str(MALLORY), str(self.file), self.file.name, record, str(backlog))[0]


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="eightzeros-"))  # pytest's own are closed to other users
    folder.chmod(0o755)
    made = Place(folder)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    shutil.rmtree(folder)


def taken(place: Place) -> list[str]:
    with one_at_a_time("ours", place.scope) as held:
        return held.passed


def refused(place: Place) -> Refused:
    with pytest.raises(Refused) as raised:
        taken(place)
    assert raised.value.code == "reset-running"
    return raised.value


@needs_root
def test_another_users_reset_is_told_by_user_pid_and_time_and_waited_for(place: Place, tmp_path: Path) -> None:
    process, said = place.other()
    assert said == "held []\n"
    error = refused(place)
    assert f"reset of the other of user {ALICE} (process {process.pid}, since 20" in error.message
    assert "it counts for 60 minutes" in error.hint
    process.communicate("")
    assert taken(place) == []


@needs_root
def test_another_user_is_told_of_roots_reset(place: Place, tmp_path: Path) -> None:
    with one_at_a_time("reset night-7", place.scope):
        said = place.other()[1]
    assert f"reset night-7 of user root (process {os.getpid()}, since 20" in said


@needs_root
@pytest.mark.parametrize("hidden", ["socket", "file"])
def test_either_place_alone_keeps_two_users_apart(place: Place, tmp_path: Path, hidden: str) -> None:
    """Containers share the network, or a folder, or both."""
    if hidden == "file":
        place.folder.chmod(0o755)  # the other may make none there
    process, said = place.other()
    assert said.startswith("held")
    if hidden == "socket":
        words = [sys.executable, "-c", HOLD, "0", str(tmp_path), place.scope]
        told = subprocess.run(["unshare", "--net", *words], capture_output=True, text=True, check=True, stdin=-3,
                              env={**os.environ, "PYTHONPATH": ROOT}).stdout  # fmt: skip
    else:
        told = refused(place).message
    assert f"user {ALICE} (process {process.pid}, since" in told


@needs_root
def test_a_killed_holder_leaves_nothing_that_counts(place: Place, tmp_path: Path) -> None:
    process, _ = place.other()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert b"reset of the other" in place.file.read_bytes()  # the stale file, of another user
    assert taken(place) == []
    assert place.other()[1] == "held []\n"


@needs_root
def test_a_squatter_is_told_and_does_not_block_for_good(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    process = place.squat()
    assert f"another reset of user {MALLORY} (process {process.pid}, since" in refused(place).message
    monkeypatch.setattr(hostlock, "LONGEST_S", 0.0)
    notes = taken(place)
    assert len(notes) == 3
    assert all(f"process {process.pid}" in note and "not heeded" in note for note in notes[:2])
    assert "only the resets of this user" in notes[2]
    with one_at_a_time("reset night-7", place.scope):  # two of ours are kept apart all the same
        assert "reset night-7" in refused(place).message


@needs_root
def test_a_squatter_whose_socket_answers_nobody_is_found_by_the_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place.squat(backlog=0)
    with socket.socket(socket.AF_UNIX) as asks:
        asks.connect("\0" + place.file.name)  # now its queue is full
        assert f"another reset of user {MALLORY} (process {process.pid}, since" in refused(place).message
        monkeypatch.setattr(hostlock, "LONGEST_S", 0.0)
        assert "does not answer: not heeded" in taken(place)[0]


@needs_root
def test_roots_own_lock_counts_however_long_it_lasts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostlock, "LONGEST_S", 0.0)
    with one_at_a_time("reset night-7", place.scope):
        assert refused(place).hint == "wait for its end"


@needs_root
@pytest.mark.parametrize("record", ids=map(str, range(6)), argvalues=[
    json.dumps({"pid": 1, "ticks": 0, "since": 5e9, "what": "the work of init"}),
    '{"pid": PID, "ticks": TICKS}', "[" * 90000, '{"pid": PID, "ticks": TICKS, "since": 5e9, "what": "x"}',
    '{"pid": PID, "ticks": TICKS, "since": NaN, "what": 7}', "\x1b[2J",
])  # fmt: skip
def test_what_a_squatter_writes_is_not_believed(place: Place, record: str) -> None:
    process = place.squat(record)
    assert f"another reset of user {MALLORY} (process {process.pid}, since 20" in refused(place).message


@pytest.mark.parametrize("attack", ["link", "dangling", "hard link", "folder", "fifo"])
def test_what_is_no_plain_file_of_one_name_is_never_written(place: Place, tmp_path: Path, attack: str) -> None:
    victim = place.folder / "victim"
    victim.write_text("precious")
    if attack == "link":
        place.file.symlink_to(victim)
    elif attack == "dangling":
        place.file.symlink_to(tmp_path / "made")
    elif attack == "hard link":
        os.link(victim, place.file)
    elif attack == "folder":
        place.file.mkdir()
    else:
        os.mkfifo(place.file)
    (note,) = taken(place)
    assert f"{place.file} is not used as a lock" in note
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made").exists()
    with one_at_a_time("reset night-7", place.scope):
        assert f"process {os.getpid()}" in refused(place).message


@needs_root
def test_a_read_only_folder_leaves_the_socket(place: Place, tmp_path: Path) -> None:
    words = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    argv = [sys.executable, "-c", HOLD, "0", str(tmp_path), place.scope]
    env = {**os.environ, "PYTHONPATH": ROOT}
    whole = ["unshare", "--mount", "sh", "-c", words, str(place.folder), *argv]
    said = subprocess.run(whole, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, env=env)
    assert said.stdout == "held []\n"
    with one_at_a_time("reset night-7", place.scope):
        said = subprocess.run(whole, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, env=env)
    assert f"(process {os.getpid()}, since" in said.stdout


def test_whoever_inherits_the_lock_keeps_it(place: Place) -> None:
    """An nvidia-smi that has not ended keeps the lock of the reset that started it."""
    with one_at_a_time("GPU reset", place.scope) as held:
        heir = subprocess.Popen(["sleep", "100"], pass_fds=held.fds)
    try:
        assert "reset" in refused(place).message
    finally:
        heir.kill()
        heir.wait()
    assert until(lambda: taken(place) == [])


def test_the_real_gpus_have_their_lock_where_all_users_and_containers_may_look(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hostlock.SHARED == ("/dev/shm", "/run/lock")
    monkeypatch.setattr(hostlock, "SHARED", (place.scope, str(place.folder / "absent")))
    kind, real = "test-" + place.folder.parent.name, NvidiaDevices()
    real._majors = {195: "nvidia"}
    with one_at_a_time("night-7", real.scope(), kind) as held:
        assert held.passed == []
        (file,) = place.folder.glob(f"*{kind}*")
        assert file.stat().st_mode & 0o777 == 0o666
        with pytest.raises(Refused, match="night-7"), one_at_a_time("again", "", kind):
            pass


def test_hosts_of_their_own_do_not_wait_for_each_other(place: Place) -> None:
    with one_at_a_time("reset night-7", place.scope), one_at_a_time("another host's", str(place.folder.parent)):
        pass


def test_a_socket_that_nobody_may_make_leaves_the_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    bind: Callable[..., None] = socket.socket.bind
    monkeypatch.setattr(socket.socket, "bind", forbidden)
    with one_at_a_time("reset night-7", place.scope) as held:
        assert held.passed == ["the lock's socket: Permission denied"]
        monkeypatch.setattr(socket.socket, "bind", bind)
        assert refused(place).message.startswith("reset night-7 of user")
