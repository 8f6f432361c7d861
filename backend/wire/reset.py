"""The kill-and-verify cycle: who would be killed, what happened, what each GPU is afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from backend.wire.lines import SCHEMA
from backend.wire.runs import Gate
from backend.wire.telemetry import NOT_READ, Reading

CLEAN = "CLEAN"
LIMITED = "CLEAN (limited)"
NOT_CLEAN = "NOT CLEAN"
UNHEALTHY = "UNHEALTHY"
UNKNOWN = "UNKNOWN"
VERDICTS = (CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, UNKNOWN)
"""From best to worst to know: a host is as good as its worst GPU (DESIGN section 6.7)."""


@dataclass
class Process:
    """One process in a plan. `start_ticks` and `pidfd_inode` bind it: a pid alone may be reused.

    `gpus` are GPU indices; `used_bytes` what the driver attributes to it; `pinned_bytes` is its RssShmem, which
    predicts how long the release takes (facts: reset, head). `method` is how it will be stopped, or empty for one
    that is spared; `reason` says why it is on its list.
    """

    pid: int
    start_ticks: int
    pidfd_inode: int = 0
    ppid: int = 0
    uid: int = -1
    user: str = ""
    exe: str = ""
    command: str = ""
    age_s: Optional[float] = None
    gpus: List[int] = field(default_factory=list)
    used_bytes: Reading = NOT_READ
    pinned_bytes: int = 0
    reason: str = ""
    method: str = ""
    run_id: str = ""


@dataclass
class Plan:
    """What a reset would do. `digest` covers the victims' identities and is what the operator confirms."""

    digest: str = ""
    victims: List[Process] = field(default_factory=list)
    spared: List[Process] = field(default_factory=list)
    ghosts: List[Dict[str, Any]] = field(default_factory=list)  # {"pid", "gpu", "used_bytes"}: named, but not there
    unseen: List[str] = field(default_factory=list)  # what could not be read, in words
    losses: List[str] = field(default_factory=list)  # what the kill would lose, in words
    baseline: str = ""  # "recorded 2026-12-01 14:02" or "none: ..." in words
    grace_s: float = 0.0
    deadline_s: float = 0.0


@dataclass
class GpuResetPlan:
    """What a reset of GPUs by their driver needs. `gpus` are indices, `faults` by index (as text) what asks for it.

    Each of `needs` must be met; `command` is what would be run.
    """

    gpus: List[int] = field(default_factory=list)
    uuids: List[str] = field(default_factory=list)
    needs: List[Gate] = field(default_factory=list)
    faults: Dict[str, List[str]] = field(default_factory=dict)
    command: str = ""


@dataclass
class GpuVerdict:
    """What one GPU is, why, and the command that shows the same by hand.

    `findings` is everything that was found about its health: {reason, action, command, level}, where level is
    "fail" or, for what leaves the verdict as it is, "warn".
    """

    index: int
    uuid: str
    verdict: str
    reason: str
    action: str = ""
    command: str = ""
    used_bytes: Reading = NOT_READ
    baseline_bytes: Optional[int] = None
    findings: List[Dict[str, str]] = field(default_factory=list)


@dataclass
class ResetEvent:
    """One line of a reset's journal: `at_s` is seconds since the reset began, on the monotonic clock.

    `kind` is phase, signal, gone, memory, note, gpu-reset, gpu or verdict; `text` says it in words, `data` for
    programs.
    """

    at_s: float
    kind: str
    text: str
    data: Dict[str, Any] = field(default_factory=dict)


@dataclass
class Leftover:
    """A segment of shared memory that nothing uses any more. `bytes` is what it takes of the memory.

    `kind` says who names segments so, `age_s` when it was last written or changed, `mine` whether it is the asking
    user's; `problem` why it cannot be, or was not, removed.
    """

    path: str
    kind: str
    bytes: int
    user: str
    age_s: float
    mine: bool
    why: str
    removed: bool = False
    problem: str = ""


@dataclass
class Leftovers:
    """What was left behind on a host: segments, the largest first, how many more are in use, and who has which port."""

    segments: List[Leftover] = field(default_factory=list)
    in_use: int = 0
    ports: List[str] = field(default_factory=list)


@dataclass
class Receipt:
    """The evidence of one reset or verification, complete only when `verdict` is set. Durations in seconds.

    `host_findings` are, like a GPU's `findings`, what is wrong with the host's set of GPUs.
    `durations` has scan, grace, kill, release (last signal to every GPU clear), cuda_test, verdict and total, where
    they apply. `cuda_tests` has of each GPU {gpu, uuid, outcome, reason, step, code, name, total_s, steps, stuck}.
    `xids` has each kind of XID that was seen {kind, xid, gpu, uuid, bus, device, level, meaning, phase, count,
    first_at, last_at, pid, name, caused_by, ours, why, source, seq, text}: `phase` is before (since boot), during,
    kill or after; `ours` says that the reset caused it; `level` is fail, warn or info. `kernel_log` says why the
    kernel's log could not be read; empty where it was.
    `gpu_reset` is empty but in a receipt of the kind gpu-reset: {gpus: [{index, uuid, bus, name, faults}], needs (as
    wire.Gate), command, begun, outcome, rc, output, at_s, took_s, kernel_log_seq}. Its outcome is done, failed, not
    supported, has not ended, in use (refused before anything was touched), interrupted, or empty where a need was not
    met.
    `leftovers` are segments of shared memory that nothing uses any more, `ports` say who still listens on a server's
    port; both only where a reset ended somebody or had nobody to end.
    `interrupted` is set where the reset's own process ended before its verdict: how far it went, in words.
    """

    id: str
    kind: str  # reset, verify or gpu-reset
    schema: int = SCHEMA
    host: str = ""
    virtual: bool = False
    user: str = ""
    boot_id: str = ""
    driver: str = ""
    cuda: str = ""
    started_at: float = 0.0
    plan: Optional[Plan] = None
    before: List[GpuVerdict] = field(default_factory=list)
    after: List[GpuVerdict] = field(default_factory=list)
    killed: List[Process] = field(default_factory=list)
    survivors: List[Process] = field(default_factory=list)
    signals: List[Dict[str, Any]] = field(default_factory=list)  # {"at_s", "pid", "signal", "error"}
    durations: Dict[str, float] = field(default_factory=dict)
    unseen: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    host_findings: List[Dict[str, str]] = field(default_factory=list)
    cuda_tests: List[Dict[str, Any]] = field(default_factory=list)
    xids: List[Dict[str, Any]] = field(default_factory=list)
    kernel_log: str = "not asked"
    gpu_reset: Dict[str, Any] = field(default_factory=dict)
    leftovers: List[Leftover] = field(default_factory=list)
    ports: List[str] = field(default_factory=list)
    verdict: str = ""
    path: str = ""
    interrupted: str = ""
