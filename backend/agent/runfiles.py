"""A run's folder: what stands in which file, and what of it may be written down.

spec.json   what was asked for, without values of the environment and with secrets in argv blanked
lock        held by the starter and then the supervisor; free and no run.json: it was never started
run.json    the run as it was started: identities of child and supervisor, host and boot
stop.json   somebody asked it to stop: {schema, at, grace_s}
exit.json   how it ended: {schema, code, at, maxrss_bytes, reason, leftovers, never_started}
log         standard output and error of the run
progress.json   written by the run itself (wire.Progress)
gates.json  what was found before the launch: {schema, at, forced, gates}
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from typing import Any, Dict, List, Optional, Tuple

from backend.agent import procfs
from backend.agent.files import sync_folder
from backend.wire import SCHEMA, RunSpec

SPEC, LOCK, RUN, STOP, EXIT, LOG, PROGRESS, GATES = (
    "spec.json", "lock", "run.json", "stop.json", "exit.json", "log", "progress.json", "gates.json",
)  # fmt: skip
RESERVE = ".exit.reserve"
RESERVE_BYTES = 4096
"""Disk space taken at the start, so that the exit status can be written when the disk is full by then."""

HIDDEN = "***"
_SECRET_NAME = (
    r"(?:[A-Za-z0-9]+[-_.])*"
    r"(?:token|key|apikey|secret|password|passwd|passphrase|credentials?|authorization|auth)"
)
_SECRET_FLAG = re.compile(r"--?" + _SECRET_NAME + r"\Z", re.IGNORECASE)
_SECRET_SET = re.compile(
    r"(?<![A-Za-z0-9])(" + _SECRET_NAME + r"\s*[=:]\s*)((?:Bearer\s+|Basic\s+)?[^\s;&|]+)", re.IGNORECASE
)
_SECRET_LOOK = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}"
    r"|(?<=[Bb]earer )\S+|(?<=://)[^/\s@]+:[^/\s@]+(?=@)"
)


def redact(argv: List[str]) -> List[str]:
    """Return the command line with what looks like a secret blanked: `--api-key X`, `HF_TOKEN=X`, `hf_...`.

    A name counts by its last word, so that `--max-tokens` and `--tokenizer-path` keep their values.
    """
    shown, hide = [], False
    for word in argv:
        if hide and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(_SECRET_LOOK.sub(HIDDEN, _SECRET_SET.sub(r"\1" + HIDDEN, word)))
        hide = _SECRET_FLAG.match(word) is not None
    return shown


def stored_spec(spec: RunSpec) -> Dict[str, Any]:
    """Return what may be kept of a spec: the names of the environment, never its values."""
    kept = dict(vars(spec), argv=redact(spec.argv), env_names=sorted(spec.env), schema=SCHEMA)
    del kept["env"]
    return dict(kept, host=socket.gethostname(), at=time.time())


def pid_namespace() -> str:
    """Name the pid namespace: a container that was restarted has another one under the same boot id."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def take_lock(folder: str) -> int:
    """Make and hold the run's lock, and return the descriptor, which may be passed on.

    Raises BlockingIOError where somebody else holds it, another OSError where files cannot be locked.
    """
    fd = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def locked(folder: str) -> bool:
    """Say whether somebody still holds the run's lock."""
    try:
        fd = os.open(os.path.join(folder, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look are not each other's holder
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def reserve_exit(folder: str) -> None:
    """Take the disk space of the exit record now."""
    fd = os.open(os.path.join(folder, RESERVE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
    finally:
        os.close(fd)


def write_exit(folder: str, record: Dict[str, Any]) -> None:
    """Write exit.json over the reserved space, padded to its size, and rename it into place."""
    text = json.dumps(record).encode("ascii")
    path = os.path.join(folder, RESERVE)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, text.ljust(RESERVE_BYTES - 1) + b"\n", 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(path, os.path.join(folder, EXIT))
    sync_folder(folder)


def oom_kills() -> Tuple[str, Optional[int]]:
    """Return (where, count) of kills by the out-of-memory killer: of our memory cgroup, else of the host."""
    for line in (procfs.read_bytes("/proc/self/cgroup") or b"").decode("utf-8", "replace").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            count = _counter("/sys/fs/cgroup%s/memory.events" % path)
        elif "memory" in controllers.split(","):
            count = _counter("/sys/fs/cgroup/memory%s/memory.oom_control" % path)
        else:
            continue
        if count is not None:
            return "memory cgroup %s" % path, count
    return "host", _counter("/proc/vmstat")


def _counter(path: str) -> Optional[int]:
    for line in (procfs.read_bytes(path) or b"").split(b"\n"):
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def oom_evidence(record: Dict[str, Any]) -> str:
    """Say that the out-of-memory killer struck since `record` (a run.json) was made; empty if not."""
    where, count = oom_kills()
    before = record.get("oom_kills")
    if count is None or not isinstance(before, int) or record.get("oom_where") != where or count <= before:
        return ""
    return "the out-of-memory killer struck %d times since the start (%s)" % (count - before, where)
