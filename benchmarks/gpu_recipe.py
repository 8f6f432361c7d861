"""The recipe that operators type by hand, mended so that it spares its own shell: how long, and was it right?"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from gpu_sampler import IDLE_MIB, MIB, Sampler
from gpu_victims import torch_victim

RECIPE = (
    "pkill -f '[v]ictim.py'; sleep 2; ps aux | grep '[v]ictim.py' | awk '{print $2}' | xargs -r kill -9; "
    "sleep 1; sleep 5; nvidia-smi --query-gpu=index,memory.used --format=csv,noheader"
)
"""Eight seconds of sleep, whatever the driver needs; fuser -k is left out, since it would kill every monitor."""


def recipe(scratch: Path, sampler: Sampler) -> dict[str, Any]:
    """Time it on a torch process that ignores SIGTERM and has an heir; right is: both gone and the memory back."""
    victim = torch_victim(scratch, 60)
    try:
        began = time.monotonic()
        done = subprocess.run(["bash", "-c", RECIPE], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        cleared = sampler.cleared_after(began, time.monotonic())
        clear = sampler.used() <= sampler.floor_bytes + IDLE_MIB * MIB
        left = victim.left()
        return {"exit": done.returncode, "output": done.stdout.strip(), "seconds": round(seconds, 2), "left": left,
                "clear": clear, "right": clear and not left,
                "sampler_clear_s": round(cleared - began, 3) if cleared else None}  # fmt: skip
    finally:
        victim.end()
