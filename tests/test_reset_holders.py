"""Who holds a device: found by number, through every thread, mapping and odd name."""

from __future__ import annotations

import codecs
import json
import os
import pickle
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import holders, procfs
from backend.agent.holders import Holding, Scan, scan
from backend.agent.reset.cycle import Cycle, verify
from backend.agent.reset.look import holds_context, more_than_monitor
from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, LIMITED
from tests.resetting import Bench, FileDevices
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534
CASES = json.loads((Path(__file__).parent / "cases" / "process_names.json").read_text(encoding="utf-8"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "host"
    folder.mkdir()
    host = Bench(folder)
    yield host
    host.close()


def look(bench: Bench) -> dict[int, Holding]:
    return scan(FileDevices(bench.root)).holdings


def test_counts_open_files_and_mappings_by_gpu(bench: Bench) -> None:
    context, mapped = bench.start(gpus="0,1"), bench.start("mapped", gpus="1")
    monitor, bystander = bench.start("monitor"), bench.start("bystander")
    found = look(bench)
    assert found[context.pid].fds == {0: 20, 1: 20}
    assert (found[mapped.pid].fds, found[mapped.pid].maps) == ({}, {1: 1})
    assert found[monitor.pid].fds == {0: 3}
    assert bystander.pid not in found
    assert found[context.pid].start_ticks == procfs.stat(context.pid).start_ticks  # type: ignore[union-attr]
    assert found[mapped.pid].how() == "1 mapping of GPU minor 1"
    many = Holding(1, 1, fds={0: 3, 1: 3, 2: 3, 5: 3, 6: 1}, maps={6: 2})
    assert many.how() == "3 open files of each of GPU minors 0-2, 5, 1 open file and 2 mappings of GPU minor 6"


def test_a_device_is_told_by_number_and_not_by_its_name(bench: Bench, tmp_path: Path) -> None:
    os.link(os.path.join(bench.root, "nvidia0"), tmp_path / "innocent.txt")
    (tmp_path / "nvidia1").write_bytes(b"no device")
    with open(tmp_path / "innocent.txt", "rb"), open(tmp_path / "nvidia1", "rb"):
        assert look(bench)[os.getpid()].fds == {0: 1}


def test_finds_what_only_a_live_thread_of_a_zombie_leader_shows(bench: Bench) -> None:
    code = f"""
        import ctypes, os, threading, time
        os.open({os.path.join(bench.root, "nvidia0")!r}, os.O_RDWR)
        threading.Thread(target=time.sleep, args=(1000,)).start()
        os.write(1, b'{{"pid": %d, "pids": [%d]}}\\n' % (os.getpid(), os.getpid()))
        ctypes.CDLL(None).pthread_exit(None)
    """
    holder = bench.spawn(["python3", "-S", "-c", textwrap.dedent(code)])
    try:
        until(lambda: (procfs.stat(holder.pid) or procfs.Stat(0, "", "", 0, 0, 0, 0, 0)).dead)
        assert look(bench)[holder.pid].fds == {0: 1}
    finally:
        holder.end()
        bench.holders.remove(holder)


def test_a_thread_with_files_of_its_own_is_read_too_and_shared_ones_are_counted_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
        import ctypes, os, threading, time
        os.open({os.path.join(bench.root, "nvidia0")!r}, os.O_RDWR)
        for _ in range(3):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        done = threading.Event()
        def apart():
            ctypes.CDLL(None).unshare(0x400)
            os.open({os.path.join(bench.root, "nvidia1")!r}, os.O_RDWR)
            done.set()
            time.sleep(1000)
        threading.Thread(target=apart, daemon=True).start()
        done.wait()
        os.write(1, b'{{"pid": %d, "pids": [%d]}}\\n' % (os.getpid(), os.getpid()))
        time.sleep(1000)
    """
    holder = bench.spawn(["python3", "-S", "-c", textwrap.dedent(code)])
    assert look(bench)[holder.pid].fds == {0: 1, 1: 1}
    monkeypatch.setattr(holders, "NR_KCMP", -1)  # a kernel that cannot tell whether threads share their files
    assert look(bench)[holder.pid].fds == {0: 1, 1: 1}


def test_no_name_can_hide_a_holder_or_leak_into_the_terminal(bench: Bench) -> None:
    for number, comm in enumerate(CASES["names"]):
        title = CASES["titles"][number % len(CASES["titles"])] + "x" * 5000
        holder = bench.start(comm=comm, title=title)
        assert look(bench)[holder.pid].fds == {0: 20}, comm
        stat = procfs.stat(holder.pid)
        assert stat is not None, comm
        assert (stat.ppid, stat.sid, stat.comm) == (os.getpid(), holder.pid, comm.encode()[:15].decode()), comm
        shown = procfs.command(holder.pid)
        assert shown.isprintable(), (comm, shown)
        assert "owned" not in shown
    said = op_plan(bench.machine, {})
    assert {one.pid for one in said.victims} == {one.pid for one in bench.holders}
    assert all(text.isprintable() for one in said.victims for text in (one.command, one.exe, one.reason))


def test_hints_spare_files_that_cannot_be_devices(bench: Bench, tmp_path: Path) -> None:
    asked: list[int] = []

    class Hinting(FileDevices):
        def hints(self) -> tuple[str, ...]:
            return ("/nvidia",)

        def gpus_of(self, st: os.stat_result) -> tuple[int, ...] | None:
            asked.append(st.st_ino)
            return super().gpus_of(st)

    holder = bench.start()
    other = tmp_path / "other"
    other.write_bytes(b"x")
    with open(other, "rb") as file:
        found = scan(Hinting(bench.root)).holdings
        assert os.fstat(file.fileno()).st_ino not in asked
    assert found[holder.pid].fds == {0: 20}


def test_a_context_is_told_from_a_monitor_by_what_the_h200_showed() -> None:
    nvml, initialised = Holding(1, 1, {0: 3}, {}), Holding(1, 1, {0: 4}, {0: 2})
    context, mapping = Holding(1, 1, {0: 20}, {0: 3}), Holding(1, 1, {}, {0: 1})
    assert [holds_context(one, 0) for one in (nvml, initialised, context, mapping)] == [False, False, True, True]
    assert [more_than_monitor(one, 0) for one in (nvml, initialised, context)] == [False, True, True]
    assert not holds_context(context, 1)


def test_says_how_many_processes_it_could_not_look_into() -> None:
    me = os.geteuid()
    assert Scan({}, {10: me + 1, 11: me + 1}).unseen() == ["2 processes of other users could not be looked into"]
    assert Scan({}, {10: me}).unseen() == ["1 of your own processes could not be looked into"]


@pytest.fixture
def public(home: Path) -> Iterator[Path]:
    """Give a folder that any user may read, with a state folder that belongs to nobody."""
    if os.geteuid() != 0:
        pytest.skip("only root can look at the host as another user")
    folder = tempfile.mkdtemp(prefix="eightzeros-test-")
    os.chmod(folder, 0o755)
    yield Path(folder)
    shutil.rmtree(folder)


def as_nobody(call: Callable[[], Any], state: str) -> Any:
    """Run something as a user without rights, in a child, and return its result."""
    for name in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(name)  # this user may be unable to read the interpreter's own files
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["XDG_STATE_HOME"] = state
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            answer = pickle.dumps(call())
            os.write(writer, answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def give_to_nobody(public: Path) -> Bench:
    """Put a host into the folder, all of it nobody's."""
    (public / "host").mkdir()
    (public / "state").mkdir()
    bench = Bench(public / "host")
    for folder, _, files in os.walk(public):
        for name in [folder, *(os.path.join(folder, name) for name in files)]:
            os.chown(name, NOBODY, NOBODY)
    return bench


def test_without_root_the_verdict_says_what_it_could_not_see(public: Path) -> None:
    bench = give_to_nobody(public)
    said = as_nobody(lambda: verify(bench.machine, accept_limited=True), str(public / "state"))
    assert said.verdict == LIMITED, [said.notes, said.after]
    assert "of other users could not be looked into" in said.after[0].reason
    assert any("is accepted" in note for note in said.notes)
    assert any("of other users" in text for text in said.unseen)
    assert verify(bench.machine, accept_limited=False).verdict == CLEAN


def test_a_user_without_rights_resets_what_is_theirs_and_nothing_else(public: Path) -> None:
    bench = give_to_nobody(public)
    try:
        mine, roots = bench.start(uid=NOBODY), bench.start(gpus="1")

        def reset() -> tuple[int, Any, int]:
            options = {"id": "r1", "grace_s": 5.0, "deadline_s": 5.0}
            plan = op_plan(bench.machine, {})
            return Cycle(bench.machine, str(public / "host" / "run"), options).run(), plan, os.geteuid()

        status, plan, uid = as_nobody(reset, str(public / "state"))
        assert (status, uid) == (1, NOBODY)
        assert [one.pid for one in plan.victims] == [mine.pid]
        assert roots.pid in {one.pid for one in plan.spared}
        assert "may not be looked into" in plan.spared[0].reason
        assert plan.unseen
        assert not mine.alive()
        assert roots.alive()
    finally:
        bench.close()
