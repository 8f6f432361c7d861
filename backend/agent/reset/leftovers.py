"""What processes that are gone left on the host: segments of shared memory, and whoever still has a server's port.

A segment is left over where nothing has it open or mapped. The kernel is asked for that, not /proc, which hides other
users' processes and knows nothing of files that are on their way between two: it grants a write lease on a file
(fcntl(2), F_SETLEASE) only to the one that alone has it open. The lease is held while the name is removed, so that
nobody can open the segment in between. A lease can be asked for one's own files only, or by root.

Other users' segments are told and never removed, whoever asks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import contextmanager
from typing import Iterable, Iterator, List, NamedTuple, Optional, Tuple

from backend.agent import procfs
from backend.agent.listeners import owner
from backend.wire import Leftover, Leftovers, Process, Run

KINDS: Tuple[Tuple[str, str], ...] = (
    ("NCCL", r"nccl-\w+"),
    ("PyTorch", r"torch_(?P<pid>\d+)_.+"),
    ("SGLang", r"sgl(?:ang)?_shm_.+"),
    ("vLLM", r"vllm_offload_.+"),
    ("CUDA", r"cuda\.shm\.\w+\.(?P<pid>[0-9a-f]+)\.\w+"),
    ("OpenMP", r"__KMP_REGISTERED_LIB_(?P<pid>\d+)(?:_\d+)?"),
    ("Python multiprocessing", r"(?:psm_|wnsm_)\w+|pym-(?P<pid>\d+)-.+"),
    ("joblib", r"sem\.loky-(?P<pid>\d+)-.+"),
    ("semaphore", r"sem\..+"),
)
"""Who names segments how (facts: reset, section 9 and threads 23 to 28); `pid` is the maker's where the name has it."""

_NAMES = [(kind, re.compile(pattern + r"\Z")) for kind, pattern in KINDS]

YOUNGEST_S = 60.0
"""A younger one may be between its making and its first use."""

IN_USE = "open or mapped somewhere"
_PORT = re.compile(r"--port[ =](\d{1,5})\b")


class Found(NamedTuple):
    """What was left behind, the largest first, and how many segments of these kinds are in use."""

    segments: List[Leftover]
    in_use: int


def find(folder: str) -> Found:
    """List the segments in a folder such as /dev/shm that nothing uses any more."""
    segments, in_use = [], 0
    try:
        with os.scandir(folder) as rows:
            entries = list(rows)
    except OSError:
        return Found([], 0)
    for entry in entries:
        found = _look(entry)
        if found is None:
            continue
        if found.problem == IN_USE:
            in_use += 1
        else:
            segments.append(found)
    return Found(sorted(segments, key=lambda one: (-one.bytes, one.path)), in_use)


def _look(entry: "os.DirEntry[str]") -> Optional[Leftover]:
    """Look at one file; None where it is no segment that could be left over."""
    named = next(((kind, found) for kind, name in _NAMES for found in [name.match(entry.name)] if found), None)
    try:
        st = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    age_s = time.time() - max(st.st_mtime, st.st_ctime)
    if named is None or not stat.S_ISREG(st.st_mode) or age_s < YOUNGEST_S:
        return None
    kind, match = named
    maker = _maker(kind, match.groupdict().get("pid"))
    mine = st.st_uid == os.geteuid()
    said = Leftover(
        entry.path, kind, st.st_blocks * 512, procfs.user_name(st.st_uid), round(age_s, 1), mine,
        "nothing has it open or mapped" + (", and process %d, its maker, is gone" % maker if maker else ""),
    )  # fmt: skip
    if maker and procfs.stat(maker) is not None:
        said.problem = IN_USE
        return said
    try:
        with _alone(entry.path, st):
            pass
    except BlockingIOError:
        said.problem = IN_USE
    except FileNotFoundError:
        return None
    except OSError as error:
        said.why = "whether anything has it open cannot be asked: %s" % error.strerror
        said.problem = "another user's" if not mine else str(error.strerror)
    return said


def _maker(kind: str, text: Optional[str]) -> int:
    return int(text, 16 if kind == "CUDA" else 10) if text else 0


@contextmanager
def _alone(path: str, st: os.stat_result) -> Iterator[None]:
    """Be the only one that has a file open. Raises BlockingIOError where it is not so, OSError where none can say."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not os.path.samestat(st, os.fstat(fd)):
            raise FileNotFoundError(errno.ENOENT, "another file took its name")
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)


def remove(folder: str) -> Found:
    """Remove this user's segments that nothing uses, and return what was found with what became of it."""
    found = find(folder)
    for one in found.segments:
        if not one.mine:
            one.problem = "another user's: not removed"
        elif not one.problem:
            _remove(one)
    return found


def _remove(one: Leftover) -> None:
    try:
        st = os.lstat(one.path)
        if st.st_uid != os.geteuid() or not stat.S_ISREG(st.st_mode):
            raise FileNotFoundError(errno.ENOENT, "another file took its name")
        with _alone(one.path, st):
            os.unlink(one.path)
        one.removed = True
    except OSError as error:
        one.problem = IN_USE if isinstance(error, BlockingIOError) else str(error.strerror)


def of_host(host_root: str, runs: Iterable[Run], victims: Iterable[Process], clear: bool = False) -> Leftovers:
    """Return what was left behind on a host; with `clear` this user's segments are removed.

    The ports asked about are those that this host's runs were started with, and whom a reset ended.
    """
    folder = os.path.join(host_root, "dev/shm")
    segments, in_use = remove(folder) if clear else find(folder)
    lines = [" ".join(run.argv) for run in runs] + [one.command for one in victims]
    numbers = {int(text) for line in lines for text in _PORT.findall(line)}
    told = ((number, owner(number)) for number in sorted(numbers) if 0 < number < 65536)
    return Leftovers(segments, in_use, ["port %d is still taken, by %s" % row for row in told if row[1]])
