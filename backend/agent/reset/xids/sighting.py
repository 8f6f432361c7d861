"""One thing that the driver said of a GPU, and when in a reset that was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from backend.agent.xid.catalogue import FAIL, INFO, WARN
from backend.agent.xid.lines import Said

BEFORE, DURING, KILL, AFTER = "before", "during", "kill", "after"
"""Since boot and before the first look; from then on; from the first signal until every GPU is free; from then on."""

KERNEL_LOG, DRIVER = "kernel log", "driver event"


@dataclass
class Sighting:
    """`gpu` is the index of the GPU, None where it is none of those that the driver lists; `uuid` what is known of it.

    `seq` is the number of the kernel log's record, -1 of an event; `at` its wall time. `ours` says that the reset
    caused it, `why` why it weighs as it does where that is not plain from its number, and `level` how much.
    """

    said: Said
    phase: str
    at: float
    seq: int
    source: str
    gpu: Optional[int] = None
    uuid: str = ""
    ours: bool = False
    why: str = ""
    level: str = ""

    def lighten(self, why: str) -> None:
        """Make a fault a warning, and a warning no more than a note, and say why."""
        self.level, self.why = {FAIL: WARN, WARN: INFO}.get(self.level, self.level), why
