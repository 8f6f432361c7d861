"""The staging folder of a server, and what servers left behind that could not clear theirs."""

from __future__ import annotations

import json
import os
import shutil
import stat

from backend.extraction.serving import tree

ROOT = "/dev/shm/eightzeros"
MARK = ".server.json"
"""Names the process that a folder belongs to."""


class PlaceError(Exception):
    """The staging folder cannot be made; the text says why."""


def make(root: str, run: str) -> str:
    """Clear what dead servers left and make the folder of this one. Raises PlaceError."""
    try:
        os.makedirs(root, exist_ok=True)
        if os.stat(root).st_uid == os.geteuid():
            os.chmod(root, 0o1777)  # other users put their own folders beside ours
        clear_dead(root)
        folder = os.path.join(root, run)
        os.mkdir(folder, 0o700)
        me = tree.look(os.getpid())
        with open(os.path.join(folder, MARK), "w", encoding="ascii") as file:
            json.dump({"pid": os.getpid(), "start": me.start if me else 0, "boot": _boot()}, file)
    except OSError as error:
        raise PlaceError(f"the staging folder {root}/{run} cannot be made: {error.strerror}") from None
    return folder


def clear_dead(root: str) -> list[str]:
    """Remove the folders whose server no longer lives, of this user only; return their names."""
    removed = []
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        try:
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with open(os.path.join(folder, MARK), encoding="ascii") as file:
                record = json.load(file)
            alive = tree.look(int(record["pid"]))
            if record["boot"] == _boot() and alive is not None and alive.start == record["start"]:
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no folder of a server of ours: it is not ours to remove
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(name)
    return removed


def clear(folder: str) -> None:
    """Remove a server's own folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
