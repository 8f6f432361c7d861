"""Which processes are the agent's own, so that no reset takes a monitor of ours for a holder.

Each writes a file named by its pid and start; the kernel's record of both must agree with it, and the boot too.
"""

from __future__ import annotations

import os
from typing import Set, Tuple

from backend.agent import procfs
from backend.agent.paths import state_dir


def register(role: str) -> str:
    """Say that this process is ours (role: agent, driver, recorder, ...). Returns the file, for `forget`.

    On a full disk it is not said, and the path is empty: a console that cannot connect, or a reset that cannot run,
    would be worse. What holds no context is spared as a monitor anyway.
    """
    found = procfs.stat(os.getpid())
    path = os.path.join(state_dir("ours"), "%d.%d" % (os.getpid(), found.start_ticks if found else 0))
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write("%s %s\n" % (procfs.boot_id(), role))
    except OSError:
        forget(path)
        return ""
    return path


def forget(path: str) -> None:
    """Take the entry back at the end."""
    try:
        os.unlink(path)
    except OSError:
        pass


def role_lives(role: str) -> bool:
    """Say whether a process of ours in this role lives."""
    folder, living = state_dir("ours"), ours()
    return any(
        (procfs.read_bytes(os.path.join(folder, "%d.%d" % one)) or b"").decode("ascii", "replace").split()[1:] == [role]
        for one in living
    )


def ours() -> Set[Tuple[int, int]]:
    """Return (pid, start_ticks) of every process of ours that lives; entries of the dead are removed."""
    folder, boot, living = state_dir("ours"), procfs.boot_id(), set()
    for name in os.listdir(folder):
        pid, _, start = name.partition(".")
        path = os.path.join(folder, name)
        if not (pid.isdigit() and start.isdigit()):
            continue
        said = (procfs.read_bytes(path) or b"").decode("ascii", "replace").split(" ")[0]
        if said == boot and procfs.alive(int(pid), int(start)):
            living.add((int(pid), int(start)))
        elif said:  # an empty file is being written at this moment
            forget(path)
    return living
