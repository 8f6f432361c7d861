"""A server that speaks as much of SGLang's HTTP as the extraction uses, and stages states as the hook does.

Its states are the embedded engine's, so that every shard can be computed again. Faults are asked for by the
number of a request that it gets, or by the sample: `Faults.plan` maps either to words below. It runs in the
test's process (`serving`) or in one of its own, to be killed (`python -m tests.fakeserver FOLDER PORT`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.bfloat16 import bfloat16_words, to_float32
from backend.extraction.engines.embedded import HIDDEN, POINTS, VOCAB, EmbeddedEngine
from backend.extraction.staging import hook_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RUN = "fake"
ENGINE = EmbeddedEngine()
_COMPUTING = threading.Lock()


def head() -> np.ndarray[Any, Any]:
    """Return the fake model's output head, the same every time."""
    return np.random.default_rng(1).standard_normal((VOCAB, HIDDEN)).astype(np.float32) * 0.05


HEAD = to_float32(bfloat16_words(head()))


def write_model(folder: Path, weights: np.ndarray[Any, Any] | None = None, **config: Any) -> Path:
    """Write a model's folder with a head in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 8, **config}
    (folder / "config.json").write_text(json.dumps(text))
    words = bfloat16_words(head() if weights is None else weights)
    about = {"lm_head.weight": {"dtype": "BF16", "shape": list(words.shape), "data_offsets": [0, words.nbytes]}}
    header = json.dumps(about).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + words.tobytes())
    return folder


@dataclass
class Faults:
    """What goes wrong. `plan` is asked with (index, attempt) of each request and names a fault, or nothing.

    500 400 reset lost failed short width nan ids hang garbage layers wrong-id cached token differ
    """

    plan: Callable[[int, int], str] = lambda index, attempt: ""
    before: Callable[[], None] = lambda: None
    delay_s: float = 0.0
    seen: list[tuple[int, int]] = field(default_factory=list)


class Fake(ThreadingHTTPServer):
    """The server and its hook in one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, folder: Path, port: int = 0, faults: Faults | None = None, staging: str = "staging", **info: Any
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.faults = folder, faults or Faults()
        self.staging = folder / staging
        self.staging.mkdir(exist_ok=True)
        model = folder / "model"
        if not model.exists():
            write_model(model)
        hook = hook_argument(RUN, str(self.staging), POINTS, "model", bound_bytes=64 << 20)
        self.info = {"model_path": str(model), "forward_hooks": json.loads(hook), "disable_radix_cache": True,
                     "dtype": "bfloat16", "version": "0.5.99", **info}  # fmt: skip
        self.dtype = "bfloat16"
        self.layers: list[int] | None = list(POINTS)
        self.in_flight = self.most_in_flight = self.high_water = 0
        self.lock = threading.Lock()
        self.report()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def report(self) -> None:
        used = sum(entry.stat().st_size for entry in _entries(self.staging) if entry.name.endswith(".states"))
        self.high_water = max(self.high_water, used)
        record = {"run": RUN, "rank": 0, "writes": True, "points": list(POINTS), "effective_layers": self.layers,
                  "hidden_size": HIDDEN, "dtype": self.dtype, "staged_bytes": used,
                  "high_water_bytes": self.high_water, "wait_s": 0.25}  # fmt: skip
        path = self.staging / f".rank0.{threading.get_ident()}"
        path.write_text(json.dumps(record))
        os.replace(path, self.staging / "rank0.json")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients are killed and hang up here."""


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            entry.stat()
            yield entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, self.server.info if self.path in ("/server_info", "/model_info") else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        index, attempt = (int(word) for word in asked["rid"].split("-")[-3:-1])
        with self.server.lock:
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            self.server.faults.seen.append((index, attempt))
        try:
            self._generate(asked, self.server.faults.plan(index, attempt))
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def _generate(self, asked: dict[str, Any], fault: str) -> None:
        self.server.faults.before()
        time.sleep(self.server.faults.delay_s)
        if fault == "hang":
            self.connection.recv(1)
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault in ("500", "400"):
            self._say(int(fault), {"error": {"message": "the fake server says no"}})
            return
        with _COMPUTING:
            states = ENGINE.states(asked["input_ids"])
        if fault == "failed":
            _put(
                self.server.staging / (asked["rid"] + ".failed"),
                json.dumps({"reason": "no slot became free"}).encode(),
            )
        elif fault != "lost":
            self._stage(asked, fault, to_float32(states.aux), to_float32(states.last))
        token = int((HEAD @ to_float32(states.last)[-1]).argmax()) + (fault == "token")
        about = {"id": asked["rid"], "prompt_tokens": len(asked["input_ids"]), "cached_tokens": 0,
                 "finish_reason": {"type": "length"}}  # fmt: skip
        about.update({"wrong-id": {"id": "other"}, "cached": {"cached_tokens": 5}}.get(fault, {}))
        self._say(
            200,
            {
                "text": "",
                "output_ids": [token][: asked["sampling_params"]["max_new_tokens"]],
                "meta_info": about,
            },
        )

    def _stage(self, asked: dict[str, Any], fault: str, aux: Any, last: Any) -> None:
        ids = np.asarray(asked["input_ids"], np.int64)
        if fault == "short":
            ids, aux, last = ids[:-1], aux[:-1], last[:-1]
        if fault == "ids":
            ids = ids[::-1].copy() if ids.size > 1 and (ids != ids[::-1]).any() else (ids + 1) % VOCAB
        if fault == "nan":
            last = last.copy()
            last[0, 3] = np.nan
        if fault == "differ":
            aux = aux * 1.5
        hidden = HIDDEN // 2 if fault == "width" else HIDDEN
        if fault == "width":
            aux, last = aux[:, : 3 * hidden], last[:, :hidden]
        layers = [n + 1 for n in POINTS] if fault == "layers" else self.server.layers
        dtype = self.server.dtype
        cast = bfloat16_words if dtype == "bfloat16" else lambda values: values.astype(dtype)
        body = ids.tobytes() + cast(aux).tobytes() + cast(last).tobytes()
        header = {"format": 1, "rid": asked["rid"], "rows": len(ids), "points": list(POINTS), "hidden_size": hidden,
                  "dtype": dtype, "effective_layers": layers, "bytes": 4096 + len(body)}  # fmt: skip
        data = json.dumps(header).encode().ljust(4095) + b"\n" + body
        if fault == "garbage":
            data = data[: 4096 + len(body) // 2]
        _put(self.server.staging / (asked["rid"] + ".states"), data)
        self.server.report()

    def _say(self, status: int, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _put(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


@contextlib.contextmanager
def serving(folder: Path, faults: Faults | None = None, port: int = 0, **info: Any) -> Iterator[Fake]:
    """Serve in this process until the block ends."""
    server = Fake(folder, port, faults, **info)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    from pathlib import Path

    fake = Fake(Path(sys.argv[1]), int(sys.argv[2]), Faults(delay_s=float(sys.argv[3])), *sys.argv[4:])
    print(fake.url, flush=True)
    fake.serve_forever()
