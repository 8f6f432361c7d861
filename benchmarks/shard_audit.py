"""An audit of many shards against a loop of torch.load(mmap=True) over the same files, in one run.

    python benchmarks/shard_audit.py [FILES] [RESULT.json]

Files of 2 MB in the mean as the extraction writes them, of 100 to 1,900 tokens: what is equal in many is not typical.
The audit is the whole command, with its start and as many processes as there are CPUs; torch is imported before its
loop is timed, which is one process, as a script that checks a folder is. There are two loops: one only loads, the other
also checks with torch what the audit checks (lengths, widths, ids, mask, last rows, twins), but none of what the audit
holds against the file's own checksums, headers and directory. All run at the niceness that the audit's processes give
themselves. "cold" drops each file's pages first. Figures are medians of rounds in which all take turns; a ratio is the
median of the rounds' own, of runs that followed each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backend.extraction.engines import States  # noqa: E402
from backend.extraction.writer import Sample, write_file  # noqa: E402
from backend.shardfmt import layout  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, POINTS = 256, 3
TOKENS = (100, 1900)
ROUNDS = 5
NICE = 5
"""As backend/agent/shards/audit/pool.py: beside other programs both give way alike."""

LOOP = """
import os, sys, time, torch
os.nice(int(sys.argv[2]))
names = sys.stdin.read().split("\\n")
checked = sys.argv[1] == "checks"
widths, seen = {}, {}
began = time.perf_counter()
for name in names:
    found = torch.load(name, weights_only=True, mmap=True)
    shapes = {key: tuple(value.shape) for key, value in found.items()}
    assert len(shapes) == 4
    if checked:
        ids, mask = found["input_ids"], found["loss_mask"]
        assert 0 <= int(ids.min()) and int(ids.max()) < 200_000 and seen.setdefault(ids.numpy().tobytes(), name) == name
        assert int(mask.min()) >= 0 and int(mask.max()) == 1 and mask.shape == ids.shape
        for key in ("aux_hidden_state", "hidden_state"):
            last = found[key][0, -1]
            assert widths.setdefault(key, last.shape[0]) == last.shape[0] and found[key].shape[1] == ids.shape[0]
            assert bool(torch.isfinite(last).all()) and bool(last.any())
            assert seen.setdefault(last.view(torch.uint8).numpy().tobytes(), name) == name
print(time.perf_counter() - began)
"""
"""Lists the tensors; with `checks` also what the audit finds out of one file and of all of them."""


def write(folder: Path, files: int) -> list[Path]:
    """Write the shards, each with states of its own, and let them be settled."""
    chance = np.random.default_rng(8)
    pool = chance.integers(0x3C00, 0x3F00, size=(TOKENS[1], POINTS * HIDDEN), dtype=np.uint16)
    paths = []
    for index in range(files):
        tokens = int(chance.integers(*TOKENS))
        rows = np.roll(pool[:tokens], index, axis=0)
        rows[-1] = chance.integers(0x3C00, 0x3F00, size=POINTS * HIDDEN, dtype=np.uint16)
        states = States(rows, np.ascontiguousarray(rows[:, :HIDDEN]))
        path = folder / layout.shard_path(index)
        path.parent.mkdir(exist_ok=True)
        ids = [index % 100_000, *range(1, tokens)]
        write_file(str(path.parent), path.name, Sample(index, str(index), ids, [1] * tokens, states), HIDDEN, POINTS)
        os.utime(path, (time.time() - 100, time.time() - 100))
        paths.append(path)
    return paths


def drop(paths: list[Path]) -> None:
    """Drop the files' pages from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def audit(folder: Path, *words: str, cpus: int = 0) -> float:
    """Audit in a process of its own and return the seconds of the whole command."""
    argv = [sys.executable, "-m", "backend.agent.main", "audit", str(folder), "--json", *words]
    argv = ["taskset", "-c", f"0-{cpus - 1}", *argv] if cpus else argv  # its processes are nice by themselves
    began = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    seconds = time.perf_counter() - began
    assert json.loads(done.stdout)["ok"], done.stdout[:2000]
    return seconds


def torch_loop(paths: list[Path], how: str) -> float:
    """Load every file's tensors lazily and return the seconds, without those of the import."""
    names = "\n".join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", LOOP, how, str(NICE)], input=names, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


WAYS: dict[str, tuple[bool, Callable[[Path, list[Path]], float]]] = {
    "torch loop, warm": (False, lambda folder, paths: torch_loop(paths, "loads")),
    "audit, warm": (False, lambda folder, paths: audit(folder, "--fresh")),
    "torch loop with checks, warm": (False, lambda folder, paths: torch_loop(paths, "checks")),
    "audit on one CPU, warm": (False, lambda folder, paths: audit(folder, "--fresh", cpus=1)),
    "audit again, nothing changed": (False, lambda folder, paths: audit(folder)),
    "torch loop with checks, cold": (True, lambda folder, paths: torch_loop(paths, "checks")),
    "audit, cold": (True, lambda folder, paths: audit(folder, "--fresh")),
}
"""Whose turn it is, in order: what is compared stands side by side."""


def measure(folder: Path, paths: list[Path]) -> dict[str, list[float]]:
    """Take turns, and return the seconds of every round; `audit --deep` takes long and has one."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, (cold, way) in WAYS.items():
            if cold:
                drop(paths)
            elif not name.startswith("audit again"):
                warm(paths)
            taken[name].append(way(folder, paths))
    warm(paths)
    taken["audit --deep, warm"] = [audit(folder, "--fresh", "--deep")]
    return taken


def warm(paths: list[Path]) -> None:
    """Bring the files' pages into the page cache."""
    for path in paths:
        path.read_bytes()


def ratio(taken: dict[str, list[float]], loop: str, mine: str) -> float:
    """Return how many times as many files the audit does, by the median round."""
    return round(statistics.median(a / b for a, b in zip(taken[loop], taken[mine], strict=True)), 2)


def main(files: int, result: Path | None) -> None:
    """Write, measure, print, and keep the figures where a file is named."""
    with tempfile.TemporaryDirectory(prefix="eightzeros-audit-") as name:
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        folder = Path(name) / "shards"
        folder.mkdir()
        paths = write(folder, files)
        size = sum(path.stat().st_size for path in paths)
        taken = measure(folder, paths)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    rates = {name: round(files / seconds, 1) for name, seconds in medians.items()}
    record = {
        "files": files, "bytes": size, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
        "seconds": {name: round(seconds, 3) for name, seconds in medians.items()}, "files_per_s": rates,
        "rounds": {name: [round(each, 3) for each in seconds] for name, seconds in taken.items()},
        "ratio_to_loads_warm": ratio(taken, "torch loop, warm", "audit, warm"),
        "ratio_to_checks_warm": ratio(taken, "torch loop with checks, warm", "audit, warm"),
        "ratio_to_checks_one_cpu": ratio(taken, "torch loop with checks, warm", "audit on one CPU, warm"),
        "ratio_to_checks_cold": ratio(taken, "torch loop with checks, cold", "audit, cold"),
        "deep_gb_per_s": round(size / medians["audit --deep, warm"] / 1e9, 2),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if result is not None:
        result.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
