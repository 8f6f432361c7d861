"""Who descends from whom: one look at every process, taken at one time."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Optional, Set

from backend.agent import procfs


class Family:
    """Every process's parent, group and session, and the questions that a plan asks of them."""

    def __init__(self) -> None:
        self.stats: Dict[int, procfs.Stat] = {}
        self._children: Dict[int, List[int]] = {}
        for pid in procfs.pids():
            stat = procfs.stat(pid)
            if stat is not None:
                self.stats[pid] = stat
                self._children.setdefault(stat.ppid, []).append(pid)

    def is_(self, pid: int, start_ticks: int) -> bool:
        """Say whether the process that started then is the one under this pid."""
        stat = self.stats.get(pid)
        return stat is not None and stat.start_ticks == start_ticks

    def ancestors(self, pid: int) -> List[int]:
        """Return the parent, its parent and so on up to pid 1."""
        found: List[int] = []
        stat = self.stats.get(pid)
        while stat is not None and stat.ppid > 0 and stat.ppid not in found:
            found.append(stat.ppid)
            stat = self.stats.get(stat.ppid)
        return found

    def descendants(self, roots: Iterable[int], stop: Optional[Callable[[int], bool]] = None) -> Set[int]:
        """Return children, their children and so on, without the roots; nothing below a process that `stop`
        names."""
        found: Set[int] = set()
        waiting = list(roots)
        while waiting:
            for child in self._children.get(waiting.pop(), []):
                if child not in found:
                    found.add(child)
                    if stop is None or not stop(child):
                        waiting.append(child)
        return found

    def session(self, leader: int, since_ticks: int) -> Set[int]:
        """Return the members of a session, which outlives its leader. Its id is not reused while it has a
        member."""
        return {pid for pid, stat in self.stats.items() if stat.sid == leader and stat.start_ticks >= since_ticks}

    def depth(self, pid: int) -> int:
        """Return how many ancestors a process has: parents sort before their children."""
        return len(self.ancestors(pid))
