"""A real SGLang server on the CPU, with the capture hook, started and ended by a test."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.extraction.staging import hook_argument, install
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
START_S = 400.0
STOP_S = 20.0
CORES_FOR_RANKS = "0|1"
"""The threads of the two ranks, each on a core of its own."""

LATENT_ATTENTION = {"name": "cpu", "target_modules": ["model"], "hook_factory": "cpu:latent_attention"}


@dataclass(frozen=True)
class Setup:
    """What a server is started with. `chunk` is --chunked-prefill-size; `hook` the settings of the capture."""

    model: str
    chunk: int
    ranks: int = 1
    cache: bool = False
    hook: dict[str, float] = field(default_factory=dict)


@dataclass
class Server:
    """A server that answers."""

    python: str
    setup: Setup
    adapter: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float = 0.0

    def post(self, path: str, body: object, timeout_s: float = 120.0) -> Any:
        """Ask, and return the answer's JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, (answer.status, data[:500])
            return json.loads(data) if data.strip() else None
        finally:
            connection.close()

    def is_up(self) -> bool:
        """Say whether the server answers; it has warmed itself up by then."""
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.tail()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def generate(self, rid: str, ids: Sequence[int], new: int = 1) -> Any:
        """Have a prompt prefilled."""
        return self.post("/generate", request(rid, ids, new))

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:]


def request(rid: str, ids: Sequence[int], new: int) -> dict[str, Any]:
    """Return the body of a request for one prompt."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return {"rid": rid, "input_ids": list(ids), "sampling_params": sampling}


def has_logits_adapter(version: str) -> bool:
    """Say whether this version gives auxiliary states by itself."""
    return tuple(int(part) for part in version.split(".")[:3]) >= (0, 5, 23)


def version_of(python: str) -> str:
    """Return the version of SGLang that a Python has, empty where it has none."""
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return found.stdout.strip()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command_of(setup: Setup, python: str, model: Path, port: int, hooks: str) -> list[str]:
    """Return the server's command line but for the adapter's own flags."""
    words = [python, "-W", "ignore", str(HERE / "serve_cpu.py"), "--model-path", str(model)]
    words += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    words += ["--skip-tokenizer-init", "--mem-fraction-static", "0.3", "--max-total-tokens", "20000"]
    words += ["--max-running-requests", "32", "--host", "127.0.0.1", "--port", str(port), "--tp", str(setup.ranks)]
    words += ["--chunked-prefill-size", str(setup.chunk), "--forward-hooks", hooks]
    return words if setup.cache else [*words, "--disable-radix-cache"]


@contextmanager
def serving(
    python: str, setup: Setup, adapter: str, models: Path, work: Path, staging: Path, run: str, points: Sequence[int]
) -> Iterator[Server]:
    """Run a server until the block ends. Its hook breaks for some samples (faulty.py)."""
    install(str(work / "path"))
    hooks = json.loads(hook_argument(run, str(staging), points, adapter, **setup.hook))
    hooks[0]["hook_factory"] = "faulty:factory"
    hooks[:0] = [LATENT_ATTENTION] if setup.model == "deepseek_v3" else []
    port = free_port()
    command = command_of(setup, python, models / setup.model, port, json.dumps(hooks))
    if adapter == "logits":
        layers = [str(point - 1) for point in points]
        command += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "DFLASH"]
        command += ["--return-aux-hidden-state-layer-ids", *layers]
    dropped = ("PYTHONDONTWRITEBYTECODE",)  # each of its processes would compile every module at each start
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {"PYTHONPATH": os.pathsep.join([str(work / "path"), str(HERE)]), "HOME": str(work), "HF_HUB_OFFLINE": "1"}
    if setup.ranks > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = CORES_FOR_RANKS
    log, began = work / "server.log", time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, cwd=work, stdout=out, stderr=out, start_new_session=True)
    server = Server(python, setup, adapter, port, process, log)
    try:
        until(server.is_up, START_S, every_s=0.5)
        server.start_s = time.monotonic() - began
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: politely, for it then removes what it has in /dev/shm; and its session for certain."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
