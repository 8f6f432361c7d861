"""One thing that is to be said of a GPU's health, and whether it stands in the way of using it."""

from __future__ import annotations

from typing import NamedTuple

FAIL, WARN = "fail", "warn"


class Finding(NamedTuple):
    """One thing that is wrong, what to do, and the command that shows it by hand.

    FAIL makes a GPU UNHEALTHY. WARN is said beside the verdict and does not turn CLEAN off.
    """

    reason: str
    action: str
    command: str
    level: str = FAIL
