"""Who uses a folder now, and what refers to it: runs, processes with its files open, records and links beside it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from typing import Any, Dict, Iterator, List, Set, Tuple

from backend.agent import procfs
from backend.agent.retire.place import Place
from backend.agent.retire.tree import Tree
from backend.agent.runs import RunStore
from backend.shardfmt import layout
from backend.wire import RUN_LIVE, Run

Found = Tuple[str, str]
"""A kind and a text."""

MOST_LOOKED_AT = 2000
HEAD_BYTES = 256 * 1024


def inside(path: str, folder: str) -> bool:
    """Say whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder + "/")


def touches(run: Run, folder: str) -> bool:
    """Say whether a run names a folder, something in it, or reads or writes the folder around it."""
    words = [run.out_dir, *(part for word in run.argv for part in (word, word.partition("=")[2]))]
    named = [os.path.realpath(os.path.expanduser(word)) for word in words if word.startswith(("/", "~"))]
    return any(inside(word, folder) for word in named) or inside(folder, os.path.realpath(run.out_dir or "/dev/null"))


def runs(store: RunStore, folder: str, own: str) -> Tuple[List[Found], List[Found]]:
    """Return (live, ended) runs that name a folder, without the run that deletes it."""
    live: List[Found] = []
    ended: List[Found] = []
    for run in store.list():
        if run.id == own or run.stage == "retire" or not touches(run, folder):
            continue
        text = "%s (%s) is %s" % (run.id, run.label or run.stage, run.state)
        (live if run.state in RUN_LIVE else ended).append(("run", text))
    return live, ended


def lock_held(place: Place) -> str:
    """Say who writes into the folder by the extraction's own lock; empty where nobody does."""
    try:
        fd = os.open(layout.LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place.fd)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return "an extraction (pid %s) writes there" % (os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?")
    finally:
        os.close(fd)
    return ""


def users(tree: Tree, folder: str) -> Tuple[List[Found], int]:
    """Return the processes that have something of a folder open, mapped or as their own folder, and how many could not
    be looked into.

    A path in another mount namespace reads otherwise, so an open file of the same name is told by its inode too.
    """
    names, inodes = tree.names, tree.inodes
    found: List[Found] = []
    hidden = 0
    for pid in procfs.pids():
        if pid == os.getpid():
            continue
        try:
            used = next(_used(pid, folder, names, inodes), "")
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            continue  # it has ended
        if used:
            found.append(("process", "pid %d (%s) uses %s" % (pid, procfs.command(pid, 60), used)))
    return found, hidden


def _used(pid: int, folder: str, names: Set[str], inodes: Set[int]) -> Iterator[str]:
    base = "/proc/%d/" % pid
    links = [base + "cwd", base + "root", *(base + "fd/" + number for number in os.listdir(base + "fd"))]
    for link in links:
        try:
            path = os.readlink(link)
        except FileNotFoundError:
            continue
        name = path.rsplit("/", 1)[-1]
        if inside(path, folder) or (name in names and path.startswith("/") and os.stat(link).st_ino in inodes):
            yield path
    for line in (procfs.read_bytes(base + "maps", 16 << 20) or b"").decode("utf-8", "surrogateescape").split("\n"):
        parts = line.split(None, 5)
        if len(parts) == 6 and (inside(parts[5], folder) or _mapped(parts, names, inodes)):
            yield parts[5]


def _mapped(parts: List[str], names: Set[str], inodes: Set[int]) -> bool:
    return parts[5].rsplit("/", 1)[-1] in names and int(parts[4]) in inodes


def records(place: Place) -> List[Found]:
    """Say what the folder says of itself."""
    found: List[Found] = []
    config = _json(_head(place.fd, layout.CONFIG_NAME))
    if config:
        parts = ["%s %s" % (key, config[key]) for key in ("state", "model", "samples", "tokens") if key in config]
        found.append(("data_config", "%s: %s" % (layout.CONFIG_NAME, ", ".join(parts) or "no state or counts")))
    journal = _json(_head(place.fd, layout.JOURNAL_NAME).split(b"\n", 1)[0])
    if journal:
        corpus = journal.get("corpus")
        words = str(corpus.get("path", "?")) if isinstance(corpus, dict) else str(corpus or "?")
        found.append(("journal", "%s: an extraction of %s can be resumed from it" % (layout.JOURNAL_NAME, words)))
    return found


def referring(place: Place) -> List[Found]:
    """Return what lies beside the folder, up to two levels below the root, and names it: records, and links into it."""
    found: List[Found] = []
    root_fd = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _look(place, root_fd, "", found, [MOST_LOOKED_AT])
    finally:
        os.close(root_fd)
    return found


def _look(place: Place, fd: int, prefix: str, found: List[Found], left: List[int]) -> None:
    for name in sorted(os.listdir(fd)):
        path = os.path.join(place.root, prefix + name)
        left[0] -= 1
        if left[0] < 0 or inside(path, place.target):
            continue
        try:
            kind = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if stat.S_ISLNK(kind):
                if inside(os.path.realpath(path), place.target):
                    found.append(("link", "%s leads into it" % path))
            elif stat.S_ISREG(kind) and name.endswith((".json", ".jsonl")):
                if json.dumps(place.path)[1:-1].encode("ascii") in _head(fd, name):
                    found.append(("record", "%s names it" % path))
            elif stat.S_ISDIR(kind) and prefix.count("/") < 2 and not layout.is_rows_folder(name):
                below = place.enter(fd, name)
                try:
                    _look(place, below, prefix + name + "/", found, left)
                finally:
                    os.close(below)
        except Exception:  # what cannot be read beside it refers to nothing that could be shown
            continue


def _head(fd: int, name: str) -> bytes:
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return b""
    try:
        return os.pread(opened, HEAD_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(opened)


def _json(data: bytes) -> Dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
