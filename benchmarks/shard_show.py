"""Time to describe a shard: `show` against torch.load(mmap=True), on the same files in one run.

    python benchmarks/shard_show.py [MEGABYTES ...]

Prints one line a size with both medians and their ratio. torch is imported before anything is timed, which favours
it: a process that only wants to look pays that import too, and it is printed beside.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.agent.shards.show import show

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 50


def median_ms(action: Callable[[], object]) -> float:
    """Return the median time of an action in milliseconds."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def main(megabytes: list[int]) -> None:
    """Write a file of each size, time both, print."""
    began = time.perf_counter()
    import torch

    print(f"import torch: {time.perf_counter() - began:.2f} s (torch {torch.__version__})")
    with tempfile.TemporaryDirectory() as folder:
        for size in megabytes:
            path = Path(folder) / "data_0.ckpt"
            tokens, width = max(1, size * 1_000_000 // (4 * 7168 * 2)), 7168
            torch.save(
                {
                    "input_ids": torch.arange(tokens),
                    "loss_mask": torch.ones(tokens, dtype=torch.int64),
                    "aux_hidden_state": torch.zeros(1, tokens, 3 * width, dtype=torch.bfloat16),
                    "hidden_state": torch.zeros(1, tokens, width, dtype=torch.bfloat16),
                },
                path,
            )
            ours = median_ms(lambda path=path: show(str(path)))  # type: ignore[misc]
            theirs = median_ms(lambda path=path: torch.load(path, weights_only=True, mmap=True))  # type: ignore[misc]
            print(f"{size:>6} MB: show {ours:.2f} ms, torch.load(mmap) {theirs:.2f} ms, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 100])
