"""A small CUDA program on every GPU, all at once, each in a child of its own: does it compute and give back?

Free memory and clean records do not show that a GPU can be used; a context, a pattern and a kernel do, in half a
second (0.46 s on an H200; facts: reset, head). A child that hangs costs LIMIT_S and no more: it is killed by its
handle, and where it does not die even so it is named and left.

Where the test cannot be run, that is said and changes no verdict: a host or container without the driver's CUDA
library runs nothing on its GPUs either, and the verdict is then about memory, processes and records alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from backend.agent.pidfd import Bound, pidfd_open, wait
from backend.agent.reset.cudachild import LIBRARY_MISSING, STEPS
from backend.agent.reset.finding import Finding
from backend.agent.reset.ladder import describe_stuck
from backend.agent.seam import Machine
from backend.wire import GpuFacts, printable

LIMIT_S = 20.0
"""For each child, which all run at the same time (facts: reset, section 5.8)."""

DEATH_S = 2.0
"""How long a child that was killed may take to die before it is called stuck."""

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"

NO_FAULT = {
    34: "the library that was found is the toolkit's stub, not the driver's",
    209: "it is older than the test's kernel",
    218: "its driver does not take the test's kernel",
    221: "the driver's compiler (libnvidia-ptxjitcompiler) is missing here",
    222: "its driver is older than the test's kernel",
    223: "compiling kernels is switched off here (CUDA_DISABLE_PTX_JIT)",
    800: "this user may not use it",
}
"""STUB_LIBRARY, NO_BINARY_FOR_GPU, INVALID_PTX, JIT_COMPILER_NOT_FOUND, UNSUPPORTED_PTX_VERSION,
JIT_COMPILATION_DISABLED, NOT_PERMITTED: they say nothing of a GPU's health."""

_RESET = "eightzeros reset --gpu-reset --gpu {address} while nobody uses it; if it fails again, have it serviced"
_XID = "look for an Xid of this GPU in the kernel log; then " + _RESET
ADVICE = {
    2: "see what still has its memory: nvidia-smi -i {address}",
    46: "set its compute mode to default (sudo nvidia-smi -c 0 -i {address}), or see who has it exclusively",
    100: "check that /dev/nvidia* is there and given to this container; nvidia-smi -L",
    101: "set its compute mode to default (sudo nvidia-smi -c 0 -i {address})",
    214: _RESET,
    219: "reset every GPU that is linked with it",
    802: "start the fabric manager: sudo systemctl restart nvidia-fabricmanager",
    803: "reboot the host: library and kernel module of the driver are of two versions",
    804: "take the compatibility library of CUDA off the library path",
}
"""By the number of the error; any other is one of the GPU at work."""


@dataclass
class Outcome:
    """How the test of one GPU ended: one of the four words above, why, and the seconds of each step that was taken.

    `code` is CUDA's number and `name` its name, 0 and empty where CUDA saw no error; `stuck` says what a child that
    could not be killed is doing.
    """

    gpu: int
    uuid: str
    outcome: str = NOT_RUN
    reason: str = ""
    step: str = ""
    code: int = 0
    name: str = ""
    total_s: float = 0.0
    steps: Dict[str, float] = field(default_factory=dict)
    stuck: str = ""

    def findings(self) -> List[Finding]:
        """Return what is wrong with the GPU: a test that failed or hung makes it UNHEALTHY."""
        if self.outcome not in (FAILED, TIMED_OUT):
            return []
        advice = ADVICE.get(self.code, _XID)
        if self.stuck:
            advice = "reboot the host: %s" % self.stuck
        by_hand = "CUDA_VISIBLE_DEVICES=%s python3 -c 'import ctypes; print(ctypes.CDLL(\"libcuda.so.1\").cuInit(0))'"
        if self.step not in STEPS[:2]:
            by_hand = "CUDA_VISIBLE_DEVICES=%s python3 -c 'import torch; print(torch.ones(9, device=\"cuda\").sum())'"
        text = "the CUDA test %s: %s" % (self.outcome, self.reason)
        return [Finding(text, advice.format(address=self.uuid or self.gpu), by_hand % self.uuid)]


class Subject(NamedTuple):
    """A GPU to be tested, or `refused` in words."""

    gpu: GpuFacts
    refused: str = ""


def run(machine: Machine, subjects: Iterable[Subject], limit_s: float = LIMIT_S) -> List[Outcome]:
    """Test the GPUs, all at once. Returns within `limit_s` and DEATH_S, whatever the driver does."""
    children, outcomes = [], []
    for gpu, refused in subjects:
        outcome = Outcome(gpu.index, gpu.uuid, reason=refused or _impossible(machine, gpu))
        outcomes.append(outcome)
        if not outcome.reason:
            try:
                children.append(_Child(machine, outcome))
            except OSError as error:
                outcome.reason = "its child could not be started: %s" % (error.strerror or error)
    _collect(children, time.monotonic() + limit_s)
    living = [child for child in children if child.bound is not None]
    late = [child for child in living if not child.ended]
    for child in late:
        child.kill()
    wait([child.bound for child in living if child.bound is not None], time.monotonic() + DEATH_S)
    for child in children:
        child.conclude(child in late, limit_s)
    return outcomes


def _impossible(machine: Machine, gpu: GpuFacts) -> str:
    """Return why a GPU cannot be tested, or an empty string."""
    if not machine.cuda_library:
        return "this is a virtual host" if machine.virtual else "this machine has no CUDA library"
    if not gpu.uuid:
        return "its UUID is not known"
    device = "/dev/nvidia%d" % gpu.minor
    if os.path.exists(device) and not os.access(device, os.R_OK | os.W_OK):
        return "%s may not be opened by this user" % device
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError:
        return "this kernel gives no handle on a process, by which a child that hangs could be ended"
    return ""


class _Child:
    """One child and what it said so far."""

    def __init__(self, machine: Machine, outcome: Outcome) -> None:
        self.outcome, self._said, self.ended = outcome, b"", False
        self._began = self._heard_at = time.monotonic()
        self._process = subprocess.Popen(
            [*machine.relaunch, "cudatest", str(os.getpid())], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=_environment(outcome.uuid), close_fds=True,
        )  # fmt: skip
        self.bound: Optional[Bound] = Bound.open(self._process.pid)

    def fileno(self) -> int:
        """Return what is readable when it says something."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> None:
        """Take in what it says; the end of that is the end of the child, but for its exit in the kernel."""
        data = os.read(self.fileno(), 65536)
        self._said, self.ended = (self._said + data)[-65536:], not data
        self._heard_at = time.monotonic()

    def kill(self) -> None:
        """Kill it by its handle."""
        if self.bound is not None:
            self.bound.send(signal.SIGKILL)

    def conclude(self, late: bool, limit_s: float) -> None:
        """Write down how it ended, and let it go."""
        outcome = self.outcome
        gone = self.bound is None or self.bound.gone()
        outcome.total_s = round((time.monotonic() if late else self._heard_at) - self._began, 3)
        if not gone:
            outcome.stuck = "process %d, which ran the test, cannot be killed (%s)" % (
                self._process.pid, describe_stuck(self._process.pid))  # fmt: skip
        status = self._process.wait() if gone else None
        self._judge(late, limit_s, status)
        if self.bound is not None:
            self.bound.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _judge(self, late: bool, limit_s: float, status: Optional[int]) -> None:
        outcome, failure = self.outcome, self._take_in()
        outcome.step = next((step for step in STEPS if step not in outcome.steps), "exit")
        if failure is not None:
            self._failed(failure)
        elif late or status is None:
            outcome.outcome = TIMED_OUT
            outcome.reason = "step `%s` did not end within %.0f s" % (outcome.step, limit_s)
            outcome.reason += "; " + outcome.stuck if outcome.stuck else ""
        elif status or outcome.step != "exit":
            outcome.outcome = FAILED
            how = signal.Signals(-status).name if status < 0 else "exit %d" % status
            outcome.reason = "its process ended in step `%s`: %s%s" % (outcome.step, how, self._last_words())
        else:
            outcome.outcome, outcome.step = PASSED, ""

    def _failed(self, failure: Dict[str, Any]) -> None:
        """Sort a step that said itself that it failed."""
        outcome = self.outcome
        code, text = int(failure["code"]), printable(str(failure.get("text", "")), 300)
        outcome.step, outcome.code, outcome.name = str(failure["step"]), code, printable(str(failure["name"]), 80)
        if code == LIBRARY_MISSING:
            outcome.reason = text
        elif code in NO_FAULT:
            outcome.reason = "%s (error %d)" % (NO_FAULT[code], code)
        else:
            error = "%s (%s, error %d)" % (text, outcome.name or "unknown name", code) if code > 0 else text
            outcome.outcome, outcome.reason = FAILED, "step `%s`: %s" % (outcome.step, error)

    def _take_in(self) -> Optional[Dict[str, Any]]:
        """Read its lines into the outcome's steps. Returns the one that tells a failure."""
        for line in self._said.split(b"\n"):
            said = _object(line)
            if "code" in said:
                return said
            if said.get("step") in STEPS:
                self.outcome.steps[said["step"]] = float(said["s"])
        return None

    def _last_words(self) -> str:
        lines = [line for line in self._said.split(b"\n") if line.strip() and not _object(line)]
        return "; it said: " + printable(lines[-1].decode("utf-8", "replace"), 200) if lines else ""


def _collect(children: List[_Child], until: float) -> None:
    """Read what the children say until each has ended, or the time is over."""
    while True:
        open_ = [child for child in children if not child.ended]
        left = until - time.monotonic()
        if not open_ or left <= 0:
            return
        for child in select.select(open_, [], [], left)[0]:
            child.read()


def _object(line: bytes) -> Dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _environment(uuid: str) -> Dict[str, str]:
    """Return the child's environment: one GPU, past any MPS server, and no compiled kernel left in a cache."""
    return dict(
        os.environ, CUDA_VISIBLE_DEVICES=uuid, CUDA_MPS_PIPE_DIRECTORY=os.devnull, CUDA_CACHE_DISABLE="1",
    )  # fmt: skip


def in_words(outcomes: List[Outcome]) -> List[str]:
    """Say how the tests went, GPUs of which the same is to be said together."""
    rows: Dict[Tuple[str, str], List[Outcome]] = {}
    for one in outcomes:
        rows.setdefault((one.outcome, one.reason), []).append(one)
    said = []
    for (outcome, reason), ones in rows.items():
        which = "GPU " + ", ".join(str(one.gpu) for one in ones)
        longest = max(one.total_s for one in ones)
        if outcome == PASSED:
            said.append("%s: the CUDA test passed in %.2f s" % (which, longest))
        else:
            what = "no kernel was run" if outcome == NOT_RUN else "the CUDA test %s" % outcome
            said.append("%s: %s: %s" % (which, what, reason))
    return said
