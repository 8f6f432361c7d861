"""The SGLang engine: a server on this host whose capture hook leaves states in a folder.

The server says itself what it runs (/server_info): the model, and with the hook's settings the run's name, the
folder and the capture points. Everything here goes over loopback HTTP and is small; the states come by the
folder (backend.extraction.staging).
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.extraction import modelfolder
from backend.extraction.capture.config import Config
from backend.extraction.engines import EngineRefused
from backend.extraction.staging import Staging, StagingError
from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE_S = 2.0
"""A connection that rested longer is opened anew: the server closes such ones after 5 s, maybe just now."""

MAX_BODY_BYTES = 64 << 20
PASS_S = 60.0
"""How long a server may take to say what it is: its scheduler answers between two passes."""

ORPHAN_S = 5.0
HOOK_NAME = "eightzeros"
"""What staging.hook_argument calls the hook."""


class ServerGone(Exception):
    """The connection could not be made or broke; the text says how. The server may be gone, or not."""


class Rejected(Exception):
    """The server answered a request with an error. `final` where the same request can only fail again."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


@dataclass(frozen=True)
class Answer:
    """What the server said to one prompt."""

    output_ids: list[int]
    prompt_tokens: int | None
    cached_tokens: int


@dataclass(frozen=True)
class Settings:
    """How to reach the server. `staging` and `model` replace what the server says, where paths differ here."""

    url: str = "http://127.0.0.1:30000"
    staging: str = ""
    model: str = ""
    points: tuple[int, ...] = ()
    request_timeout_s: float = 600.0
    max_new_tokens: int = 0


class SglangEngine:
    """One server. Any thread may `ask`; each has a connection of its own."""

    name = "sglang"

    def __init__(self, settings: Settings) -> None:
        """Ask the server what it runs, and take its folder. Raises EngineRefused saying what is wrong."""
        self.settings = settings
        parts = urllib.parse.urlsplit(settings.url)
        if parts.scheme != "http" or not parts.hostname:
            raise EngineRefused(f"{settings.url!r} is no address of a server: write http://127.0.0.1:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._connections = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._reader = -1
        self.canary: dict[str, Any] = {}
        self.session = secrets.token_hex(4)
        try:
            try:
                self._learn()
            except (ServerGone, Rejected) as error:
                said = f"no server answers at {settings.url}: {error}; start the serve stage"
                raise EngineRefused(said) from None
            self.folder = modelfolder.find(settings.model or str(self.info["model_path"]))
            text = modelfolder.text_config(self.folder)
            self.hidden_size, self.vocab_size = int(text["hidden_size"]), int(text["vocab_size"])
            self.model = self._identity()
            self._claim()
        except BaseException:
            self.close()
            raise

    def _learn(self) -> None:
        """Read what the server runs now. Raises EngineRefused, ServerGone or Rejected."""
        self.info = self._get("/server_info")
        config = self._hook()
        points = tuple(config.points)
        if self.settings.points and self.settings.points != points:
            raise EngineRefused(f"the server captures the points {list(points)}, not {list(self.settings.points)}")
        if not self.info.get("disable_radix_cache"):
            raise EngineRefused(
                "the server's prefix cache is on, so that rows of repeated beginnings would be missing: "
                "start it with --disable-radix-cache"
            )
        self.capture, self.capture_points = config, points
        self.staging = Staging(self.settings.staging or config.folder, config.run, self.session)

    def _hook(self) -> Config:
        specs = self.info.get("forward_hooks") or []
        try:
            specs = json.loads(specs) if isinstance(specs, str) else specs
            for spec in specs:
                if spec.get("name") == HOOK_NAME:
                    return Config.of(spec["config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineRefused(f"the server's --forward-hooks cannot be read: {error}") from None
        raise EngineRefused(
            f"the server at {self.settings.url} runs without the capture hook: start it by the serve stage"
        )

    def _identity(self) -> str:
        path = str(self.info["model_path"])
        name = os.path.basename(path.rstrip("/")) if os.path.isabs(path) else path  # a folder may be moved
        words = [name, modelfolder.digest(self.folder)]
        for key in ("revision", "dtype", "quantization", "load_format"):
            value = self.info.get(key)
            words += [f"{key} {value}"] if value and value != "auto" else []
        return " ".join(words)

    def _claim(self) -> None:
        """Be the folder's one reader, and remove what an earlier one left. Raises EngineRefused."""
        path = os.path.join(self.staging.folder, f".{self.capture.run}.reader")
        try:
            self._reader = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._reader, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.staging.clear()
        except BlockingIOError:
            raise EngineRefused(f"another extraction reads the states of {self.settings.url}: stop it first") from None
        except OSError as error:
            raise EngineRefused(f"the staging folder {self.staging.folder} cannot be used: {error}") from None

    def recheck(self) -> None:
        """Look again at a server that was away. Raises EngineRefused where it is not what it was, or as `ask`."""
        points, place = self.capture_points, (self.capture.run, self.staging.folder)
        self._learn()
        if points != self.capture_points:
            said = f"{list(self.capture_points)}, not {list(points)}"
            self.capture_points = points  # of what is written
            raise EngineRefused(f"the server came back with other capture points: {said}")
        if self._identity() != self.model:
            raise EngineRefused(f"the server came back with another model: {self._identity()}, not {self.model}")
        if place != (self.capture.run, self.staging.folder):  # a run of its own each time it is launched
            os.close(self._reader)
            self._reader = -1
            self._claim()

    def about(self) -> dict[str, Any]:
        """Return the server's and the hook's own words for data_config.json."""
        ranks = self.ranks()
        first = ranks[0] if ranks else {}
        return {
            "server": {name: self.info.get(name) for name in
                       ("version", "model_path", "revision", "dtype", "quantization", "load_format", "tp_size",
                        "dp_size", "chunked_prefill_size", "max_prefill_tokens")},
            "capture": {"run": self.capture.run, "adapter": self.capture.adapter, "dtype": first.get("dtype", ""),
                        "effective_layers": {str(r.get("rank")): r.get("effective_layers") for r in ranks},
                        "versions": first.get("versions", {})},
            "canary": self.canary,
        }  # fmt: skip

    def ranks(self) -> list[dict[str, Any]]:
        """Return the counters of the server's ranks; none where they cannot be read at this moment."""
        try:
            return self.staging.ranks()
        except (OSError, StagingError):
            return []

    def row_bytes(self, tokens: int) -> int:
        """Return what a request of so many tokens takes in the folder, at most (float32)."""
        width = {"bfloat16": 2, "float16": 2}.get(self.ranks_dtype, 4)
        return 4096 + tokens * (8 + (len(self.capture_points) + 1) * self.hidden_size * width)

    @property
    def ranks_dtype(self) -> str:
        """Return the dtype of what is captured, empty before the first pass."""
        if not getattr(self, "_dtype", ""):
            self._dtype = next((str(rank["dtype"]) for rank in self.ranks() if rank.get("dtype")), "")
        return self._dtype

    def sweep(self) -> None:
        """Remove what requests of an earlier reader left after it was killed: their server knew nothing of it."""
        mine, run = f"{self.capture.run}-{self.session}-", f"{self.capture.run}-"
        for entry in os.scandir(self.staging.folder):
            if entry.name.startswith(run) and not entry.name.startswith(mine) and entry.name.endswith(".states"):
                try:
                    if time.time() - entry.stat().st_mtime > ORPHAN_S:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue

    # --- HTTP ---

    def alive(self) -> None:
        """See whether the server answers. Raises ServerGone or Rejected."""
        self._get("/model_info")

    def ask(self, rid: str, input_ids: Sequence[int], max_new_tokens: int | None = None) -> Answer:
        """Have one prompt prefilled. Raises ServerGone or Rejected."""
        new = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True},
            "stream": False,
        }
        said = self._exchange("POST", "/generate", json.dumps(body, separators=(",", ":")).encode("ascii"))
        about = said.get("meta_info")
        about = about if isinstance(about, dict) else {}
        ending = about.get("finish_reason")
        if isinstance(ending, dict) and ending.get("type") == "abort":
            raise Rejected(f"the server gave it up: {printable(str(ending.get('message')), 300)}", final=False)
        if str(about.get("id", rid)) != rid:
            raise Rejected(f"the server answered another request, {printable(str(about.get('id')), 100)}", final=False)
        ids = said.get("output_ids")
        return Answer(
            ids if isinstance(ids, list) else [],
            about.get("prompt_tokens"),
            int(about.get("cached_tokens") or 0),
        )

    def _get(self, path: str) -> dict[str, Any]:
        return self._exchange("GET", path, None, timeout_s=PASS_S)

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float = 0.0) -> dict[str, Any]:
        timeout_s = timeout_s or self.settings.request_timeout_s
        connection = self._connection(timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            data = response.read(MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._drop(connection)
            if isinstance(error, TimeoutError):
                raise Rejected(f"the server did not answer within {timeout_s:g} s", final=False) from None
            raise ServerGone(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        if response.will_close:
            self._drop(connection)
        self._connections.used_at = time.monotonic()
        if response.status != 200:
            final = 400 <= response.status < 500 and response.status not in (408, 425, 429)
            said = printable(data.decode("utf-8", "replace"), 300)
            raise Rejected(f"the server answered {response.status}: {said}", final)
        try:
            said_all = json.loads(data)
        except ValueError:
            said_all = None
        if not isinstance(said_all, dict):
            raise Rejected("the server's answer is no JSON object", final=False)
        return said_all

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return this thread's connection, a new one where the old one may be about to be closed."""
        old: http.client.HTTPConnection | None = getattr(self._connections, "one", None)
        if old is not None and old.sock is not None and time.monotonic() - self._connections.used_at < IDLE_S:
            old.sock.settimeout(timeout_s)
            return old
        if old is not None:
            self._drop(old)
        new = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        self._connections.one = new
        with self._lock:
            self._open.add(new)
        return new

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)

    def hang_up(self) -> None:
        """Break every connection: threads that wait for an answer get ServerGone, the server gives up."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(2)
                except OSError:
                    pass

    def close(self) -> None:
        """Leave the folder to another reader. Connections go with their threads."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
        with self._lock:
            connections, self._open = list(self._open), set()
        for connection in connections:
            connection.close()
