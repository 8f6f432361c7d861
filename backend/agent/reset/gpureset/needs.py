"""What a GPU reset needs, each with what was found and what to do: facts, reset, sections 7 and 8.

A need that could not be read is none that is met: a reset that fails halfway leaves a GPU that only a reboot brings
back.
"""

from __future__ import annotations

import os
from typing import Iterator, List, Optional, Sequence

from backend.agent import procfs
from backend.agent.reset.gpureset import smi
from backend.agent.reset.gpureset.examine import Examined, Target
from backend.agent.reset.gpureset.faults import earlier, incurable
from backend.agent.seam import Machine
from backend.wire import Gate, printable

SERVICES = {
    "nvidia-persistenced": "nvidia-persistenced", "nv-hostengine": "nvidia-dcgm", "dcgm-exporter": "dcgm-exporter",
    "nv-fabricmanager": "nvidia-fabricmanager", "nvidia-imex": "nvidia-imex", "nvidia-powerd": "nvidia-powerd",
    "nvsm_core": "nvsm", "Xorg": "display-manager", "gdm": "display-manager",
}  # fmt: skip
"""The unit of each program that keeps a GPU open on many hosts (mig-parted's list; facts: reset, 1 and 9)."""

ALONE = ("Hopper", "Blackwell")
"""Architectures whose GPUs can be reset one by one where NVSwitches join them; earlier ones only all together."""

CONTAINER_FILES = (".dockerenv", "run/.containerenv")


def needs(machine: Machine, seen: Examined, in_vm: bool) -> List[Gate]:
    """Check everything that a reset of these GPUs needs. `in_vm` is the operator's word that this virtual machine may
    reset the GPUs that it was given."""
    found = [_root(), _container(machine.host_root), _program(machine)]
    for target in seen.targets:
        found += [
            _fault(target), _once(target), _holders(target, seen.unseen), _persistence(target), _mig(target),
            _virtual(target, in_vm), _display(target, machine.host_root),
        ]  # fmt: skip
    return [*found, _links(seen, machine.host_root), *_daemons()]


def _root() -> Gate:
    uid = os.geteuid()
    return Gate("root", uid == 0, "this is uid %d" % uid, "" if uid == 0 else "connect to this host as root")


def _container(root: str) -> Gate:
    fix = "run it on the host itself, outside of the container"
    for name in CONTAINER_FILES:
        if os.path.exists(os.path.join(root, name)):
            return Gate("container", False, "/%s is there" % name, fix)
    try:
        namespace = os.readlink(os.path.join(root, "proc/self/ns/pid"))
    except OSError as error:
        return Gate("container", None, "its pid namespace cannot be read: %s" % error.strerror, fix)
    inside = namespace != "pid:[%d]" % procfs.INITIAL_PID_NAMESPACE
    return Gate("container", not inside, "in a container's pid namespace" if inside else "none", fix if inside else "")


def _program(machine: Machine) -> Gate:
    argv = smi.find(machine.smi)
    text = " ".join(argv) if argv else "not found"
    return Gate("nvidia-smi", bool(argv), text, "" if argv else "install the driver's utilities on this host")


def _fault(target: Target) -> Gate:
    name = "GPU %d: fault" % target.facts.index
    if not target.faults:
        fix = "nothing here asks for one; where you know better, say why: --because TEXT"
        return Gate(name, False, "none that a reset would mend", fix)
    wrong = incurable(target.faults)
    text = "; ".join(target.faults) + ("; " + wrong if wrong else "")
    return Gate(name, not wrong, text, "reboot the host, then power cycle it" if wrong else "")


def _once(target: Target) -> Gate:
    name = "GPU %d: first time" % target.facts.index
    for one in earlier(target.facts.uuid):
        same = sorted(set(one.faults) & set(target.faults))
        if same:
            text = "it was reset for `%s` in this boot: receipt %s, %s" % (same[0], one.receipt_id, one.outcome)
            return Gate(
                name, False, text, "reboot the host; if the fault comes again, power cycle it and have it serviced"
            )
    return Gate(name, True, "not reset for this in this boot")


def _holders(target: Target, unseen: Sequence[str]) -> Gate:
    name = "GPU %d: nobody has it open" % target.facts.index
    if target.holders:
        who = ["process %d (%s, %s)" % (one.pid, procfs.user_name(procfs.uid(one.pid)), procfs.command(one.pid, 60))
               for one in target.holders]  # fmt: skip
        return Gate(name, False, "; ".join(who), "; ".join(dict.fromkeys(_ends(one.pid) for one in target.holders)))
    if unseen:
        return Gate(name, None, "; ".join(unseen), "run it as root")
    return Gate(name, True, "nobody; eightzeros itself lets go of it for the reset")


def _ends(pid: int) -> str:
    """Say what ends a holder."""
    found = procfs.stat(pid)
    if found is not None and found.state == "D":
        return "process %d hangs in the kernel: reboot the host" % pid
    program = os.path.basename(procfs.exe(pid))
    if program.startswith("nvidia-cuda-mps"):
        return "echo quit | nvidia-cuda-mps-control"
    if program in SERVICES:
        return "sudo systemctl stop %s, and start it again afterwards" % SERVICES[program]
    return "reset the host (eightzeros reset), or end process %d" % pid


def _persistence(target: Target) -> Gate:
    name = "GPU %d: persistence mode" % target.facts.index
    value = target.readings.get("persistence")
    if value is not None and value.unsupported:
        return Gate(name, True, "not supported")
    number = None if value is None else value.number()
    if number is None:
        why = "it was not read" if value is None else "could not be read: %s" % value.problem
        return Gate(name, None, why, "nvidia-smi --query-gpu=persistence_mode --format=csv -i %s" % target.address)
    return Gate(name, True, "on: turned off for the reset, then on again" if number else "off")


def _mig(target: Target) -> Gate:
    name, value = "GPU %d: MIG" % target.facts.index, target.readings.get("mig")
    if value is None or value.failed:
        return Gate(name, None, "could not be read: %s" % (value.problem if value else "not asked"), "run it as root")
    if not value.number():
        return Gate(name, True, "not supported" if value.unsupported else "off")
    fix = "sudo nvidia-smi mig -dci -i {0} && sudo nvidia-smi mig -dgi -i {0} && sudo nvidia-smi -mig 0 -i {0}"
    return Gate(name, False, "on: its instances would be lost", fix.format(target.address))


def _virtual(target: Target, in_vm: bool) -> Gate:
    """A guest may reset a GPU that it was given whole, where its hypervisor lets it; a shared one never."""
    name, mode = "GPU %d: virtualization" % target.facts.index, target.said.get("virtualization", "")
    if not mode:
        return Gate(
            name, None, target.facts_unread or "nvidia-smi does not say", "nvidia-smi -q -i %s" % target.address
        )
    if mode == "None":
        return Gate(name, True, "none: the GPU is this machine's own")
    if mode == "Pass-Through":
        fix = "ask who runs the hypervisor; where it lets a guest reset a GPU, say so: --in-vm"
        return Gate(name, True if in_vm else None, "passed through to this virtual machine" +
                    (", which may reset it (--in-vm)" if in_vm else "; whether it may reset it is not known"),
                    "" if in_vm else fix)  # fmt: skip
    return Gate(name, False, printable(mode, 60), "a shared GPU is reset by its hypervisor's host")


def _display(target: Target, root: str) -> Gate:
    name, shown = "GPU %d: display" % target.facts.index, target.said.get("display", "")
    if shown == "Enabled":
        return Gate(name, False, "a display is active on it", "sudo systemctl stop display-manager")
    text = procfs.read_bytes(os.path.join(root, "proc/modules"))
    if text is None:
        return Gate(name, None, "/proc/modules cannot be read", "run it as root")
    lines = [line.split() for line in text.decode("ascii", "replace").splitlines()]
    drm = next((words for words in lines if words and words[0] == "nvidia_drm"), None)
    if drm is None:
        return Gate(name, True, "none: nvidia_drm is not loaded")
    users, modeset = int(drm[2]), _modeset(root)
    if users or modeset is not False:
        said = {True: "with modeset", False: "without modeset", None: "its modeset cannot be read"}[modeset]
        text_ = "nvidia_drm is loaded (%s, %d users), and holds the GPU as a process would" % (said, users)
        return Gate(
            name, False if users or modeset else None, text_, "stop what draws, then sudo modprobe -r nvidia_drm"
        )
    return Gate(name, True, "none: nvidia_drm is loaded, unused, without modeset")


def _modeset(root: str) -> Optional[bool]:
    text = procfs.read_bytes(os.path.join(root, "sys/module/nvidia_drm/parameters/modeset"))
    return {b"Y": True, b"N": False}.get(text.strip()) if text is not None else None


def _links(seen: Examined, root: str) -> Gate:
    """GPUs before Hopper that are joined by NVLink are reset all together; with switches, without fabric manager."""
    joined, asked = seen.linked, {one.facts.index for one in seen.targets}
    switches = _switches(root)
    if switches:
        joined = set(seen.indices)
    if not joined & asked:
        return Gate("linked GPUs", True, "no NVLink is active")
    what = "%d NVSwitches" % switches if switches else "NVLinks"
    built = {one.said.get("architecture", "") for one in seen.targets}
    left = sorted(joined - asked)
    if all(one.startswith(ALONE) for one in built):
        return Gate("linked GPUs", True, "%s; %s GPUs can be reset one by one" % (what, ", ".join(sorted(built))))
    if left:
        also = ", ".join(map(str, left))
        ok = None if "" in built else False
        return Gate("linked GPUs", ok, "%s join them with GPU %s, which must be reset with them" % (what, also),
                    "name all of them: --gpu %s" % " --gpu ".join(map(str, sorted(joined))))  # fmt: skip
    manager = _running("nv-fabricmanager") if switches else []
    if manager:
        text = "all of them are named; the fabric manager runs (process %d)" % manager[0]
        return Gate("linked GPUs", False, text,
                    "sudo systemctl stop nvidia-fabricmanager, and start it again afterwards")  # fmt: skip
    return Gate("linked GPUs", True, "%s; all that they join are named" % what)


def _switches(root: str) -> int:
    try:
        return len(os.listdir(os.path.join(root, "proc/driver/nvidia-nvswitch/devices")))
    except OSError:
        return 0


def _daemons() -> Iterator[Gate]:
    """The daemon that turns persistence mode on again, also where it has nothing open at this moment."""
    found = _running("nvidia-persistenced")
    text = "process %s" % ", ".join(map(str, found)) if found else "does not run"
    fix = "sudo systemctl stop nvidia-persistenced, and start it again afterwards" if found else ""
    yield Gate("persistence daemon", not found, text, fix)


def _running(program: str) -> List[int]:
    return [pid for pid in procfs.pids() if os.path.basename(procfs.exe(pid)) == program]
