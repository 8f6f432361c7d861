"""What the launcher says to the hook, and what the hook says of itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

MIB = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""What a run or a rid may be called: it becomes part of a file's name."""


class Refused(Exception):
    """This request cannot be captured; the text says why."""


@dataclass(frozen=True)
class Config:
    """What the launcher says. Bytes are per writing rank; `bound_bytes` is for the folder, the slots add theirs.

    A pass that does not fit into the slots holds the server until the device has computed it, so all of them
    together are larger than the usual pass (16,384 rows of 57,344 bytes are 0.9 GiB). A slot holds many rows, for
    what a piece costs the server's own thread does not depend on its size.

    `adapter` is `logits` where the server runs with --enable-return-aux-hidden-states (SGLang 0.5.23): the hook
    reads what the logits processor returns. It is `model` before that: the hook has the layer stack's own
    EAGLE-3 code capture, which cannot capture point 0 nor what leaves the last layer.
    """

    run: str
    folder: str
    points: list[int]
    adapter: str = "model"
    bound_bytes: int = 8192 * MIB
    slot_bytes: int = 64 * MIB
    slots: int = 32
    writers: int = 4
    patience_s: float = 120.0
    stale_s: float = 600.0

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Config:
        """Check it. Raises ValueError, which ends the server's start, before anyone waits for it."""
        unknown = sorted(set(raw) - {setting.name for setting in fields(cls)})
        if unknown:
            raise ValueError(f"eightzeros capture: there is no setting {', '.join(unknown)}")
        config = cls(**raw)
        if not NAME.fullmatch(config.run):
            raise ValueError(f"eightzeros capture: the run {config.run!r} must be letters, digits, '.', '_', '-'")
        if not config.points or sorted(set(config.points)) != list(config.points) or config.points[0] < 0:
            raise ValueError(f"eightzeros capture: points must be rising layer numbers, not {config.points}")
        if config.adapter not in ("model", "logits"):
            raise ValueError(f"eightzeros capture: adapter is model or logits, not {config.adapter!r}")
        if min(config.bound_bytes, config.slot_bytes, config.slots, config.writers) < 1:
            raise ValueError("eightzeros capture: bound_bytes, slot_bytes, slots and writers must be at least 1")
        return config


@dataclass
class Counters:
    """What one rank has done since its start. `effective_layers` is what the model itself says it captures.

    `wait_s` is the time that passes have waited for a slot or for room in the folder; `over_bound` counts
    requests begun without room because the reader had nothing to take; `foreign` counts requests in passes
    that are not ours.
    """

    run: str
    rank: int
    writes: bool
    adapter: str
    points: list[int]
    pid: int = field(default_factory=os.getpid)
    at: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    effective_layers: list[int] | None = None
    hidden_size: int = 0
    dtype: str = ""
    device: str = ""
    passes: int = 0
    rows: int = 0
    bytes: int = 0
    whole: int = 0
    failed: int = 0
    abandoned: int = 0
    foreign: int = 0
    wait_s: float = 0.0
    staged_bytes: int = 0
    high_water_bytes: int = 0
    over_bound: int = 0
    error: str = ""


def words(problem: Exception) -> str:
    """Say an exception: its text where that was written for people, else its type as well."""
    return str(problem) if isinstance(problem, (Refused, OSError)) else repr(problem)
