"""The whole extraction from a real SGLang server, on the CPU: killed, resumed, and every state beside the truth.

As tests/test_sglang_server.py, it needs EIGHTZEROS_SGLANG_PYTHON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.bfloat16 import to_float32
from backend.shardfmt import layout
from tests.extracting import finish, journal, read_shard, start
from tests.sglang.server import HERE, Server, Setup, has_logits_adapter, serving, version_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHONS = [path for path in os.environ.get("EIGHTZEROS_SGLANG_PYTHON", "").split(os.pathsep) if path]
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHONS, reason="needs SGLang (tests/sglang/install.sh)"),
]

RUN, POINTS, HIDDEN, SAMPLES = "whole", [1, 3, 5], 64, 60
ERROR = 2e-5
HALF_STEP = 2.0**-8
"""bfloat16 keeps 8 bits: a rounded value lies within this share of what it was."""


def records() -> list[dict[str, Any]]:
    """Return a corpus for the tiny model: 1 to 400 tokens, masks and ids of its own."""
    chance, found = np.random.default_rng(7), []
    for number in range(SAMPLES):
        ids = chance.integers(3, 512, int(chance.integers(1, 400))).tolist()
        found.append({"id": f"s{number}", "input_ids": ids, "loss_mask": [n % 2 for n in range(len(ids))]})
    return found


class Scene:
    """A server, the corpus beside it, and the truth."""

    def __init__(self, server: Server, folder: Path, truth: Any) -> None:
        self.server, self.folder, self.truth = server, folder, truth
        self.corpus = folder / "c.jsonl"
        self.corpus.write_text("".join(json.dumps(record) + "\n" for record in records()))

    def start(self, out: Path, *more: str) -> subprocess.Popen[str]:
        return start(self.corpus, out, "--engine", "sglang", "--server", f"http://127.0.0.1:{self.server.port}",
                     "--json", "--concurrency", "8", *more)  # fmt: skip

    def check(self, out: Path, line: dict[str, Any]) -> None:
        """Compare a shard with the truth, which bfloat16 keeps to half a step."""
        record, shard = records()[line["index"]], read_shard(out / line["file"])
        truth = self.truth[f"{line['index']}/states"]
        assert shard["input_ids"].tolist() == record["input_ids"]
        assert shard["loss_mask"].tolist() == record["loss_mask"]
        for found, wanted in (
            (shard["aux_hidden_state"][0], np.concatenate([truth[point] for point in POINTS], axis=-1)),
            (shard["hidden_state"][0], truth[-1]),
        ):
            assert np.all(np.abs(to_float32(found) - wanted) <= HALF_STEP * np.abs(wanted) + ERROR)


@pytest.fixture(scope="module", params=PYTHONS or [""], ids=lambda path: version_of(path) if path else "none")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    python, work = str(request.param), tmp_path_factory.mktemp("whole")
    models = work / "models"
    models.mkdir()
    prompts = work / "prompts.json"
    prompts.write_text(json.dumps({"llama": {str(n): r["input_ids"] for n, r in enumerate(records())}}))
    command = [python, "-W", "ignore", str(HERE / "tiny.py"), str(models), str(prompts)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, env=env | {"HOME": str(work)}, capture_output=True, check=True)
    staging = Path("/dev/shm") / f"eightzeros-whole-{os.getpid()}-{work.name}"
    adapter = "logits" if has_logits_adapter(version_of(python)) else "model"
    try:
        with (
            serving(python, Setup("llama", 128), adapter, models, work, staging, RUN, POINTS) as server,
            np.load(models / "llama.npz") as truth,
        ):
            yield Scene(server, work, truth)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def test_killed_and_resumed_every_state_is_the_models(scene: Scene, tmp_path: Path) -> None:
    client = scene.start(tmp_path / "out")
    until(lambda: client.poll() is not None or len(list((tmp_path / "out").glob("rows_*/*"))) > 20, 120)
    client.kill()
    finish(client)
    there = len(journal(tmp_path / "out"))
    code, printed, errors = finish(scene.start(tmp_path / "out"))
    result = json.loads(printed)
    assert (code, result["samples"], result["resumed"], result["failed"]) == (0, SAMPLES, there, []), errors
    lines = journal(tmp_path / "out")
    assert sorted(line["index"] for line in lines) == list(range(SAMPLES))
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").glob("rows_*/*")) == (
        sorted(line["file"] for line in lines)
    )
    for line in lines:
        scene.check(tmp_path / "out", line)
    about = json.loads((tmp_path / "out" / layout.CONFIG_NAME).read_bytes())
    assert about["canary"]["head"].startswith("lm_head.weight gives the server's next token")
    assert (about["capture"]["dtype"], about["capture"]["effective_layers"]) == ("float32", {"0": POINTS})


def test_points_that_the_server_does_not_have_are_refused(scene: Scene, tmp_path: Path) -> None:
    code, printed, _ = finish(scene.start(tmp_path / "out", "--points", "1,3,4"))
    assert (code, json.loads(printed)["error"]) == (
        1,
        "the server captures the points [1, 3, 5], not [1, 3, 4]",
    )


def test_a_rehearsal_says_go(scene: Scene, tmp_path: Path) -> None:
    code, printed, errors = finish(scene.start(tmp_path / "out", "--rehearse", "--order", "longest"))
    found = json.loads(printed)["rehearsal"]
    assert (code, found["go"], found["samples"], found["samples_left"]) == (0, True, 50, 10), errors
    assert 0 < found["staging_high_bytes"] < found["staging_bound_bytes"]


def test_a_server_that_is_killed_under_way_ends_it_with_that_reason(scene: Scene, tmp_path: Path) -> None:
    """The last test: it takes the server with it."""
    client = scene.start(tmp_path / "out", "--server-wait", "2")
    until(lambda: client.poll() is not None or len(journal(tmp_path / "out")) > 10, 120)
    os.killpg(scene.server.process.pid, signal.SIGKILL)
    code, printed, _ = finish(client)
    result = json.loads(printed)
    assert (code, result["state"], result["failed"]) == (1, "failed", [])
    assert "has been away for 2 s" in result["message"]
    assert len(journal(tmp_path / "out")) == result["samples"] >= 10
    assert list((tmp_path / "out").glob("rows_*/.*")) == []
    for line in journal(tmp_path / "out"):
        scene.check(tmp_path / "out", line)
