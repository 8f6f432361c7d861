"""Who the processes on the driver's lists are: user, command and age, from /proc."""

from __future__ import annotations

import time
from typing import Dict, Iterable, List, Tuple

from backend.agent import procfs
from backend.wire import Holder, Reading

CHECK_TICKS = 5


class Owners:
    """Names processes, and remembers the names by (pid, start): a pid that is reused is another process.

    /proc is looked at when a pid is new, then at every CHECK_TICKS-th call of `tick`, a part of the pids each time:
    a process that ends while the driver goes on naming it is told so within that many seconds.
    """

    def __init__(self) -> None:
        self._known: Dict[int, Tuple[int, str, str]] = {}
        self._ticks = 0
        self._boot_s = 0.0

    def tick(self) -> None:
        """Begin a round of `holders`."""
        self._ticks += 1
        self._boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    def holders(self, processes: Iterable[Tuple[int, Reading, str]]) -> List[Holder]:
        """Describe (pid, bytes, kind) entries; a pid that /proc does not have is listed as not alive."""
        return [self._holder(pid, used_bytes, kind) for pid, used_bytes, kind in processes]

    def forget_others(self, pids: Iterable[int]) -> None:
        """Forget every process but these."""
        keep = set(pids)
        if len(keep) < len(self._known):
            self._known = {pid: known for pid, known in self._known.items() if pid in keep}

    def _holder(self, pid: int, used_bytes: Reading, kind: str) -> Holder:
        known = self._known.get(pid)
        if known is None or (self._ticks + pid) % CHECK_TICKS == 0:
            found = procfs.stat(pid)
            if found is None or found.dead:
                self._known.pop(pid, None)
                return Holder(pid, used_bytes=used_bytes, kind=kind, alive=False)
            if known is None or known[0] != found.start_ticks:
                user = procfs.user_name(procfs.uid(pid))
                known = self._known[pid] = (found.start_ticks, user, procfs.command(pid))
        age_s = max(0.0, self._boot_s - known[0] / procfs.CLOCK_TICKS)
        return Holder(pid, known[1], known[2], round(age_s, 1), used_bytes, kind)
