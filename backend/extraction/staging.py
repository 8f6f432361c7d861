"""The reader's side of the capture hook: what the server was told, and the states that it left in a folder.

`backend.extraction.capture` says what lies there. Nothing is copied on the way: the arrays of a request are
its file, mapped. A reader takes what `look` shows as it appears, not only when the server has answered a
request: the server waits with a full folder, and answers none of a pass before all of it is captured.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend.extraction import capture
from backend.extraction.capture.config import NAME, Config
from backend.extraction.capture.folder import FAILED, clear, remove
from backend.extraction.capture.writing import FORMAT, HEADER_BYTES, PART, STATES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PACKAGE = "eightzeros_capture"
STACKS = ("model", "language_model.model")
"""Where the layer stack is, in text models and in those that wrap one (Kimi-K2.5)."""

LOGITS = "*logits_processor"
_DTYPES = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
_SETTINGS = ("format", "rid", "rows", "points", "hidden_size", "dtype", "effective_layers", "bytes")


class StagingError(Exception):
    """A file in the staging folder is not what it should be; the text names it."""


def install(folder: str) -> None:
    """Put the hook into a folder, for the server's PYTHONPATH. Raises OSError."""
    target = os.path.join(folder, PACKAGE)
    os.makedirs(target, exist_ok=True)
    source = os.path.dirname(os.path.abspath(capture.__file__))
    for name in os.listdir(source):
        if name.endswith(".py"):
            shutil.copyfile(os.path.join(source, name), os.path.join(target, name))


def hook_argument(run: str, folder: str, points: Sequence[int], adapter: str, **settings: float) -> str:
    """Return the value of the server's --forward-hooks. Raises ValueError; capture.config.Config has the settings."""
    config = {"run": run, "folder": os.path.abspath(folder), "points": list(points), "adapter": adapter, **settings}
    Config.of(config)
    spec = {
        "name": "eightzeros",
        "target_modules": [*STACKS, LOGITS] if adapter == "logits" else list(STACKS),
        "hook_factory": f"{PACKAGE}.hook:factory",
        "config": config,
    }
    return json.dumps([spec])


@dataclass(frozen=True)
class Staged:
    """One request's states, mapped. bfloat16 comes as its words (uint16).

    `aux` is [L, K x H], the capture points side by side, lowest first; `last` is [L, H], after the final norm.
    The file is gone, and its room with it, once it was discarded and no array of it is held any more.
    """

    path: str
    rid: str
    dtype: str
    points: list[int]
    effective_layers: list[int] | None
    ids: NDArray[np.int64]
    aux: NDArray[Any]
    last: NDArray[Any]

    def discard(self) -> None:
        """Remove the file: it has been read."""
        remove(self.path)


class Seen(NamedTuple):
    """What waits for the reader, by rid."""

    whole: list[str]
    failed: list[str]


class Staging:
    """The staging folder of one run. `session` tells the requests of this reader from an earlier one's."""

    def __init__(self, folder: str, run: str, session: str) -> None:
        if not NAME.fullmatch(f"{run}-{session}"):
            raise ValueError(f"run {run!r} and session {session!r} must be letters, digits, '.', '_' or '-'")
        self.folder = folder
        self._run, self._prefix = run, f"{run}-{session}-"

    def rid(self, index: int, attempt: int, tokens: int) -> str:
        """Return the id to send with a request; it may be used once."""
        return f"{self._prefix}{index}-{attempt}-{tokens}"

    def look(self) -> Seen:
        """See which of this session's requests are whole and which have failed. Raises OSError."""
        names = [name for name in os.listdir(self.folder) if name.startswith(self._prefix)]
        return Seen(*([n.removesuffix(end) for n in names if n.endswith(end)] for end in (STATES, FAILED)))

    def open(self, rid: str) -> Staged:
        """Map a whole request. Raises StagingError, or OSError where it is not there."""
        path = os.path.join(self.folder, rid + STATES)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise StagingError(f"{path}: {size} bytes are too few for a header")
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        header = _header(path, data[:HEADER_BYTES], rid)
        dtype, rows, hidden = np.dtype(_DTYPES[header["dtype"]]), header["rows"], header["hidden_size"]
        shapes = ((rows,), (rows, len(header["points"]) * hidden), (rows, hidden))
        arrays, at = [], HEADER_BYTES
        for kind, shape in zip((np.dtype(np.int64), dtype, dtype), shapes, strict=True):
            end = at + int(np.prod(shape)) * kind.itemsize
            if end > size:
                raise StagingError(f"{path}: {size} bytes are too few for {rows} rows")
            arrays.append(np.frombuffer(data, kind, int(np.prod(shape)), at).reshape(shape))
            at = end
        if at != size or at != header["bytes"]:
            raise StagingError(f"{path}: {size} bytes, where {rows} rows need {at}")
        return Staged(path, rid, header["dtype"], header["points"], header["effective_layers"], *arrays)

    def reason(self, rid: str) -> str:
        """Say why a request failed, and forget that it did. Raises StagingError, or OSError."""
        path = os.path.join(self.folder, rid + FAILED)
        with open(path, "rb") as file:
            record = _parsed(path, file.read())
        remove(path)
        return str(record.get("reason"))

    def forget(self, rid: str) -> None:
        """Give a request up: what there is of it is removed, and the hook takes no more of it."""
        for name in os.listdir(self.folder):
            if name.startswith(rid + ".") and name.endswith((STATES, FAILED, PART)):
                remove(os.path.join(self.folder, name))

    def ranks(self) -> list[dict[str, Any]]:
        """Return the counters of every rank (capture.config.Counters); none before the server has loaded."""
        found = []
        for name in sorted(os.listdir(self.folder)):
            if name.startswith("rank") and name.endswith(".json"):
                path = os.path.join(self.folder, name)
                with open(path, "rb") as file:
                    found.append(_parsed(path, file.read()))
        return [record for record in found if record.get("run") == self._run]

    def clear(self) -> int:
        """Remove every request of this run, of any session; return how many files. Raises OSError."""
        return clear(self.folder, self._run)


def _parsed(path: str, data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise StagingError(f"{path}: no JSON object")
    return record


def _header(path: str, data: bytes, rid: str) -> dict[str, Any]:
    record = _parsed(path, data)
    lacking = [name for name in _SETTINGS if name not in record]
    if lacking or record["format"] != FORMAT:
        raise StagingError(f"{path}: no states of this version (format {record.get('format')!r}, lacks {lacking})")
    if record["rid"] != rid or record["dtype"] not in _DTYPES:
        raise StagingError(f"{path}: holds {record['rid']!r} in {record['dtype']!r}")
    return record
