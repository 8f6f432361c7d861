"""The extraction's client against the raw disk: a server that costs nothing, states of Qwen3-8B's size, files on disk.

    python benchmarks/extract_pipeline.py [FOLDER [SAMPLES [TOKENS]]]

A server process answers every prompt at once by copying ready states into the staging folder (as the hook's writers
do), so that the client is the limit: it reads, checks for NaN, computes CRC-32, writes, syncs, renames, keeps its
journal. Beside it, twice in turns: the same bytes written plainly to the same disk, a file each, as many threads,
each synced. Prints both rates and their ratio.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.extraction import extract
from backend.extraction.staging import hook_argument
from backend.wire import GIB

HIDDEN, POINTS, RUN = 4096, [2, 18, 33], "bench"
THREADS = 4


class Handler(BaseHTTPRequestHandler):
    """Answers, and stages the same states under each prompt's own name."""

    protocol_version = "HTTP/1.1"
    staging: Path
    words: memoryview
    info: dict[str, Any]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Say what runs here."""
        self._say(self.info)

    def do_POST(self) -> None:
        """Stage, then answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rid, tokens = asked["rid"], len(asked["input_ids"])
        size = tokens * (8 + HIDDEN * 8)
        header = {"format": 1, "rid": rid, "rows": tokens, "points": POINTS, "hidden_size": HIDDEN,
                  "dtype": "bfloat16", "effective_layers": POINTS, "bytes": 4096 + size}  # fmt: skip
        part = self.staging / f"{rid}.part"
        with part.open("wb") as file:
            file.write(json.dumps(header).encode().ljust(4095) + b"\n")
            file.write(np.asarray(asked["input_ids"], np.int64).tobytes())
            file.write(self.words[: size - 8 * tokens])
        part.rename(self.staging / f"{rid}.states")
        self._say({"output_ids": [], "meta_info": {"id": rid, "prompt_tokens": tokens}})

    def _say(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(folder: Path, tokens: int) -> None:
    """Run the server; it prints its port."""
    staging = folder / "staging"
    words = np.random.default_rng(8).integers(0, 0x7F00, tokens * HIDDEN * 4, np.uint16)
    Handler.staging, Handler.words = staging, words.data.cast("B")
    hook = json.loads(hook_argument(RUN, str(staging), POINTS, "model", bound_bytes=2 * GIB))
    Handler.info = {"model_path": str(folder), "forward_hooks": hook, "disable_radix_cache": True}
    rank = {"run": RUN, "rank": 0, "writes": True, "dtype": "bfloat16", "effective_layers": POINTS}
    (staging / "rank0.json").write_text(json.dumps(rank))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def plain(folder: Path, samples: int, size: int) -> float:
    """Write as many bytes to files of that size and return GB/s."""
    folder.mkdir()
    data = memoryview(np.random.default_rng(9).bytes(size))

    def write(number: int) -> None:
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o644)
        done = 0
        while done < size:
            done += os.pwrite(fd, data[done : done + (16 << 20)], done)
        os.fdatasync(fd)
        os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(samples)))
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return samples * size / seconds / 1e9


def extracted(folder: Path, port: int, out: Path) -> tuple[float, float]:
    """Extract everything; return GB/s and the CPU seconds a GB of this process."""
    said, cpu = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        code = extract.main(["--engine", "sglang", "--server", f"http://127.0.0.1:{port}", "--json", "--writers",
                             str(THREADS), "--corpus", str(folder / "c.jsonl"), "--out", str(out)])  # fmt: skip
    result = json.loads(said.getvalue())
    assert code == 0, result
    shutil.rmtree(out)
    gigabytes = result["bytes"] / 1e9
    return gigabytes / result["seconds"], (time.process_time() - cpu) / gigabytes


def main(where: str, samples: int, tokens: int) -> None:
    """Take turns and print."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as fast, tempfile.TemporaryDirectory(dir=where) as slow:
        folder, disk = Path(fast), Path(slow)
        (folder / "staging").mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "vocab_size": 151936}))
        (folder / "c.jsonl").write_text((json.dumps({"input_ids": list(range(tokens))}) + "\n") * samples)
        argv = [sys.executable, __file__, "serve", str(folder), str(tokens)]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            port, size = int(server.stdout.readline()), tokens * (HIDDEN * 8 + 16)
            print(
                f"{samples} samples of {tokens} tokens, {size / 1e6:.0f} MB each, {THREADS} writers, "
                f"{os.cpu_count()} cores"
            )
            for turn in range(2):
                raw = plain(disk / "plain", samples, size)
                rate, cpu = extracted(folder, port, disk / f"out{turn}")
                print(f"plain writes {raw:.3f} GB/s, extraction {rate:.3f} GB/s ({cpu:.2f} s of CPU a GB): "
                      f"ratio {rate / raw:.2f}", flush=True)  # fmt: skip
        finally:
            server.kill()
            server.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        words = [*sys.argv[1:], "", "", ""]
        main(words[0] or tempfile.gettempdir(), int(words[1] or 24), int(words[2] or 2353))
