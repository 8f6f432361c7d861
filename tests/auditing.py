"""Folders of shards for the audit's tests: each file with states of its own, and an audit in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backend.shardfmt import layout
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Storage, T

H, K = 8, 3


def ids(values: list[int], dtype: str = "int64") -> T:
    form = {"int64": "q", "int32": "i", "int16": "h"}[dtype]
    return T(dtype, (len(values),), Storage(dtype, len(values), struct.pack(f"<{len(values)}{form}", *values)))


def states(shape: tuple[int, ...], seed: Any, dtype: str = "bfloat16") -> T:
    """Make states of chance: finite, and never zero."""
    chance = random.Random(str(seed))
    words = [0x3C00 + chance.randrange(0x300) for _ in range(T(dtype, shape).numel())]
    data = struct.pack(f"<{len(words)}H", *words) if dtype == "bfloat16" else struct.pack(f"<{len(words)}f", *words)
    return T(dtype, shape, Storage(dtype, len(words), data))


def sample(index: int, tokens: int = 5, **other: Any) -> dict[str, Any]:
    """Make a canonical sample; `other` replaces tensors, None leaves one out."""
    made = {
        "input_ids": ids([index * 7 % 4000, *range(10, 9 + tokens)]),
        "loss_mask": ids([1] * tokens),
        "aux_hidden_state": states((1, tokens, K * H), ("aux", index)),
        "hidden_state": states((1, tokens, H), ("last", index)),
    } | other
    return {key: value for key, value in made.items() if value is not None}


def write(folder: Path, index: int, value: Any = None, suffix: str = ".ckpt", **how: Any) -> Path:
    """Write a sample where it belongs, as old as a finished one."""
    path = folder / layout.shard_path(index, suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.save(path, sample(index) if value is None else value, **how)
    return age(path)


def age(path: Path, seconds: float = 100.0) -> Path:
    """Let a file have been written a while ago."""
    when = time.time() - seconds
    os.utime(path, (when, when), follow_symlinks=False)
    return path


def start(folder: Path, *words: str, **how: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "backend.agent.main", "audit", str(folder), *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


SERVER = """
import json, os, sys
import numpy  # which a deep audit loads
from backend.agent.shards.audit.main import main
answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    words, variables, outputs = json.loads(line)
    pid = os.fork()
    if not pid:
        os.environ.clear()
        os.environ.update(variables)
        for fd, name in enumerate(outputs, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        status = main(words)
        sys.stdout.flush()
        os._exit(status)
    answers.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) + "\\n")
"""
"""Forks itself for every audit: a start of Python takes longer than the audit of some small files."""


@functools.cache
def server() -> subprocess.Popen[str]:
    """Start the server of this process's audits, which ends with it."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    """Audit a folder in a process of its own, and return its exit status and output."""
    serving = server()
    assert serving.stdin is not None and serving.stdout is not None
    with tempfile.TemporaryDirectory() as name:
        outputs = [f"{name}/out", f"{name}/err"]
        serving.stdin.write(json.dumps([[str(folder), *words], dict(os.environ), outputs]) + "\n")
        status = int(serving.stdout.readline())
        out, err = (Path(output).read_text() for output in outputs)
    return status, out, err


def audit(folder: Path, *words: str) -> dict[str, Any]:
    """Audit a folder and return what it printed; its exit status must say the same."""
    status, out, err = run(folder, *words, "--json")
    assert out, err
    found: dict[str, Any] = json.loads(out)
    assert status == (0 if found["ok"] else 1), err
    return found


def codes(found: dict[str, Any], path: str = "", level: str = "error") -> set[str]:
    """Return the kinds of findings about a file, or about the folder itself."""
    return {one["code"] for one in found["list"] if one["path"] == path and one["level"] == level}
