"""What logind does to detached runs when the operator's last session ends, and whether it would do it here.

Two settings undo `setsid`: RemoveIPC (on by default upstream) deletes the user's shared memory, which ends
programs of PyTorch hours later with a missing file; KillUserProcesses kills the session's processes outright.
The first spares a user with lingering, root and system users; lingering alone does not save a run from the
second, since it is not a user service (facts: transport, section 3.3).
"""

from __future__ import annotations

import os
import subprocess
from typing import Callable, Dict, Optional

from backend.agent import procfs
from backend.wire import Gate

NAME = "logind leaves runs alone"
LAST_SYSTEM_UID = 999
RUNNING = ("run/systemd/system", "run/systemd/seats")
"""The first says that systemd booted the host, the second that its logind runs."""

CONFIG = ("usr/lib/systemd/logind.conf", "etc/systemd/logind.conf")
DROP_INS = ("usr/lib/systemd/logind.conf.d", "run/systemd/logind.conf.d", "etc/systemd/logind.conf.d")
UPSTREAM = {"RemoveIPC": "yes", "KillUserProcesses": "no"}
"""What holds where nothing is configured, as the large distributions build it."""


def check(
    root: str = "/", uid: Optional[int] = None, ask: Optional[Callable[[], Dict[str, str]]] = None
) -> Optional[Gate]:
    """Return the gate, or None where no logind runs. `root` is where /etc and /run are looked for."""
    if not all(os.path.isdir(os.path.join(root, path)) for path in RUNNING):
        return None
    uid = os.getuid() if uid is None else uid
    user = procfs.user_name(uid)
    settings = dict(UPSTREAM, **_configured(root))
    settings.update((ask or _manager)())
    kills = settings["KillUserProcesses"] == "yes" and uid != 0
    removes = settings["RemoveIPC"] == "yes" and uid > LAST_SYSTEM_UID
    lingers = os.path.exists(os.path.join(root, "var/lib/systemd/linger", user))
    if kills:
        return Gate(
            NAME, False, "KillUserProcesses=yes: %s's runs are killed when the last session ends" % user,
            "set KillUserProcesses=no or KillExcludeUsers=%s in /etc/systemd/logind.conf (root), then "
            "systemctl restart systemd-logind" % user,
        )  # fmt: skip
    if removes and not lingers:
        return Gate(
            NAME, False,
            "RemoveIPC=yes, no lingering: %s's files in /dev/shm go when the last session ends" % user,
            "loginctl enable-linger %s" % user,
        )  # fmt: skip
    why = "root is spared" if uid == 0 else "%s lingers" % user if removes else "RemoveIPC does not apply"
    return Gate(NAME, True, why)


def _configured(root: str) -> Dict[str, str]:
    """Read logind's files in the order in which later ones win."""
    paths = [os.path.join(root, path) for path in CONFIG]
    for folder in DROP_INS:
        try:
            names = sorted(os.listdir(os.path.join(root, folder)))
        except OSError:
            continue
        paths += [os.path.join(root, folder, name) for name in names if name.endswith(".conf")]
    found = {}
    for path in paths:
        for line in (procfs.read_bytes(path) or b"").decode("utf-8", "replace").split("\n"):
            name, sign, value = (part.strip() for part in line.partition("="))
            if sign and name in UPSTREAM and value:
                found[name] = "yes" if value.lower() in ("yes", "true", "1", "on") else "no"
    return found


def _manager() -> Dict[str, str]:
    """Ask the running logind for what it really goes by; empty where it does not answer."""
    command = ["busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
               "org.freedesktop.login1.Manager", *UPSTREAM]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5.0
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    answers = done.stdout.decode("ascii", "replace").split("\n")
    values = {"b true": "yes", "b false": "no"}
    return {name: values[answer] for name, answer in zip(UPSTREAM, answers) if answer in values}
