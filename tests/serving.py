"""Serve stages for tests: the launcher as a real process, over the stand-in for SGLang in tests/fakesglang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import until

FAKE = Path(__file__).with_name("fakesglang")
PROGRAM = "import sys; from backend.extraction.main import main; sys.exit(main(sys.argv[1:]))"
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def a_model(folder: Path, **changes: Any) -> Path:
    """Make a model's folder with a configuration and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


class Served:
    """A launcher under test, started as a supervisor starts it: its log is a file, its folder is the run's."""

    def __init__(self, folder: Path, model: Path | str, *more: str, mode: str = "ready", sglang: Path = FAKE) -> None:
        self.folder, self.root, self.port = folder / "run", folder / "staging", free_port()
        self.folder.mkdir()
        self.root.mkdir(exist_ok=True)
        self.log = self.folder / "log"
        self.log.write_text("RuntimeError: address already in use, of a start before\n")
        words = ["serve", "--model", str(model), "--port", str(self.port), "--staging-root", str(self.root)]
        words += [] if "--points" in more else ["--points", "2,16,29"]
        path = os.pathsep.join([str(Path(__file__).parent.parent), str(sglang)])
        ours = {"EIGHTZEROS_RUN": "serve-1", "EIGHTZEROS_RUN_DIR": str(self.folder)}
        environment = {**os.environ, **ours, "FAKE_MODE": mode, "PYTHONPATH": path}
        environment.pop("OPENBLAS_NUM_THREADS", None)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words, *more], stdout=log, stderr=log, env=environment,
                start_new_session=True, cwd=folder,
            )  # fmt: skip

    @property
    def progress(self) -> dict[str, Any]:
        """Return what the launcher said last."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "progress.json").read_text())
        except FileNotFoundError:
            return {"state": "", "message": ""}
        return found

    def until(self, state: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait for a state."""
        until(lambda: self.progress["state"] == state or self.process.poll() is not None, timeout_s)
        assert self.progress["state"] == state, self.text
        return self.progress

    @property
    def text(self) -> str:
        """Return the log."""
        return self.log.read_text()

    def ended(self, timeout_s: float = 30.0) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_s)

    def helper(self) -> int:
        """Return the pid of the process that the server started in a session of its own."""
        return int(next(line for line in self.text.split("\n") if line.startswith("helper ")).split()[1])

    def close(self) -> None:
        """End what still runs, by asking the launcher."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
