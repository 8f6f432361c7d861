"""What the capture hook leaves in its folder, who may have it, and how its reader takes it."""

from __future__ import annotations

import json
import os
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
from tests.capturing import HIDDEN, POINTS, RUN, WIDTH, Rows, Server, check, pass_of  # noqa: E402
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
