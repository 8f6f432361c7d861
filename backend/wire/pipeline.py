"""A chain of stages that goes on by itself on its host, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List

from backend.wire.lines import SCHEMA
from backend.wire.runs import Gate

PIPELINE = "pipeline"
"""The stage of a run that drives a chain."""

RESET = "reset"
"""The step, and the stage of its run, that kills what holds the GPUs and verifies that they are clean."""

CHAIN_ENV = "EIGHTZEROS_CHAIN"
"""What the chain is, handed to its run as a value of the environment, because those are never stored."""


@dataclass
class Step:
    """One stage of a chain. `at` times are wall seconds, 0 where it has not come to that.

    `state` is waiting, skipped (the chain began after it), checking (its gates), running, up (a server that is
    ready), done, ended (a server that is no longer up), refused (by a gate), failed or stopped. One that
    `needs_service` is of no use without the server before it.
    """

    name: str
    kind: str = "command"
    state: str = "waiting"
    run_id: str = ""
    reason: str = ""
    forced: str = ""
    needs_service: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass
class Pipeline:
    """A chain as its host knows it.

    `state` is running, done, refused, failed, stopped, or interrupted: its driver is gone without having come to an
    end, and `reason` says why; the run of the step at which it stood may go on without it. `gates` are those of the
    step at which it was refused. `go_on` names the step to begin with next time; empty where nothing is left.
    """

    id: str
    state: str = "running"
    schema: int = SCHEMA
    steps: List[Step] = field(default_factory=list)
    reason: str = ""
    fix: str = ""
    gates: List[Gate] = field(default_factory=list)
    go_on: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
