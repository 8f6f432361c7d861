"""The readings of h200_reset.py as a short table, with what the issue asks of them."""

from __future__ import annotations

import statistics
from typing import Any

RECIPE_S = 8.0


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * int(share * 100) // 100) - 1)]


def report(result: dict[str, Any]) -> None:
    """Print it."""
    rows = result["scenarios"]
    for name, row in rows.items():
        if "verdict" in row:
            print(f"{name:<24} {row['verdict']:<16} exit {row['exit']} left {row['left']} "
                  f"grace {row['durations'].get('grace')} driver {row.get('sampler_release_s')} "
                  f"ours +{row.get('ours_after_sampler_s')} verdict +{row.get('verdict_after_release_s')} "
                  f"above {row.get('above_grace_and_release_s')} wall {row['wall_s']}")  # fmt: skip
        elif name not in ("cuda_test", "jitter", "baseline"):
            print(name, {key: value for key, value in row.items() if key != "receipt"})
    _sums([row for row in rows.values() if row.get("ours_after_sampler_s") is not None])
    if "trials" in rows.get("cuda_test", {}):
        walls = [row["wall_s"] for row in rows["cuda_test"]["trials"]]
        outcomes = {one["outcome"] for row in rows["cuda_test"]["trials"] for one in row["outcomes"]}
        print(f"CUDA test: {sorted(outcomes)} median {statistics.median(walls):.2f} s, longest {max(walls):.2f}, "
              f"n {len(walls)}")  # fmt: skip
    if "jitter_bytes" in rows.get("jitter", {}):
        row = rows["jitter"]
        print(f"v2 memory over {row['seconds']:.0f} s: jitter {row['jitter_bytes']} bytes in {row['samples']} samples")
    print(f"longest sample of the sampler {result.get('longest_sample_s')} s")


def _sums(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    late = [row["ours_after_sampler_s"] for row in rows]
    verdicts = [row["verdict_after_release_s"] for row in rows]
    above = [row["above_grace_and_release_s"] for row in rows]
    print(f"our first clear reading after the sampler's: p95 {percentile(late, 0.95):.3f} s (limit 0.150), "
          f"median {statistics.median(late):.3f}, most {max(late):.3f}, n {len(late)}")  # fmt: skip
    print(f"verdict after the release: most {max(verdicts):.2f} s (limit 5), median {statistics.median(verdicts):.2f}")
    middle = statistics.median(above)
    print(f"above grace and release: median {middle:.2f} s, {middle / RECIPE_S:.2f} of the recipe's {RECIPE_S:.0f} s")
