"""SIGKILL at random moments, of the extraction, of its server, or of both: then everything is there once, and right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backend.shardfmt import layout
from tests.extracting import check_folder, finish, journal, start, write_corpus
from tests.fakeserver import ENGINE, RUN
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 120


class Scene:
    """A server and an extraction that may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.out = folder, folder / "out"
        self.records = write_corpus(folder / "c.jsonl", SAMPLES)
        self._port = 0
        self.server, self.client = self.serve(), self.extract()

    def serve(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.fakeserver", str(self._folder), str(self._port), "0.01"]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        self._port = int(server.stdout.readline().rpartition(":")[2])
        return server

    def extract(self) -> subprocess.Popen[str]:
        return start(self._folder / "c.jsonl", self.out, "--engine", "sglang", "--concurrency", "8",
                     "--server", f"http://127.0.0.1:{self._port}")  # fmt: skip

    def moment(self, chance: random.Random) -> None:
        """Wait until some more requests are staged, files written or groups committed, whichever chance says."""
        seen, more = self.marks(), chance.randint(1, 12)
        until(lambda: self.client.poll() is not None or self.marks() >= seen + more, 30.0, 0.002)

    def marks(self) -> int:
        written = len(list(self.out.glob("rows_*/*")))
        return written + len(list((self._folder / "staging").glob(f"{RUN}-*")))

    def kill(self, *processes: subprocess.Popen[str]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()

    def close(self) -> None:
        self.kill(*(process for process in (self.server, self.client) if process.returncode is None))

    def explain(self, printed: str, errors: str) -> None:
        """Accept a refusal by the canary, or a sample that had the killed server to itself and looks guilty."""
        if errors:
            assert "the canary prompt was not answered" in errors or "no server answers" in errors
            return
        assert "samples could not be extracted" in printed, printed
        lines = (self.out / layout.FAILED_NAME).read_text().splitlines()
        assert all("goes away whenever it gets this sample" in json.loads(line)["reason"] for line in lines)

    def check(self, every: int) -> None:
        """Check the end, starting again what ended for one of two reasons that a killed server gives."""
        code, printed, errors = finish(self.client)
        while code == 1:
            self.explain(printed, errors)
            self.client = self.extract()
            code, printed, errors = finish(self.client)
        assert (code, errors) == (0, "")
        check_folder(self.out, self.records, ENGINE, every)
        assert list((self._folder / "staging").glob(f"{RUN}-*")) == []


def kill_at(folder: Path, moments: int, seed: int, every: int = 4) -> list[str]:
    """Kill that often, checking each time that the journal only grew, and at the end every so many records;
    return whom."""
    chance, killed, kept = random.Random(seed), [], 0
    scene = Scene(folder)
    try:
        for _ in range(moments):
            whom = chance.choice(("client", "server", "both"))
            scene.moment(chance)
            if scene.client.poll() is not None:
                break
            killed.append(whom)
            scene.kill(*[scene.client] * (whom != "server"), *[scene.server] * (whom != "client"))
            assert len(list(scene.out.glob("rows_*/.*.tmp"))) <= 16 + 8
            now = len(journal(scene.out))
            assert now >= kept
            kept = now
            if whom != "client":
                scene.server = scene.serve()
            if whom != "server":
                scene.client = scene.extract()
        scene.check(every)
    finally:
        scene.close()
    return killed


def test_three_kills(tmp_path: Path) -> None:
    assert len(kill_at(tmp_path, 3, seed=2)) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills(tmp_path: Path) -> None:
    killed: list[str] = []
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed += kill_at(folder, 8, seed, every=1)
        if len(killed) >= 50:
            break
    assert {whom: killed.count(whom) >= 5 for whom in set(killed)} == {
        "client": True,
        "server": True,
        "both": True,
    }
