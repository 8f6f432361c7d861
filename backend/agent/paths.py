"""Where the agent keeps things on the host, by the XDG rules, private to the user."""

from __future__ import annotations

import os


def _under(variable: str, default: str) -> str:
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), default)
    path = os.path.join(base, "eightzeros")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def state_dir(name: str = "") -> str:
    """Return the folder for what must survive (runs, baselines, receipts), or the folder `name` in it."""
    path = os.path.join(_under("XDG_STATE_HOME", ".local/state"), name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def cache_dir() -> str:
    """Return the folder for what can be sent again: the unpacked archives."""
    return _under("XDG_CACHE_HOME", ".cache")
