"""What a rule is given: one GPU's readings now, and what to set them against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional

from backend.wire import NOT_SUPPORTED, Reading

Readings = Dict[str, Reading]


class Growth(NamedTuple):
    """By how much a counter grew, `over_s` seconds; `during` the reset, or else since the baseline was recorded."""

    by: int
    during: bool
    over_s: float

    @property
    def said(self) -> str:
        """Say since when."""
        return "during the reset" if self.during else "since the baseline"


@dataclass
class Case:
    """One GPU. `address` is what nvidia-smi takes after -i; readings that were not asked for are unsupported.

    `before` are its readings before the first signal, `elapsed_s` earlier; empty in a verification. `base` are those
    of the baseline, `base_s` earlier, without what another boot has begun anew. `settled` are the readings of some
    moments after the clear, only of a GPU that nobody holds and that looked busy or slowed down. `idle` says that
    nothing was ended just now, so that heat and power are those of a GPU at rest; `drawn_on` that a display server uses
    it, so that it may well be busy.
    """

    address: str
    now: Readings
    before: Readings = field(default_factory=dict)
    base: Readings = field(default_factory=dict)
    elapsed_s: float = 0.0
    base_s: float = 0.0
    settled: List[Readings] = field(default_factory=list)
    idle: bool = False
    drawn_on: bool = False

    def value(self, name: str) -> Optional[float]:
        """Return a reading as a number, or None where there is none."""
        return self.now.get(name, NOT_SUPPORTED).number()

    def was(self, name: str) -> Optional[float]:
        """Return what a reading was before the reset; without one, at the baseline."""
        before = self.before.get(name, NOT_SUPPORTED).number()
        return self.base.get(name, NOT_SUPPORTED).number() if before is None else before

    def recorded(self, name: str) -> Optional[float]:
        """Return what a reading was at the baseline."""
        return self.base.get(name, NOT_SUPPORTED).number()

    def grown(self, *names: str) -> Optional[Growth]:
        """Say by how much counters grew in all: during the reset, or where they did not, since the baseline."""
        for during, old, over_s in ((True, self.before, self.elapsed_s), (False, self.base, self.base_s)):
            count = sum(self._step(old, name) for name in names)
            if count > 0:
                return Growth(int(count), during, over_s)
        return None

    def _step(self, old: Readings, name: str) -> float:
        """Return the growth of one counter. One that fell was begun anew by the driver, and says nothing."""
        new, was = self.value(name), old.get(name, NOT_SUPPORTED).number()
        return 0.0 if new is None or was is None else max(0.0, new - was)

    def smi(self, display: str) -> str:
        """Return the command that shows one section of nvidia-smi."""
        return "nvidia-smi -q -d %s -i %s" % (display, self.address)

    def query(self, names: str) -> str:
        """Return the command that shows some columns of nvidia-smi."""
        return "nvidia-smi --query-gpu=%s --format=csv -i %s" % (names, self.address)

    @property
    def reset(self) -> str:
        """Return the command that resets the GPU."""
        return "eightzeros reset --gpu-reset --gpu %s, while nobody uses it" % self.address
