"""Where the agent keeps things on the host, by the XDG rules, private to the user."""

from __future__ import annotations

import os
import stat
from typing import Dict

_chosen: Dict[str, str] = {}


def state_dir(name: str = "") -> str:
    """Return the folder for what must survive (runs, baselines, receipts), or the folder `name` in it."""
    path = os.path.join(_under("XDG_STATE_HOME", ".local/state"), name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def cache_dir() -> str:
    """Return the folder for what can be sent again: the unpacked archives."""
    return _under("XDG_CACHE_HOME", ".cache")


def homeless() -> str:
    """Say in words where state is kept instead where HOME cannot be written; empty where it can."""
    spare = [path for wanted, path in _chosen.items() if path != wanted]
    return "HOME cannot be written: runs and receipts are kept in %s" % spare[0] if spare else ""


def _under(variable: str, default: str) -> str:
    """Return our folder under an XDG base, or the spare one where it cannot be written (a read-only HOME)."""
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), default)
    path = os.path.join(base, "eightzeros")
    if path not in _chosen:
        _chosen[path] = path if _writable(path) else _spare()
    return _chosen[path]


def _spare() -> str:
    """Return a folder in /tmp that only we may write. Raises OSError where somebody else took its name."""
    base = "/tmp/eightzeros-%d" % os.geteuid()
    os.makedirs(base, mode=0o700, exist_ok=True)
    found = os.lstat(base)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError("%s is not a folder that only this user may write" % base)
    return os.path.join(base, "state")


def _writable(path: str) -> bool:
    """Make the folder and say whether it is ours to write."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)
