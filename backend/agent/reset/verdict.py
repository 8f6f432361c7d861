"""What each GPU is in the end, in one of five words, with the reason and the command that shows the same by
hand."""

from __future__ import annotations

import os
from typing import Iterable, List, Sequence, Tuple

from backend.agent import procfs
from backend.agent.reset import health
from backend.agent.reset.clearance import GpuState, lives, mib
from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.protect import protected
from backend.wire import CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, UNKNOWN, VERDICTS, GpuVerdict

REBOOT = "wait and verify again; if it stays so, reboot the host"


def judge(state: GpuState, found: Sequence[Finding] = (), unread: Sequence[str] = ()) -> GpuVerdict:
    """Weigh everything that is known of one GPU: the worst of it is the verdict, and every reason is said.

    `found` is what is wrong with its health; `unread` names the health readings that failed.
    """
    weighed: List[Tuple[str, str, str, str]] = []  # verdict, reason, action, command
    if state.unknown and not _gone(state):
        weighed.append((UNKNOWN, state.unknown, REBOOT, "nvidia-smi -i %s" % state.address))
    if state.why:
        weighed.append((NOT_CLEAN, "; ".join(state.why), _action(state), _command(state)))
    if _gone(state):
        lost = Finding(state.unknown, "reboot the host; if it stays away, have it serviced", "nvidia-smi -L")
        found = [lost, *(one for one in found if one.reason != state.unknown)]
    weighed += [(UNHEALTHY, one.reason, one.action, one.command) for one in found if one.level == FAIL]
    gaps = [*state.limited, *(() if state.unknown else unread)]
    if gaps:
        weighed.append((LIMITED, "; ".join(gaps), "run it as root, or accept_limited for this host", "id -u"))
    weighed.sort(key=lambda one: VERDICTS.index(one[0]), reverse=True)
    if not weighed:
        weighed.append((CLEAN, _clean(state), "", _memory_command(state)))
    word, _, action, command = weighed[0]
    said = [reason for _, reason, _, _ in weighed]
    if word == LIMITED:
        said.append(_clean(state))
    said += ["warning: %s" % one.reason for one in found if one.level == WARN]
    return GpuVerdict(
        state.index, state.uuid, word, "; ".join(said), action, command, state.used, state.limit.baseline_bytes,
        [one._asdict() for one in found],
    )  # fmt: skip


def of_host(verdicts: Iterable[GpuVerdict], wrong: Iterable[Finding] = ()) -> str:
    """Return the verdict of the host: that of its worst GPU, or UNHEALTHY for what is wrong with the host itself; of
    no GPU at all, unknown."""
    words = [one.verdict for one in verdicts] + [UNHEALTHY for one in wrong if one.level == FAIL]
    return max(words, key=VERDICTS.index, default=UNKNOWN)


def passes(verdict: str, accept_limited: bool) -> bool:
    """Say whether a verdict opens the gate to the next stage."""
    return verdict == CLEAN or (verdict == LIMITED and accept_limited)


def _gone(state: GpuState) -> bool:
    return health.means_gone(state.unknown)


def _clean(state: GpuState) -> str:
    value = state.used.number()
    shown = "its memory is not reported" if value is None else "%s in use" % mib(value)
    return "%s (%s), no process" % (shown, state.limit.said)


def _action(state: GpuState) -> str:
    living = sorted(state.held_by | {pid for pid in state.pids if lives(pid)})
    spared = [pid for pid in living if protected(procfs.exe(pid))]
    rest = [pid for pid in living if pid not in spared]
    mine = [pid for pid in rest if procfs.uid(pid) == os.geteuid()]
    if mine:
        return "reset the host; what survives that is explained by cat /proc/%d/{status,wchan}" % mine[0]
    if rest:
        who = ", ".join("%d (%s)" % (pid, procfs.user_name(procfs.uid(pid))) for pid in rest)
        return "ask the owner of process %s to stop it, or set other_users for this host and reset" % who
    if spared:
        return "decide, and stop it by its own means, since a reset spares it: %s" % _by_its_own_means(spared[0])
    return "see who is left; if no process holds it, eightzeros reset --gpu-reset --gpu %s" % state.address


def _by_its_own_means(pid: int) -> str:
    """Say what ends a protected program (facts: reset, section 9)."""
    if os.path.basename(procfs.exe(pid)).startswith("nvidia-cuda-mps"):
        return "echo quit | nvidia-cuda-mps-control"
    return "systemctl status %d names its service; %s" % (pid, protected(procfs.exe(pid)))


def _command(state: GpuState) -> str:
    if state.pids:
        return "nvidia-smi --query-compute-apps=pid,used_memory --format=csv -i %s" % state.address
    if state.held_by:
        return "sudo fuser -v /dev/nvidia%d" % state.minor
    return _memory_command(state)


def _memory_command(state: GpuState) -> str:
    return "nvidia-smi --query-gpu=index,memory.used --format=csv -i %s" % state.address
