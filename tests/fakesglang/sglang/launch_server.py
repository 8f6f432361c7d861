"""The server of the stand-in. It logs like SGLang, answers /health and /server_info, and fails as FAKE_MODE says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TRACEBACK = "[2026-12-01 10:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):"
MODES = {
    "oom": [
        TRACEBACK,
        '  File "/opt/x/loader.py", line 9, in load',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 3 has a total capacity of "
        "139.81 GiB of which 12.50 MiB is free. Process 77 has 139.79 GiB memory in use.",
        "",
        "[2026-12-01 10:00:02 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "[2026-12-01 10:00:02] Received sigquit from a child process. It usually means the child failed.",
    ],
    "compiler": [TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"],
    "silent": ["[2026-12-01 10:00:01 TP0] Load weight begin. avail mem=139.1 GB"],
}


def option(name: str) -> str:
    """Return the value of an option; empty where it is not given."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def say(text: str) -> None:
    """Write a line of the log."""
    print(text, flush=True)


class Answers(BaseHTTPRequestHandler):
    """Answers as SGLang does."""

    def do_GET(self) -> None:
        """Answer the launcher, the gate and the extraction."""
        body = b""
        if self.path == "/server_info":
            hooks = json.loads(option("--forward-hooks"))
            body = json.dumps({"model_path": option("--model-path"), "forward_hooks": hooks}).encode()
        self.send_response(200 if self.path in ("/health", "/server_info") else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def rank_file(layers: list[int]) -> None:
    """Leave what the capture hook's first pass leaves."""
    config = json.loads(option("--forward-hooks"))[0]["config"]
    record = {"run": config["run"], "rank": 0, "writes": True, "points": config["points"], "effective_layers": layers}
    with open(os.path.join(config["folder"], "rank0.json"), "w", encoding="ascii") as file:
        json.dump(record, file)


def main() -> None:
    """Start, and serve until asked to end."""
    mode = os.environ.get("FAKE_MODE", "ready")
    say("[2026-12-01 10:00:00] server_args=ServerArgs(model_path='/m', trust_remote_code=True, port=30000)")
    say("[2026-12-01 10:00:00 TP0] Ignore import error when loading x: No module named 'transformers.models.x'")
    say("PYTHONPATH=" + os.environ.get("PYTHONPATH", "") + " BLAS=" + os.environ.get("OPENBLAS_NUM_THREADS", "unset"))
    if mode in MODES:
        say("\n".join(MODES[mode]))
        sys.exit(0 if mode == "silent" else 1)
    if mode == "slow":
        time.sleep(3600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    say(f"helper {helper.pid}")
    points = json.loads(option("--forward-hooks"))[0]["config"]["points"]
    if mode != "no-hook":
        rank_file([point + 1 for point in points] if mode == "wrong-layers" else points)
    server = ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Answers)
    say("[2026-12-01 10:00:03] The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
