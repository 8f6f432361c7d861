"""Shards of every kind changed by chance: an answer or a clear error, soon and in little memory.

Some by default; EIGHTZEROS_FUZZ_CASES and EIGHTZEROS_FUZZ_SEED ask for more, or for others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import fuzzing

if TYPE_CHECKING:
    from pathlib import Path

CASES = int(os.environ.get("EIGHTZEROS_FUZZ_CASES", "240"))
SEED = int(os.environ.get("EIGHTZEROS_FUZZ_SEED", "8"))
MAX_SECONDS, MAX_BYTES = 1.0, 200 << 20


@pytest.mark.timeout(60 + CASES // 10)
def test_whatever_is_changed_in_a_shard_it_is_answered_soon_and_in_little_memory(tmp_path: Path) -> None:
    """Shown, shown deep with values, audited both ways and repaired, in a process of its own."""
    argv = [sys.executable, "-m", "tests.fuzzing", str(CASES), str(SEED), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50 + CASES // 10, check=False)
    assert done.returncode == 0, f"{done.stderr}\nthe file: {tmp_path / 'failing'}"
    told = json.loads(done.stdout)
    assert told["cases"] == CASES >= len(fuzzing.KINDS)
    assert told["peak_bytes"] < MAX_BYTES
    assert told["slowest_s"] < MAX_SECONDS, told
