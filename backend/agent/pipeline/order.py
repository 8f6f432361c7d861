"""What a chain is asked to do: its steps in order, as the console made them from its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List

from backend.wire import RESET, SCHEMA, Refused, RunSpec, from_dict

MOST_STEPS = 32


@dataclass
class StepOrder:
    """One step. `spec` is its run without an id; a reset has none.

    A `service` is done with once it is up, which `ready_url` says by answering 200, or else its own progress by
    the state `ready`. `needs_service`: it is of no use when a service of the chain has ended. `outputs` must be there
    after it.
    """

    name: str
    kind: str = "command"
    spec: Dict[str, Any] = field(default_factory=dict)
    requirements: Dict[str, Any] = field(default_factory=dict)
    service: bool = False
    ready_url: str = ""
    ready_timeout_s: float = 1800.0
    needs_service: bool = False
    outputs: List[str] = field(default_factory=list)

    def run_spec(self, run_id: str, forced: str) -> RunSpec:
        """Return the run of this step."""
        return from_dict(RunSpec, dict(self.spec, id=run_id, forced=forced))


@dataclass
class Order:
    """A chain: the steps, where it begins, the host's policy of resets, and why its first step is forced."""

    steps: List[StepOrder]
    start: int = 0
    policy: Dict[str, Any] = field(default_factory=dict)
    forced: str = ""

    @property
    def services(self) -> List[str]:
        """Return the names of the stages that stay up while others run."""
        return [step.name for step in self.steps if step.service]


def parse(text: str) -> Order:
    """Read an order. Raises Refused `bad-chain` where it makes no sense."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError("schema %r" % (data["schema"],))
        steps = [from_dict(StepOrder, row) for row in data["steps"]]
        order = Order(steps, int(data["start"]), dict(data["policy"]), str(data.get("forced") or ""))
        for step in steps:
            if step.kind != RESET:
                step.run_spec("check", "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused("bad-chain", "the chain makes no sense: %s: %s" % (type(error).__name__, error)) from None
    if not 0 <= order.start < len(steps) or len(steps) > MOST_STEPS:
        raise Refused("bad-chain", "a chain has 1 to %d steps and begins at one of them" % MOST_STEPS)
    return order
