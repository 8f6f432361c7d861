"""The capture hook in a real SGLang server, on the CPU, against transformers with the same weights.

EIGHTZEROS_SGLANG_PYTHON names the Python of an environment that tests/sglang/install.sh has made, or several of
them, separated as in PATH: tests/sglang/all.sh runs every version that is supported.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.capture.writing import HEADER_BYTES
from backend.extraction.staging import Staging
from tests.sglang.server import HERE, Server, Setup, has_logits_adapter, request, serving, version_of
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

CLIENTS = 8
WORST = 2e-5
RUN, POINTS, HIDDEN = "run1", [1, 3, 5], 64
ROW_BYTES = 8 + 4 * HIDDEN * (len(POINTS) + 1)
LENGTHS = [1, 2, 3, 7, 40, 64, 65, 127, 128, 129, 200, 255, 256, 257, 333, 400, 511, 512, 600, 700]
LONGEST = max(LENGTHS)
OTHERS = {"again": 150, "cancelled": 650, "broken": 90, "unwritten": 300, "after": 30, "too long": LONGEST + 1}

# A pass is larger than all slots together, and a few requests fill the folder.
SMALL = {"slots": 2, "slot_bytes": 50 * ROW_BYTES, "writers": 2, "bound_bytes": HEADER_BYTES + LONGEST * ROW_BYTES}
SETUPS = {
    "llama, chunks of 128": Setup("llama", 128, hook=SMALL),
    "qwen3, whole prompts, prefix cache on": Setup("qwen3", -1, cache=True, hook=SMALL),
    "deepseek_v3, chunks of 256, 2 ranks": Setup("deepseek_v3", 256, ranks=2, hook=SMALL),
}


def prompts_of(model: str) -> dict[str, list[int]]:
    """Return a model's prompts. No two begin alike, so that a prefix cache has nothing but what is sent twice."""
    source = np.random.default_rng(len(model))
    lengths = {str(n): n for n in LENGTHS} | OTHERS
    return {
        name: [100 + number, *source.integers(3, 512, length - 1).tolist()]
        for number, (name, length) in enumerate(lengths.items())
    }


@dataclass
class Bed:
    """A server, what reads its states, and the truth."""

    server: Server
    reader: Staging
    folder: Path
    prompts: dict[str, list[int]]
    truth: Any

    def rid(self, name: str, index: int, attempt: int = 0) -> str:
        return self.reader.rid(index, attempt, len(self.prompts[name]))

    def send(self, name: str, rid: str, new: int = 1) -> Any:
        answer = self.server.generate(rid, self.prompts[name], new)
        assert answer["meta_info"]["id"] == rid
        return answer

    def wait(self, rid: str) -> str:
        """Wait for a request's states or failure; return the reason of the failure."""
        until(lambda: rid in (seen := self.reader.look()).whole or rid in seen.failed, 60)
        return "" if rid in self.reader.look().whole else self.reader.reason(rid)

    def worst(self, name: str, rid: str) -> float:
        """Take a request's states; return how far they are from the truth at most."""
        reason = self.wait(rid)
        assert reason == "", reason
        found, truth = self.reader.open(rid), self.truth[f"{name}/states"]
        assert found.ids.tolist() == self.prompts[name]
        assert found.points == found.effective_layers == POINTS
        aux = np.concatenate([truth[point] for point in POINTS], axis=-1)
        assert found.aux.shape == aux.shape and found.last.shape == truth[-1].shape
        error = max(float(np.abs(found.aux - aux).max()), float(np.abs(found.last - truth[-1]).max()))
        found.discard()
        return error

    def counters(self) -> dict[str, Any]:
        return self.reader.ranks()[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the models and the truth about every prompt."""
    folder = tmp_path_factory.mktemp("models")
    wanted = folder / "prompts.json"
    wanted.write_text(json.dumps({setup.model: prompts_of(setup.model) for setup in SETUPS.values()}))
    command = [PYTHONS[0], "-W", "ignore", str(HERE / "tiny.py"), str(folder), str(wanted)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=env | {"HOME": str(folder)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module", params=PYTHONS or [""], ids=lambda path: version_of(path) if path else "none")
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SETUPS)
def bed(
    request: pytest.FixtureRequest, python: str, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    """Start one server, with what an earlier run has left in its folder."""
    setup, work = SETUPS[request.param], tmp_path_factory.mktemp("server")
    builtin = has_logits_adapter(version_of(python)) and setup.model != "qwen3"  # both adapters run where both can
    staging = Path("/dev/shm") / f"eightzeros-test-{os.getpid()}-{work.name}"
    staging.mkdir(mode=0o700)
    (staging / f"{RUN}-s0-3-0-9.states").write_text("an earlier run's")
    try:
        adapter = "logits" if builtin else "model"
        with (
            serving(python, setup, adapter, models, work, staging, RUN, POINTS) as server,
            np.load(models / f"{setup.model}.npz") as truth,
        ):
            print(f"\n{request.param}: SGLang {version_of(python)} answered after {server.start_s:.0f} s")
            yield Bed(server, Staging(str(staging), RUN, "s1"), staging, prompts_of(setup.model), truth)
    finally:
        shutil.rmtree(staging)


def test_every_rank_says_its_layers_before_anything_is_sent(bed: Bed) -> None:
    until(lambda: len(bed.reader.ranks()) == bed.server.setup.ranks)
    until(lambda: all(rank["effective_layers"] == POINTS for rank in bed.reader.ranks()))
    ranks = bed.reader.ranks()
    assert [rank["writes"] for rank in ranks] == [True, False][: len(ranks)]
    assert {rank["versions"]["sglang"] for rank in ranks} == {version_of(bed.server.python)}
    assert not list(bed.folder.glob("*.states")), "what an earlier run has left is gone"


def test_states_equal_transformers(bed: Bed) -> None:
    """Send prompts of every length through 8 clients, while the reader takes what appears."""
    before, errors, answers = bed.counters(), {}, {}
    rids = {name: bed.rid(name, index) for index, name in enumerate(map(str, LENGTHS))}

    def read_all() -> None:
        with ThreadPoolExecutor(len(rids)) as readers:
            for name, error in zip(rids, readers.map(lambda n: bed.worst(n, rids[n]), rids), strict=True):
                errors[name] = error

    thread = threading.Thread(target=read_all)
    thread.start()
    with ThreadPoolExecutor(CLIENTS) as clients:
        order = sorted(rids, key=lambda name: hash_of(name))
        for name, answer in zip(order, clients.map(lambda n: bed.send(n, rids[n], len(n) % 2), order), strict=True):
            answers[name] = answer
    thread.join(60)
    assert set(errors) == set(rids) and max(errors.values()) <= WORST, errors
    for name, answer in answers.items():
        assert answer["output_ids"] == ([int(bed.truth[f"{name}/token"])] if len(name) % 2 else [])
    until(lambda: bed.counters()["whole"] - before["whole"] == len(rids))
    after = bed.counters()
    assert after["rows"] - before["rows"] == sum(LENGTHS) and after["failed"] == before["failed"]
    assert after["high_water_bytes"] <= SMALL["bound_bytes"] or after["over_bound"]
    print(f"worst error {max(errors.values()):.1e}, waited {after['wait_s']:.2f} s")


def hash_of(name: str) -> int:
    """Return a number that mixes short and long prompts, the same each time."""
    return int(name) * 7919 % 1009


def test_a_repeated_prompt(bed: Bed) -> None:
    """Without a prefix cache it is captured again; with one it is refused, and the reason is the true one."""
    rids = [bed.rid("again", 100, attempt) for attempt in range(2)]
    bed.send("again", rids[0])
    assert bed.worst("again", rids[0]) <= WORST
    bed.send("again", rids[1])
    if bed.server.setup.cache:
        assert (
            bed.wait(rids[1]) == "the server's prefix cache held its first 149 rows: --disable-radix-cache is missing"
        )
    else:
        assert bed.worst("again", rids[1]) <= WORST


def test_a_cancelled_request_leaves_nothing(bed: Bed) -> None:
    rid = bed.rid("cancelled", 101)
    connection = http.client.HTTPConnection("127.0.0.1", bed.server.port, timeout=60)
    connection.request(
        "POST", "/generate", json.dumps(request(rid, bed.prompts["cancelled"], 1)), {"Content-Type": "application/json"}
    )
    until(lambda: list(bed.folder.glob(f"{rid}.*")), 60, every_s=0.001)
    connection.close()
    bed.server.post("/abort_request", {"rid": rid})
    bed.reader.forget(rid)
    bed.send("after", bed.rid("after", 102))
    assert bed.worst("after", bed.rid("after", 102)) <= WORST

    def gone() -> bool:
        bed.reader.forget(rid)  # it may have become whole in between
        return not list(bed.folder.glob(f"{rid}.*")) and bed.counters()["staged_bytes"] == 0

    until(gone)


@pytest.mark.parametrize(
    ("name", "index", "reason"),
    [
        ("broken", 666, "ZeroDivisionError('asked for by the test')"),
        ("unwritten", 667, "[Errno 28] No space left on device"),
        ("too long", 103, f"its {LONGEST + 1} tokens need"),
    ],
)
def test_what_goes_wrong_in_the_hook_fails_the_sample_alone(bed: Bed, name: str, index: int, reason: str) -> None:
    rid, other = bed.rid(name, index), bed.reader.rid(104, index % 90, 2)
    answer = bed.send(name, rid)
    assert answer["output_ids"] == [int(bed.truth[f"{name}/token"])]
    assert bed.wait(rid).startswith(reason)
    bed.server.generate(other, [3 + index % 90, 7])  # begins like no other, whatever the server has cached
    assert bed.wait(other) == ""
    bed.reader.open(other).discard()
    until(lambda: bed.counters()["error"].startswith(f"{rid}: {reason}"))
    assert not list(bed.folder.glob(f"{rid}.*"))
    assert bed.server.process.poll() is None
