"""What dead processes left in shared memory, told and removed, beside what living ones use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent.reset import leftovers, receipt
from backend.agent.reset.cycle import Cycle
from backend.agent.reset.leftovers import IN_USE, find, remove
from backend.agent.reset.ops import op_leftovers
from backend.wire import CLEAN, Run
from tests.resetting import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHER = 61001

HOLD = """
import ctypes, mmap, os, socket, sys
path, way = sys.argv[1], sys.argv[2]
fd = os.open(path, os.O_RDONLY if way == "read" else os.O_RDWR)
if way == "map":
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    where = libc.mmap(None, ctypes.c_size_t(4096), 1, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    assert where not in (None, ctypes.c_void_p(-1).value)
    os.close(fd)
elif way == "sent":
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [fd])
    os.close(fd)
print("holds", flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user is played")


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own on the memory filesystem, in which nothing is too young."""
    monkeypatch.setattr(leftovers, "YOUNGEST_S", 0.0)
    folder = Path(tempfile.mkdtemp(prefix="eightzeros-test-", dir="/dev/shm"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def hold() -> Iterator[Callable[[Path, str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(path: Path, way: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", HOLD, str(path), way]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def segment(folder: Path, name: str, kib: int = 4) -> Path:
    path = folder / name
    path.write_bytes(b"x" * (kib << 10))
    return path


def dead() -> int:
    """Return the pid of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_segments_of_the_dead_are_told_by_kind_size_and_owner_the_largest_first(shm: Path) -> None:
    pid = dead()
    names = {
        "nccl-Ab12Cd": "NCCL", f"torch_{pid}_2885": "PyTorch", "sgl_shm_mm_77": "SGLang", "psm_1f2e3d4c": "Python "
        "multiprocessing", f"pym-{pid}-x8s": "Python multiprocessing", "sem.q1": "semaphore",
        "vllm_offload_0.mmap": "vLLM", f"cuda.shm.0.{pid:x}.1": "CUDA", f"__KMP_REGISTERED_LIB_{pid}_0": "OpenMP",
    }  # fmt: skip
    for number, name in enumerate(names):
        segment(shm, name, 4 * (number + 1))
    for stranger in ("eightzeros-0", "database", "nccl-x.bak", "PostgreSQL.12"):
        segment(shm, stranger)
    (shm / "psm_folder").mkdir()
    (shm / "psm_link").symlink_to(shm / "database")
    found, in_use = find(str(shm))
    assert {os.path.basename(one.path): one.kind for one in found} == names
    assert [one.bytes for one in found] == [(len(names) - number) * 4096 for number in range(len(names))]
    assert all(one.mine and not one.problem and one.why for one in found)
    assert (in_use, sorted(one.why for one in found)[-1]) == (0, f"nothing has it open or mapped, and process {pid}, "
                                                              "its maker, is gone")  # fmt: skip


@pytest.mark.parametrize("way", ["read", "write", "map", "sent"])
def test_what_anybody_has_open_mapped_or_on_its_way_is_in_use_until_it_ends(
    shm: Path, hold: Callable[[Path, str], subprocess.Popen[bytes]], way: str
) -> None:
    path = segment(shm, "psm_1f2e3d4c")
    left = segment(shm, "psm_ffffffff")
    holder = hold(path, way)
    found, in_use = remove(str(shm))
    assert [(one.path, one.removed) for one in found] == [(str(left), True)]
    assert in_use == 1
    assert path.exists() and not left.exists()
    assert path.read_bytes() == b"x" * 4096
    holder.kill()
    holder.wait()
    assert [one.removed for one in remove(str(shm)).segments] == [True]
    assert not path.exists()


def test_a_segment_of_pythons_own_stays_while_it_is_mapped() -> None:
    made = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert made.name not in [os.path.basename(one.path) for one in find("/dev/shm").segments]
    finally:
        made.close()
        made.unlink()


def test_a_maker_that_lives_keeps_its_segment_and_a_young_one_is_none_yet(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = segment(shm, f"torch_{os.getpid()}_1")
    assert remove(str(shm)) == ([], 1)
    monkeypatch.setattr(leftovers, "YOUNGEST_S", 60.0)
    segment(shm, "psm_00000000")
    assert remove(str(shm)) == ([], 0)
    assert mine.exists()


@needs_root
def test_another_users_is_told_and_never_removed_not_even_by_root(shm: Path) -> None:
    path = segment(shm, "psm_1f2e3d4c")
    os.chown(path, OTHER, OTHER)
    (one,) = remove(str(shm)).segments
    assert (one.user, one.mine, one.removed) == (str(OTHER), False, False)
    assert "not removed" in one.problem
    assert path.exists()


@needs_root
def test_who_may_not_ask_for_a_lease_removes_nothing(shm: Path) -> None:
    path = segment(shm, "psm_1f2e3d4c")
    program = (
        "import os, sys; from backend.agent.reset import leftovers; os.setgid(61001); os.setuid(61001); "
        "leftovers.YOUNGEST_S = 0.0; (one,) = leftovers.remove(sys.argv[1]).segments; print(one.why, one.removed)"
    )
    root = str(Path(__file__).resolve().parent.parent)
    said = subprocess.run([sys.executable, "-c", program, str(shm)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": root}).stdout  # fmt: skip
    assert said.startswith("whether anything has it open cannot be asked:")
    assert said.endswith(" False\n")
    assert path.exists()


def test_one_that_is_opened_after_it_was_listed_is_not_removed(
    shm: Path, hold: Callable[[Path, str], subprocess.Popen[bytes]]
) -> None:
    path = segment(shm, "psm_1f2e3d4c")
    (one,) = find(str(shm)).segments
    hold(path, "map")
    leftovers._remove(one)
    assert (one.removed, one.problem) == (False, IN_USE)
    assert path.exists()


def test_a_reset_tells_what_is_left_behind_and_who_has_the_port(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host").mkdir()
    bench = Bench(tmp_path / "host")
    place = Path(bench.machine.host_root) / "dev"
    place.mkdir(parents=True)
    (place / "shm").symlink_to(shm)
    left = segment(shm, "nccl-Ab12Cd")
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            runs = [Run("serve-1", "serve", "exited", argv=["python", "-m", "sglang", "--port", str(port)])]
            monkeypatch.setattr("backend.agent.runs.RunStore.list", lambda store: runs)
            bench.start()
            assert Cycle(bench.machine, os.path.join(bench.root, "run"), {"id": "r1"}).run() == 0
        said = receipt.load("r1")
        assert said.verdict == CLEAN
        assert [(one.path, one.kind) for one in said.leftovers] == [(str(place / "shm" / left.name), "NCCL")]
        assert said.ports[0].startswith(f"port {port} is still taken, by process {os.getpid()} (")
        assert left.exists()
        found = op_leftovers(bench.machine, {"remove": True})
        assert [one.removed for one in found.segments] == [True]
        assert (found.ports, left.exists()) == ([], False)
    finally:
        bench.close()
