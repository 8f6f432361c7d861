"""Detached runs, their progress, and the gates before a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from backend.wire.lines import SCHEMA


@dataclass
class Progress:
    """How far a run is, written by the run itself. Rates are over the last minute; `at` is wall time in seconds.

    The staging figures and `capture_wait_s` (how long the server's passes waited for the reader) are those of
    an extraction from a server; `staging_high_bytes` is the most that has lain there. The steps and what follows
    them are those of a training: `accuracy` is the share of first drafted tokens that were right. None: not said, or
    no finite number.
    """

    at: float
    state: str  # starting, running, paused, stopping, done, failed
    samples_done: int = 0
    samples_total: int = 0
    tokens_done: int = 0
    tokens_total: int = 0
    bytes_written: int = 0
    bytes_total: int = 0
    shard: str = ""
    samples_failed: int = 0
    samples_resumed: int = 0
    samples_in_flight: int = 0
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    advanced_at: float = 0.0
    disk_free_bytes: Optional[int] = None
    message: str = ""
    requests_in_flight: int = 0
    requests_repeated: int = 0
    staging_bytes: int = 0
    staging_high_bytes: int = 0
    staging_bound_bytes: int = 0
    capture_wait_s: float = 0.0
    steps_done: int = 0
    steps_total: int = 0
    steps_per_s: float = 0.0
    loss: Optional[float] = None
    accuracy: Optional[float] = None
    learning_rate: Optional[float] = None

    def eta_s(self) -> Optional[float]:
        """Estimate the seconds left, by tokens: samples grow longer and would make it too short (DESIGN 7).

        Where no tokens are counted, as in an audit, it is by samples, and in a training by steps.
        """
        left, rate = self.tokens_total - self.tokens_done, self.tokens_per_s
        if self.steps_total:
            left, rate = self.steps_total - self.steps_done, self.steps_per_s
        elif not self.tokens_total:
            left, rate = self.samples_total - self.samples_done, self.samples_per_s
        if left <= 0:
            return 0.0
        return left / rate if rate > 0 else None

    def full_in_s(self) -> Optional[float]:
        """Estimate the seconds until the output's disk is full, or None where it will not fill or is unknown."""
        if self.disk_free_bytes is None or self.bytes_per_s <= 0:
            return None
        return self.disk_free_bytes / self.bytes_per_s

    def disk_lasts(self) -> Optional[bool]:
        """Say whether the disk has room for the rest, or None where that is unknown."""
        if self.disk_free_bytes is None or self.bytes_total <= 0:
            return None
        return self.disk_free_bytes >= self.bytes_total - self.bytes_written


AGENT = "{agent}"
"""Stands first in an argv for the words that start the agent's own program, which only its host knows."""

RUN_LIVE = ("starting", "running", "stopping")
RUN_ENDED = ("exited", "failed", "lost")


@dataclass
class RunSpec:
    """What to run, detached. `argv` goes to exec unchanged; `env` adds to the host's environment. An `adopted` run
    only watches one that was not started here.

    `env` is used and never stored: only its names are kept. `out_dir` is watched for disk space. One that
    `starts_runs` does not hold what it starts: those are runs of their own, and go on without it.
    """

    id: str
    stage: str
    argv: List[str]
    cwd: str = ""
    env: Dict[str, str] = field(default_factory=dict)
    label: str = ""
    out_dir: str = ""
    grace_s: float = 15.0
    forced: str = ""
    adopted: bool = False
    starts_runs: bool = False


@dataclass
class Run:
    """A detached run as the host knows it. Times are wall seconds; `exit_code` is negative for a signal."""

    id: str
    stage: str
    state: str  # starting, running, stopping, exited, failed (never started), lost
    schema: int = SCHEMA
    label: str = ""
    argv: List[str] = field(default_factory=list)
    cwd: str = ""
    env_names: List[str] = field(default_factory=list)
    out_dir: str = ""
    pid: int = 0
    pid_start: int = 0
    supervisor_pid: int = 0
    supervisor_start: int = 0
    boot_id: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: Optional[int] = None
    reason: str = ""
    log_bytes: int = 0
    supervised: bool = True
    grace_s: float = 15.0
    forced: str = ""
    adopted: bool = False
    progress: Optional[Progress] = None


@dataclass
class Gate:
    """One thing a launch needs. `ok` None means it could not be read, which never opens the gate."""

    name: str
    ok: Optional[bool]
    detail: str
    fix: str = ""
