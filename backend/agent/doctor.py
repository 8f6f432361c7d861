"""What of eightzeros works on this host, what does not, and what to do about it: for a host seen for the first time.

Each row is a Gate: `ok` True works, False does not, and None works in part or could not be asked. Nothing is changed
and nobody is signalled; the driver is asked in a child, as for a verdict.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from typing import Any, Callable, Dict, List, Tuple

from backend.agent import logind, paths, procfs
from backend.agent.gates import places
from backend.agent.holders import scan
from backend.agent.pidfd import Bound
from backend.agent.reset.watch import Watch
from backend.agent.seam import ContextList, DeviceTable, Machine
from backend.agent.xid.kernellog import KernelLog
from backend.wire import LEAN, MIB, SLOW, Gate, GpuFacts, Inventory, Reading, printable

STATE_BYTES = 256 * MIB
"""Room for runs, receipts and flight records: a day of eight GPUs is 7 MB of record (docs/flight.md)."""

SHM_BYTES = 1 << 30
"""Less is a container's default (Docker: 64 MiB), in which PyTorch's workers and NCCL end with a bus error."""

CAP_KILL = 5


def check(machine: Machine) -> List[Gate]:
    """Return every row, in the order in which a person would ask."""
    parts: List[Tuple[str, Callable[[], List[Gate]]]] = [
        ("Python", _python),
        ("GPU driver", lambda: _driver(machine)),
        ("who holds the GPUs", lambda: _processes(machine.devices())),
        ("safe signals", _handles),
        ("ending others' processes", _rights),
        ("XIDs since boot", lambda: _kernel_log(machine)),
        ("CUDA test", lambda: _cuda(machine)),
        ("runs and receipts", _state),
        ("shared memory", _shm),
        (logind.NAME, _logind),
        ("checks by hand", _by_hand),
    ]
    rows: List[Gate] = []
    for name, part in parts:
        try:
            rows += part()
        except Exception as error:  # one thing that cannot be looked at must not hide the others
            text = "%s: %s" % (type(error).__name__, printable(str(error), 300))
            rows.append(Gate(name, None, "could not be looked at: " + text))
    return rows


def _python() -> List[Gate]:
    return [Gate("Python", True, "%d.%d.%d, %s" % (*sys.version_info[:3], sys.executable))]


def _driver(machine: Machine) -> List[Gate]:
    """Ask the driver for its GPUs and for one reading of each."""
    watch = Watch(machine.driver)
    try:
        inventory = watch.open()
        if not inventory.gpus:
            return [_no_gpu(inventory)]
        lean, slow = watch.read("lean"), watch.read("slow")
        rows = [_found(inventory), *_memory(inventory), _readings(inventory, lean, slow)]
        rows += [_silent(gpu, watch.unknown.get(gpu.index, "") or gpu.problem) for gpu in inventory.gpus
                 if gpu.index in watch.unknown or gpu.problem]  # fmt: skip
        rows += [Gate("device files", False if stands else None, reason, action)
                 for reason, action, _, stands in machine.devices().faults(inventory.gpus)]  # fmt: skip
        withheld = machine.devices().withheld()
        if withheld:
            rows.append(Gate("GPUs of the host", None, "%d more, not given to this container" % len(withheld),
                             "who holds those is not seen from here"))  # fmt: skip
        return rows + _persistence(inventory)
    finally:
        watch.close()


def _no_gpu(inventory: Inventory) -> Gate:
    fix = "" if inventory.problem else "nvidia-smi -L; in a container, give it the GPUs (docker run --gpus all)"
    return Gate("GPU driver", False, inventory.problem or "the driver lists no GPU", fix)


def _found(inventory: Inventory) -> Gate:
    names = sorted({gpu.name for gpu in inventory.gpus if gpu.name})
    said = "R%s, CUDA %s, %d x %s" % (inventory.driver, inventory.cuda, len(inventory.gpus), " and ".join(names))
    return Gate("GPU driver", True, said + (" (VIRTUAL)" if inventory.virtual else ""))


def _memory(inventory: Inventory) -> List[Gate]:
    """Say where memory in use will not be nvidia-smi's number (DESIGN section 5: v1 counts what is reserved)."""
    if inventory.memory_api != "v1":
        return []
    said = "this driver counts what it reserves for itself as used"
    return [Gate("GPU memory", None, said, "eightzeros baseline record, while the GPUs are idle")]


def _silent(gpu: GpuFacts, why: str) -> Gate:
    return Gate(
        "GPU %d" % gpu.index, False, why, "nvidia-smi -q -i %s; then see the kernel log" % (gpu.uuid or gpu.index)
    )


def _readings(inventory: Inventory, lean: Dict[int, Any], slow: Dict[int, Any]) -> Gate:
    """Say which readings this driver or GPU does not give, and which fail."""
    absent: Dict[str, int] = {}
    broken: List[str] = []
    for gpu in inventory.gpus:
        values: Dict[str, Reading] = dict(slow.get(gpu.index) or {})
        found = lean.get(gpu.index)
        if found is not None:
            values.update(found[0])
            contexts: ContextList = found[1]
            broken += ["process list of GPU %d: %s" % (gpu.index, contexts.problem)] if contexts.problem else []
        for name, reading in values.items():
            if reading.unsupported:
                absent[name] = absent.get(name, 0) + 1
            elif not reading.ok:
                broken.append("%s of GPU %d: %s" % (name, gpu.index, reading.problem))
    said = "%d a GPU" % len(LEAN + SLOW)
    if absent:
        said += "; not given here: " + ", ".join(sorted(absent))
    if broken:
        return Gate("readings", False, "%d fail: %s" % (len(broken), "; ".join(broken[:3])), "nvidia-smi -q")
    return Gate("readings", True, said)


def _persistence(inventory: Inventory) -> List[Gate]:
    off = [gpu.index for gpu in inventory.gpus if gpu.persistence.number() == 0]
    if not off:
        return []
    said = "off on GPU %s: an idle GPU is set up anew for each program" % ", ".join(map(str, off))
    return [Gate("persistence mode", None, said, "sudo nvidia-smi -pm 1, or start nvidia-persistenced")]


def _processes(table: DeviceTable) -> List[Gate]:
    """Say whether every process may be looked into, which a verdict needs to be more than limited."""
    name, found = "who holds the GPUs", scan(table)
    unseen = found.unseen()
    if not procfs.in_initial_pid_namespace():
        unseen.append("processes outside this container are not seen")
    if unseen:
        return [Gate(name, None, "; ".join(unseen), "connect as root, or set accept_limited for this host: "
                     "verdicts read CLEAN (limited)")]  # fmt: skip
    return [Gate(name, True, "every process may be looked into; %d hold a device of the driver" % len(found.holdings))]


def _handles() -> List[Gate]:
    """Say whether the kernel has handles of processes: without them no signal is sent."""
    try:
        bound = Bound.open(os.getpid())
    except OSError as error:
        said = "the kernel has no handles of processes (pidfd): %s" % (error.strerror or error)
        return [Gate("safe signals", False, said, "a reset needs Linux 5.3 or newer, and a sandbox that lets pidfd by")]
    if bound is not None:
        bound.close()
    return [Gate("safe signals", True, "pidfd, Linux %s" % os.uname().release)]


def _rights() -> List[Gate]:
    name, caps = "ending others' processes", int(procfs.status(os.getpid()).get("CapEff", "0"), 16)
    if caps >> CAP_KILL & 1:
        return [Gate(name, True, "%s may" % procfs.user_name(os.geteuid()))]
    said = "%s may end only its own" % procfs.user_name(os.geteuid())
    return [Gate(name, None, said, "connect as root where other users' programs are to be ended too")]


def _kernel_log(machine: Machine) -> List[Gate]:
    if not machine.kernel_log:
        return []
    log = KernelLog(machine.kernel_log)
    problem = log.problem
    log.close()
    if problem:
        return [
            Gate(
                "XIDs since boot", None, problem, "XIDs are told as the driver raises them; earlier ones are not known"
            )
        ]
    return [Gate("XIDs since boot", True, "the kernel log can be read")]


def _cuda(machine: Machine) -> List[Gate]:
    name = "CUDA test"
    if not machine.cuda_library:
        return []
    try:
        ctypes.CDLL(machine.cuda_library)
    except OSError as error:
        return [Gate(name, None, printable(str(error), 300), "a reset leaves the test out; in a container, give it the "
                     "driver's `compute` capability (NVIDIA_DRIVER_CAPABILITIES)")]  # fmt: skip
    return [Gate(name, True, "%s is there" % machine.cuda_library)]


def _state() -> List[Gate]:
    """Say where runs and receipts are kept, and whether there is room."""
    folder = paths.state_dir()
    room = places.room(folder, STATE_BYTES)
    homeless = paths.homeless()
    if homeless and room.ok:
        return [Gate("runs and receipts", None, homeless, "make HOME writable: /tmp may be emptied at a reboot")]
    return [Gate("runs and receipts", room.ok, "%s: %s" % (folder, room.detail), room.fix)]


def _shm() -> List[Gate]:
    room = places.room(places.SHM, SHM_BYTES)
    fix = "in a container: docker run --shm-size=16g" if room.ok is False else room.fix
    return [Gate("shared memory", room.ok, "%s: %s" % (places.SHM, room.detail), fix)]


def _logind() -> List[Gate]:
    gate = logind.check()
    return [gate] if gate is not None else []


def _by_hand() -> List[Gate]:
    """Say whether the commands that a verdict names for checking by hand are there."""
    found = shutil.which("nvidia-smi")
    if found:
        return [Gate("checks by hand", True, found)]
    return [
        Gate(
            "checks by hand",
            None,
            "nvidia-smi is not on the PATH of a command over SSH",
            "only the commands to check by hand need it",
        )
    ]
