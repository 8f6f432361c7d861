"""What the capture hook leaves in its folder, who may have it, and how its reader takes it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch in the test environment")

from backend.extraction.capture.config import Config  # noqa: E402
from backend.extraction.capture.hook import Capture  # noqa: E402
from backend.extraction.capture.writing import HEADER_BYTES  # noqa: E402
from backend.extraction.staging import Staging, StagingError, hook_argument, install  # noqa: E402
from tests.capturing import HIDDEN, POINTS, RUN, WIDTH, Rows, Server, check, failure, failure_of, pass_of  # noqa: E402
from tests.waiting import until  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROW_BYTES = 8 + 4 * (WIDTH + HIDDEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging"


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that have warmed up, and end them."""
    servers = []

    def start(**settings: Any) -> Server:
        server = Server(folder, **settings)
        servers.append(server)
        server.warm_up()
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def reader(folder: Path) -> Staging:
    return Staging(str(folder), RUN, "s1")


def test_only_this_runs_files_are_cleared(folder: Path, reader: Staging) -> None:
    ours = [f"{RUN}-s0-1-0-9.states", f"{RUN}-s0-1-0-9.failed", f"{RUN}-s0-1-0-9.4.part"]
    others = ["run70-s0-1-0-9.states", f"{RUN}.states", f"{RUN}-notes.txt", "rank3.json"]
    folder.mkdir(mode=0o700)
    for name in (*ours, *others):
        (folder / name).write_text("{}")
    server = Server(folder)
    assert set(os.listdir(folder)) == {*others, "rank0.json"}
    server.warm_up()
    server.run(Rows(reader.rid(0, 0, 3), 3))
    check(reader, reader.rid(0, 0, 3))
    server.close()
    assert set(os.listdir(folder)) == {*others, "rank0.json"}


def test_a_foreign_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no folder of this user's own"):
        Server(folder)


def test_counters_are_reported(serve: Callable[..., Server], reader: Staging) -> None:
    server = serve()
    server.run(Rows(reader.rid(0, 0, 3), 3))
    until(lambda: reader.ranks()[0]["whole"] == 1)
    record = reader.ranks()[0]
    assert record["effective_layers"] == POINTS and record["versions"]["torch"] == str(torch.__version__)
    assert (record["hidden_size"], record["dtype"], record["rows"]) == (HIDDEN, "float32", 3)
    assert (record["bytes"], record["pid"]) == (3 * ROW_BYTES, os.getpid())


def test_a_rank_that_does_not_write_sets_its_layers_all_the_same(folder: Path, reader: Staging) -> None:
    server = Server(folder)
    server.close()
    server.hook = Capture(Config.of({"run": RUN, "folder": str(folder), "points": POINTS}), rank=3, writes=False)
    try:
        server.warm_up()
        assert server.run(Rows(reader.rid(0, 0, 3), 3)).shape == (3, HIDDEN)
        assert reader.look() == ([], [])
        until(lambda: [(r["rank"], r["effective_layers"]) for r in reader.ranks()] == [(0, None), (3, POINTS)])
    finally:
        server.close()


def test_bfloat16_comes_as_words(serve: Callable[..., Server], reader: Staging) -> None:
    server, rid = serve(), reader.rid(0, 0, 5)
    batch, aux, last = pass_of(Rows(rid, 5))
    server.hook(server.stack, (batch,), (last.bfloat16(), aux.bfloat16()))
    until(lambda: rid in reader.look().whole)
    found = reader.open(rid)
    assert (found.dtype, found.aux.dtype) == ("bfloat16", np.uint16)
    assert np.array_equal(found.aux, aux.bfloat16().view(torch.uint16).numpy())
    assert np.array_equal(found.last, last.bfloat16().view(torch.uint16).numpy())


@pytest.mark.parametrize("cut", [0, 100, HEADER_BYTES, HEADER_BYTES + 50, -1])
def test_a_torn_file_is_refused(serve: Callable[..., Server], reader: Staging, folder: Path, cut: int) -> None:
    rid = reader.rid(0, 0, 5)
    serve().run(Rows(rid, 5))
    until(lambda: rid in reader.look().whole)
    path = folder / f"{rid}.states"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StagingError, match="too few|no JSON"):
        reader.open(rid)
    path.write_bytes(json.dumps({"format": 99}).encode().ljust(HEADER_BYTES))
    with pytest.raises(StagingError, match="no states of this version"):
        reader.open(rid)


def writer_of(server: Server) -> int:
    """Return the writer process of a server that has written once."""
    assert server.hook._sink is not None and server.hook._sink._writer._process is not None
    return server.hook._sink._writer._process.pid


def test_what_cannot_be_written_fails_with_its_reason(
    serve: Callable[..., Server], reader: Staging, folder: Path
) -> None:
    server, rids = serve(), [reader.rid(i, 0, 5) for i in range(3)]
    server.run(Rows(rids[0], 5))
    check(reader, rids[0])
    limits = resource.prlimit(writer_of(server), resource.RLIMIT_FSIZE, (HEADER_BYTES, resource.RLIM_INFINITY))
    server.run(Rows(rids[1], 5))
    assert "File too large" in failure(reader, rids[1])
    resource.prlimit(writer_of(server), resource.RLIMIT_FSIZE, limits)
    server.run(Rows(rids[2], 5))
    check(reader, rids[2])
    assert not [name for name in os.listdir(folder) if "part" in name]


def test_a_writer_that_is_killed_costs_what_it_held(serve: Callable[..., Server], reader: Staging) -> None:
    server, rids = serve(slots=3), [reader.rid(i, 0, 10) for i in range(8)]
    server.run(Rows(rids[0], 10))
    check(reader, rids[0])
    os.kill(writer_of(server), signal.SIGSTOP)
    server.run(Rows(rids[1], 10))
    server.run(Rows(rids[2], 10), Rows(rids[3], 4))
    until(lambda: len(server.hook._sink._flying) == 2)  # type: ignore[union-attr]
    os.kill(writer_of(server), signal.SIGKILL)
    for rid in rids[1:4]:
        assert "the process that writes the states ended (status -9)" in failure_of(reader, rid)
    server.run(Rows(rids[3], 6, 4))
    for rid in rids[4:]:  # more than there are slots: those of the dead one are free again
        server.run(Rows(rid, 10))
        check(reader, rid)
    assert server.hook.counters.failed == 3 and server.hook.counters.staged_bytes > 0


def test_no_other_writer_starts_before_the_loss_of_one_is_settled(
    serve: Callable[..., Server], reader: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that went to the next writer meanwhile would be taken for lost, and its slot be used twice."""
    server, rids = serve(slots=3), [reader.rid(i, 0, 10) for i in range(3)]
    server.run(Rows(rids[0], 10))
    check(reader, rids[0])
    sink, fail_all, late = server.hook._sink, server.hook._folder.fail_all, []
    assert sink is not None

    def meanwhile(reason: str) -> None:
        server.run(Rows(rids[1], 10))
        late.append(failure_of(reader, rids[1]))
        fail_all(reason)

    monkeypatch.setattr(server.hook._folder, "fail_all", meanwhile)
    os.kill(writer_of(server), signal.SIGKILL)
    until(lambda: late and sink._writer._connection is None)
    assert "cannot be told" in late[0]
    server.run(Rows(rids[2], 10))
    check(reader, rids[2])
    until(lambda: sorted(sink._free.queue) == [0, 1, 2])


def test_the_writer_ends_with_the_server(serve: Callable[..., Server], reader: Staging) -> None:
    server, rid = serve(), reader.rid(0, 0, 5)
    server.run(Rows(rid, 5))
    check(reader, rid)
    writer = os.pidfd_open(writer_of(server))
    server.close()
    assert select.select([writer], [], [], 0)[0], "closing waits for it"
    os.close(writer)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("run", "a/b"), ("run", ".."), ("points", []), ("points", [3, 2]), ("points", [2, 2]), ("points", [-1, 2]),
     ("adapter", "layers"), ("slots", 0), ("bound", 5)],
)  # fmt: skip
def test_a_bad_config_is_refused_at_the_start(folder: Path, setting: str, value: object) -> None:
    raw = {"run": RUN, "folder": str(folder), "points": POINTS, setting: value}
    with pytest.raises(ValueError, match="eightzeros capture: "):
        Config.of(raw)


def test_the_hook_needs_nothing_of_ours(tmp_path: Path, reader: Staging) -> None:
    """Install it as the launcher does, and use it in a Python that cannot see this project."""
    install(str(tmp_path / "path"))
    spec = json.loads(hook_argument(RUN, str(tmp_path / "staging"), POINTS, "model"))[0]
    assert spec["hook_factory"] == "eightzeros_capture.hook:factory"
    code = (
        "import json, sys; from eightzeros_capture.hook import factory\n"
        "hook = factory(json.loads(sys.argv[1])); hook.close()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'backend']\n"
    )
    paths = os.pathsep.join([str(tmp_path / "path"), *(path for path in sys.path if "site-packages" in path)])
    command = [sys.executable, "-S", "-W", "ignore", "-c", code, json.dumps(spec["config"])]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": paths}, check=True, timeout=60)
    assert [record["run"] for record in reader.ranks()] == [RUN]
