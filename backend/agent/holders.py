"""Who has a GPU's device files open or mapped: every process, by device number and never by name.

Each thread may have files of its own, and a zombie leader shows none though a live thread of it holds them; a
mapping outlives its closed file and stands only in maps (facts: reset, section 3). A file in flight over a
socket is seen nowhere: memory that stays then has no holder, and the verdict has to say so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

from backend.agent import procfs
from backend.agent.seam import DeviceTable

PF_KTHREAD = 0x00200000
KCMP_FILES = 2
NR_KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272}.get(platform.machine(), -1)
_libc = ctypes.CDLL(None, use_errno=True)
_MAPPING = re.compile(rb"^\S+ \S+ \S+ (\S+ [1-9]\d* +/.*)$", re.M)


@dataclass
class Holding:
    """What one process holds: open files and mappings, each counted by GPU minor.

    `shared` counts what belongs to no one GPU (nvidiactl, nvidia-uvm), files and mappings together.
    """

    pid: int
    start_ticks: int
    fds: Dict[int, int] = field(default_factory=dict)
    maps: Dict[int, int] = field(default_factory=dict)
    shared: int = 0

    @property
    def minors(self) -> List[int]:
        """Return the minors of the GPUs that it holds."""
        return sorted(set(self.fds) | set(self.maps))

    def how(self) -> str:
        """Say in words how it holds them; GPUs that it holds alike are said together."""
        alike: Dict[Tuple[int, int], List[int]] = {}
        for minor in self.minors:
            alike.setdefault((self.fds.get(minor, 0), self.maps.get(minor, 0)), []).append(minor)
        parts = []
        for (files, maps), minors in alike.items():
            counts = [(files, "open file"), (maps, "mapping")]
            said = " and ".join("%d %s%s" % (n, noun, "s" if n > 1 else "") for n, noun in counts if n)
            parts.append(
                "%s of %s %s" % (said, "GPU minor" if len(minors) == 1 else "each of GPU minors", _runs(minors))
            )
        return ", ".join(parts) or "driver files that belong to no one GPU"


@dataclass
class Scan:
    """One look at every process. `unreadable` has the uid of each process that could not be looked into."""

    holdings: Dict[int, Holding] = field(default_factory=dict)
    unreadable: Dict[int, int] = field(default_factory=dict)

    def unseen(self) -> List[str]:
        """Say in words what could not be looked into."""
        mine = sum(1 for uid in self.unreadable.values() if uid == os.geteuid())
        others = len(self.unreadable) - mine
        said = []
        if others:
            said.append("%d process%s of other users could not be looked into" % (others, "es" if others > 1 else ""))
        if mine:
            said.append("%d of your own processes could not be looked into" % mine)
        return said


def _runs(numbers: List[int]) -> str:
    """Write sorted numbers with runs joined: 0-3, 6."""
    runs: List[List[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join("%d-%d" % (run[0], run[-1]) if len(run) > 1 else "%d" % run[0] for run in runs)


def scan(table: DeviceTable) -> Scan:
    """Look at every process's open files and mappings."""
    reader, found = _Reader(table), Scan()
    for pid in procfs.pids():
        try:
            holding = reader.look(pid)
        except PermissionError:
            _note_unreadable(pid, found)
            continue
        if holding is not None:
            found.holdings[pid] = holding
    return found


def _note_unreadable(pid: int, found: Scan) -> None:
    """Note a process that may not be looked into. Kernel threads, plain zombies and the host's init hold no
    files."""
    stat = procfs.stat(pid)
    if pid == 1 and _initial_namespace():
        return
    if stat is None or stat.flags & PF_KTHREAD or (stat.dead and len(procfs.threads(pid)) <= 1):
        return
    uid = procfs.uid(pid)
    if uid is not None:
        found.unreadable[pid] = uid


def _initial_namespace() -> bool:
    """Say whether pid 1 is the host's init; in a container it is the workload. The kernel fixes this inode
    number."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False


class _Reader:
    """Reads processes against one device table, and remembers what each mapped file was."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._hints = tuple(table.hints())
        self._hint_bytes = tuple(os.fsencode(hint) for hint in self._hints)
        self._mapped: Dict[bytes, Optional[Tuple[int, ...]]] = {}

    def look(self, pid: int) -> Optional[Holding]:
        """Read one process. Returns None where it holds nothing or is gone; raises PermissionError."""
        holding = Holding(pid, 0)
        self._files(pid, holding)
        self._maps(pid, holding)
        if not (holding.fds or holding.maps or holding.shared):
            return None
        stat = procfs.stat(pid)
        if stat is None:
            return None
        holding.start_ticks = stat.start_ticks
        return holding

    def _files(self, pid: int, holding: Holding) -> None:
        """Count open files over all threads; threads that share one table of files are read once."""
        try:
            threads = os.listdir("/proc/%d/task" % pid)
        except (FileNotFoundError, ProcessLookupError):
            return
        read: List[int] = []
        seen: Set[Tuple[str, str]] = set()
        for name in threads:
            if read and any(_share_files(int(name), other) for other in read):
                continue
            if self._thread("/proc/%d/task/%s/fd/" % (pid, name), holding, seen):
                read.append(int(name))

    def _thread(self, folder: str, holding: Holding, seen: Set[Tuple[str, str]]) -> bool:
        """Read one thread's table. Returns whether it had any file: one that has exited shows none.

        `seen` keeps (number, target), so that a table read twice is counted once. Only files that could be
        devices are asked for their numbers: that blocks on a filesystem which no longer answers; reading the
        link does not.
        """
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, ProcessLookupError):
            return False
        for name in names:
            try:
                target = os.readlink(folder + name)
                if not target.startswith("/") or (name, target) in seen or not self._wanted(target):
                    continue  # socket:[..], pipe:[..], anon_inode:.. are no devices
                minors = self._table.gpus_of(os.stat(folder + name))
            except OSError:
                continue  # closed since it was listed
            if minors is not None:
                seen.add((name, target))
                _count(holding, holding.fds, minors)
        return bool(names)

    def _wanted(self, path: str) -> bool:
        return not self._hints or any(hint in path for hint in self._hints)

    def _maps(self, pid: int, holding: Holding) -> None:
        try:
            raw = _read_whole("/proc/%d/maps" % pid)
        except (FileNotFoundError, ProcessLookupError):
            return
        if not raw or (self._hints and not any(hint in raw for hint in self._hint_bytes)):
            return
        for line in _MAPPING.findall(raw):
            minors = self._mapping(line)
            if minors is not None:
                _count(holding, holding.maps, minors)

    def _mapping(self, line: bytes) -> Optional[Tuple[int, ...]]:
        if line not in self._mapped:
            number, inode, path = line.split(None, 2)
            text = os.fsdecode(path)
            if text.endswith(" (deleted)"):
                text = text[: -len(" (deleted)")]
            major, minor = (int(part, 16) for part in number.split(b":"))
            found = self._table.gpus_of_map((major, minor), int(inode), text) if self._wanted(text) else None
            self._mapped[line] = found
        return self._mapped[line]


def _read_whole(path: str) -> bytes:
    """Read a file of /proc to its end. Half the cost of a file object, and this is done for every process."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    parts: List[bytes] = []
    try:
        while True:
            part = os.read(fd, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        os.close(fd)


def _count(holding: Holding, counts: Dict[int, int], minors: Tuple[int, ...]) -> None:
    if not minors:
        holding.shared += 1
    for minor in minors:
        counts[minor] = counts.get(minor, 0) + 1


def _share_files(one: int, other: int) -> bool:
    """Ask the kernel whether two threads have one table of files. Says no where it cannot tell: both are
    read."""
    if NR_KCMP < 0:
        return False
    ctypes.set_errno(errno.ENOSYS)
    words = [ctypes.c_long(word) for word in (NR_KCMP, one, other, KCMP_FILES, 0, 0)]
    return int(_libc.syscall(*words)) == 0
