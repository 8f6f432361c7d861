"""How fast values are looked at, beside a plain read of the same bytes in memory, in one run.

    python benchmarks/shard_values.py [RESULT.json]

One file of 450 MB of bfloat16 in the page cache, as an extraction leaves it. The measure is one thread's sum of the
same bytes as 64-bit words in memory (numpy), which is about as fast as memory gives. Beside it, each over all values:

- `shards scan --values` by numpy: least, greatest, mean, norm, NaN, infinities, rows of zeros, copied out of the page
  cache by pread (a file that is cut under mmap is a SIGBUS); on one CPU and on all;
- the same without numpy, on 32 MB of it, and what `audit --deep` looks for (NaN, infinity, rows of zeros), which never
  uses numpy;
- torch, one thread, on the mapped file: aminmax (least, greatest, and NaN by way of them), and isnan().any().

A figure is the median of the rounds, in which all take turns; a ratio the median of the rounds' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics as means
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backend.agent.shards.audit.scan import scan  # noqa: E402
from backend.agent.shards.describe import describe  # noqa: E402
from backend.agent.shards.source import Source  # noqa: E402
from backend.agent.shards.values import withnumpy  # noqa: E402
from backend.agent.shards.values.statistics import statistics  # noqa: E402
from backend.extraction.engines import States  # noqa: E402
from backend.extraction.writer import Sample, write_file  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, POINTS, TOKENS = 7168, 3, 7800
SMALL_TOKENS = 560
ROUNDS = 7


def write(folder: Path, tokens: int) -> Path:
    """Write a shard of healthy values of both signs."""
    chance = np.random.default_rng(8)
    size = (tokens, POINTS * HIDDEN)
    words = chance.integers(0x3A00, 0x4100, size=size, dtype=np.uint16) | (
        chance.integers(0, 2, size=size, dtype=np.uint16) << 15
    )
    states = States(words, np.ascontiguousarray(words[:, :HIDDEN]))
    name = f"data_{tokens}.ckpt"
    sample = Sample(tokens, str(tokens), list(range(tokens)), [1] * tokens, states)
    write_file(str(folder), name, sample, HIDDEN, POINTS)
    return folder / name


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """Keep this process to one CPU: threads are as many as there are CPUs."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def values(path: Path, by: str) -> None:
    """Do what `shards scan --values` does once the file is described."""
    source = Source(str(path))
    load = withnumpy.load
    try:
        if by == "plain":
            withnumpy.load = lambda: None
        told = statistics(source, describe(source), "*_state", all_values=True)
        assert told["by"] == by and [each["nan"] for each in told["tensors"]] == [0, 0]
    finally:
        withnumpy.load = load
        source.close()


def deep(path: Path) -> None:
    """Look for bad values as `audit --deep` does."""
    source, notes = Source(str(path)), []  # type: ignore[var-annotated]
    scan(source, [row for row in describe(source).entries if "hidden" in row["key"]], notes)
    source.close()
    assert not notes


def torch_ways(path: Path) -> dict[str, Callable[[], Any]]:
    """Return torch's own ways on the mapped file."""
    import torch

    torch.set_num_threads(1)
    held = torch.load(path, weights_only=True, mmap=True)
    states = [held["aux_hidden_state"], held["hidden_state"]]
    return {
        "torch aminmax, one thread": lambda: [torch.aminmax(each) for each in states],
        "torch isnan().any(), one thread": lambda: [bool(torch.isnan(each).any()) for each in states],
    }


def measure(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Take turns and return the GB/s of every round, and the bytes of the file."""
    path, small = write(folder, TOKENS), write(folder, SMALL_TOKENS)
    words = np.frombuffer(path.read_bytes()[: path.stat().st_size // 8 * 8], np.uint64)

    def alone(way: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with one_cpu():
                way()

        return run

    ways: dict[str, tuple[Callable[[], Any], Path]] = {
        "plain read of memory, one thread": (alone(words.sum), path),
        "values by numpy, one CPU": (alone(lambda: values(path, "numpy")), path),
        "values by numpy, all CPUs": (lambda: values(path, "numpy"), path),
        "values without numpy": (lambda: values(small, "plain"), small),
        "values as audit --deep": (lambda: deep(path), path),
        **{name: (alone(way), path) for name, way in torch_ways(path).items()},
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (way, file) in ways.items():
            began = time.perf_counter()
            way()
            rates[name].append(file.stat().st_size / (time.perf_counter() - began) / 1e9)
    return rates, path.stat().st_size


def main(result: Path | None) -> None:
    """Measure, print, and keep the figures where a file is named."""
    with tempfile.TemporaryDirectory(prefix="eightzeros-values-") as name:
        rates, size = measure(Path(name))
    [plain, *others] = rates
    record = {
        "bytes": size, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
        "gb_per_s": {name: round(means.median(each), 2) for name, each in rates.items()},
        "ratio_to_plain_read": {
            name: round(means.median(a / b for a, b in zip(rates[name], rates[plain], strict=True)), 3)
            for name in others
        },
        "rounds_gb_per_s": {name: [round(rate, 2) for rate in each] for name, each in rates.items()},
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if result is not None:
        result.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
