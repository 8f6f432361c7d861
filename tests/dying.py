"""A reset that is killed by itself at one step of its cycle: python -m tests.dying ROOT STEP ROLE ...

It dies right after the step is on disk, by SIGKILL, so that nothing of it can clean up.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from backend.agent.reset import cycle, receipt
from backend.agent.seam import Machine
from tests import resetting

if TYPE_CHECKING:
    from backend.wire import Receipt, ResetEvent

JOURNALED = {
    "looking": ("phase", "looking at the host"),
    "bound": ("phase", "stopping "),
    "asked": ("signal", "SIGTERM"),
    "grace": ("gone", ""),
    "killed": ("signal", "SIGKILL"),
    "clearing": ("phase", "waiting for every GPU"),
    "health": ("phase", "checking the health"),
    "judged": ("gpu", ""),
    "shown": ("verdict", ""),
}
"""The steps that are events of the journal: kind and the beginning of the text."""

STEPS = ("looking", "agreed", "bound", "asked", "grace", "killed", "clearing", "health", "judged", "stored", "shown")


def die() -> None:
    """End at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingJournal(receipt.Journal):
    """A journal whose writer dies after one event."""

    step = ""

    def write(self, kind: str, text: str, **data: Any) -> ResetEvent:
        event = super().write(kind, text, **data)
        wanted, begins = JOURNALED[self.step]
        if kind == wanted and text.startswith(begins):
            die()
        return event


def arm(step: str) -> None:
    """Have this process die at a step of the cycle."""
    if step == "agreed":
        keep = cycle.keep_begun

        def kept(folder: str, said: Receipt) -> None:
            keep(folder, said)
            die()

        cycle.keep_begun = kept
    elif step == "stored":
        store = cycle.store

        def stored(said: Receipt) -> str:
            store(said)
            die()
            return ""

        cycle.store = stored
    else:
        DyingJournal.step = step
        cycle.Journal = DyingJournal  # type: ignore[misc]


def machine(root: str, step: str) -> Machine:
    """Return the bench's machine, whose resets die at a step."""
    host = resetting.machine(root)
    return Machine(host.driver, host.devices, [sys.executable, "-m", "tests.dying", root, step])


def main() -> int:
    """Play a role of the agent; only a reset dies."""
    from backend.agent.main import serve

    root, step, *words = sys.argv[1:]
    if words[0] == "reset":
        arm(step)
    return serve(machine(root, step), words)


if __name__ == "__main__":
    sys.exit(main())
