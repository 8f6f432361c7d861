"""Persistence mode off for a GPU reset, and on again: with it on, the driver keeps the GPU open itself.

Each step is in the journal before it is taken, so that a reset that is killed in between is put right by whoever makes
its receipt.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Sequence

from backend.agent import procfs
from backend.agent.reset.gpureset import smi
from backend.agent.reset.gpureset.examine import Target
from backend.agent.reset.receipt import Journal

KIND = "gpu-reset"
OFF, BACK = "persistence-off", "persistence-back"
BY_HAND = "sudo nvidia-smi -pm 1 -i %s"


class Persistence:
    """The GPUs whose persistence mode was on. `problems` says what could not be put back."""

    def __init__(self, argv: Sequence[str], journal: Journal, output: str) -> None:
        self._argv, self._journal, self._output = list(argv), journal, output
        self._off: List[str] = []
        self.problems: List[str] = []

    def turn_off(self, targets: Sequence[Target]) -> str:
        """Turn it off where it is on. Returns why that failed; empty where it did not."""
        for target in targets:
            if not target.number("persistence"):
                continue
            self._off.append(target.address)
            text = "turning persistence mode off on GPU %d" % target.facts.index
            self._journal.write(KIND, text, step=OFF, address=target.address)
            said = smi.call([*self._argv, "-i", target.address, "-pm", "0"], smi.SETTING_S, self._output)
            if said.rc != 0:
                how = "has not ended" if said.rc is None else "ended with %d" % said.rc
                return "nvidia-smi -pm 0 %s: %s" % (how, said.text or "it said nothing")
        return ""

    def put_back(self) -> None:
        """Turn it on again where it was."""
        for address in self._off:
            self.problems += turn_on(self._argv, address, self._journal, self._output)
        self._off = []

    def leave(self) -> None:
        """Leave it off, and say so: the GPU is in the middle of a reset."""
        self.problems += ["persistence mode of %s was left off: %s" % (one, BY_HAND % one) for one in self._off]


def turn_on(argv: Sequence[str], address: str, journal: Journal, output: str) -> List[str]:
    """Turn persistence mode on for one GPU, and say what went wrong."""
    said = smi.call([*argv, "-i", address, "-pm", "1"], smi.SETTING_S, output)
    journal.write(KIND, "persistence mode on again for %s" % address, step=BACK, address=address, rc=said.rc)
    if said.rc == 0:
        return []
    return ["persistence mode of %s is off and could not be turned on again (%s): %s" % (
        address, said.text or said.rc, BY_HAND % address)]  # fmt: skip


def still_off(events: Sequence[Dict[str, Any]]) -> List[str]:
    """Return the GPUs whose persistence mode a journal says was turned off and not on again."""
    off: List[str] = []
    for event in events:
        data = event.get("data") or {}
        if event.get("kind") == KIND and data.get("step") == OFF:
            off.append(str(data["address"]))
        elif event.get("kind") == KIND and data.get("step") == BACK and data.get("rc") == 0:
            off = [one for one in off if one != data["address"]]
    return off


def recover(
    words: Sequence[str], boot_id: str, events: Sequence[Dict[str, Any]], journal: Journal, folder: str
) -> List[str]:
    """Put persistence mode back after a reset that was killed: in the same boot, as root; the caller has the lock.

    Returns what there is to say of it.
    """
    off = still_off(events)
    if not off or boot_id != procfs.boot_id():
        return []  # what a boot begins with is its own
    argv = smi.find(words)
    if os.geteuid() or not argv:
        return ["persistence mode of %s was left off: %s" % (one, BY_HAND % one) for one in off]
    notes = []
    for address in off:
        wrong = turn_on(argv, address, journal, os.path.join(folder, OUTPUT))
        notes += wrong or ["persistence mode of %s had been left off, and was turned on again" % address]
    return notes


OUTPUT = "nvidia-smi.out"
"""What nvidia-smi printed, in the run's folder."""
