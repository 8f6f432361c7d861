"""A reset of GPUs that was killed: what its receipt says of it, and persistence mode put back."""

from __future__ import annotations

from typing import Any, Dict, List

from backend.agent.reset.gpureset import persistence
from backend.agent.reset.hostlock import one_at_a_time
from backend.agent.reset.receipt import Journal
from backend.agent.seam import Machine
from backend.wire import Receipt, Refused

INTERRUPTED = "interrupted"
"""The outcome where nobody heard how nvidia-smi ended. It counts: this boot has reset the GPU for that fault."""


def settle(machine: Machine, said: Receipt, events: List[Dict[str, Any]], journal: Journal, folder: str) -> bool:
    """Complete the receipt of a GPU reset that was killed. Returns False while its nvidia-smi still works, which has
    inherited the host's lock."""
    try:
        with one_at_a_time("what follows the interrupted GPU reset %s" % said.id, machine.devices().scope()):
            ends = [
                one["data"] for one in events if one["kind"] == persistence.KIND and one["data"].get("step") == "end"
            ]
            said.gpu_reset["outcome"] = INTERRUPTED
            if ends:
                said.gpu_reset.update({name: ends[-1][name] for name in ("rc", "outcome", "took_s")})
            said.notes += persistence.recover(machine.smi, said.boot_id, events, journal, folder)
    except Refused:
        return False
    return True
