"""Processes that hold virtual GPUs, as a server with ranks does: started for real, gone only when ended.

    python -m backend.virtual.holder --root DIR --gpus 0-7 --per-gpu --title 'sglang::scheduler_TP{rank}'

Device memory is declared and never allocated. Each process tells of itself in `cast/PID.json`, once it
holds what it should. With `--lifeline FD` it also ends when that pipe does, so that nothing is left behind
by whoever started it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import select
import signal
import sys
import time
from typing import Any, List, Optional, Set

from backend.agent import procfs
from backend.agent.files import write_json
from backend.agent.progress import write_progress
from backend.agent.runtree import RUN_DIR_ENV
from backend.virtual.claims import DEVICE_BYTES, Claim, device_path, take
from backend.wire import GIB, Progress

PR_SET_NAME = 15
CLIENT_FILES, CONTEXT_FILES, CONTEXT_MAPS = 3, 17, 3
"""How often an NVML client, and a process with a CUDA context, has a GPU's device open: 3 times, and 20 times with 3
mappings (read on an H200). Python keeps one file more open for each mapping."""

ARG_START, ARG_END = 45, 46
"""Where /proc/self/stat gives the bounds of the command line, counted after the name in parentheses."""


def main(argv: List[str]) -> int:
    """Hold GPUs until ended. Returns when the ranks are gone, where there are ranks."""
    options = _parser().parse_args(argv)
    gpus = numbers(options.gpus)
    options.heir_ranks, options.deaf_ranks = numbers(options.heir), numbers(options.ignore_term)
    options.orphan_ranks, options.told = numbers(options.orphan), -1
    if not options.per_gpu:
        if 0 in options.orphan_ranks:
            _orphan()
        return _hold(options, 0, gpus)
    held, options.told = os.pipe()
    ranks = [_fork(options, rank, gpu) for rank, gpu in enumerate(gpus)]
    os.close(options.told)
    if options.parent_title:
        set_title(options.parent_title)
    left = _passing_on(ranks)
    _announce(options, "parent", -1, [])
    _ready(held, left)
    while left:
        left.discard(os.wait()[0])
    return 0


def _ready(held: int, left: Set[int]) -> None:
    """As a run, say that the server is up, once every rank holds its GPU; on a full disk, once there is room."""
    run_dir, seen, ranks = os.environ.get(RUN_DIR_ENV, ""), 0, len(left)
    while run_dir and seen < ranks:
        said = os.read(held, ranks)
        if not said:
            return  # some rank ended before it held anything
        seen += len(said)
    words = "%d ranks hold a GPU each" % ranks
    while run_dir and left and write_progress(run_dir, Progress(time.time(), "ready", message=words)):
        time.sleep(0.2)
        left.discard(os.waitpid(-1, os.WNOHANG)[0])


def numbers(text: str) -> List[int]:
    """Read `0-3,6` as numbers; an empty text is none."""
    found: List[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def set_title(title: str) -> None:
    """Rename this process as setproctitle does: the kernel's name, and the command line that /proc
    shows.
    """
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode("utf-8")[:15], 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    raw = title.encode("utf-8")[: end - start - 1]
    ctypes.memmove(start, raw.ljust(end - start, b"\0"), end - start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holder", description="Hold virtual GPUs.")
    parser.add_argument("--root", required=True, help="folder of the virtual host")
    parser.add_argument("--gpus", default="", help="which GPUs, such as 0-7; none by default")
    parser.add_argument("--per-gpu", action="store_true", help="a process (rank) for each GPU, under one parent")
    parser.add_argument("--monitor", action="store_true", help="open the device files and claim nothing")
    parser.add_argument("--gib", default="80", help="device memory for each GPU, or a span such as 60-110")
    parser.add_argument("--pinned-gib", type=float, default=0.0, help="pinned host memory to declare for each GPU")
    parser.add_argument("--load", type=float, default=0.0, help="how busy to keep each GPU, from 0 to 1")
    parser.add_argument("--period-s", type=float, default=20.0, help="over how long the load sways")
    parser.add_argument("--release-ms", default="80-250", help="how long the memory takes to go, or a span")
    parser.add_argument("--ignore-term", default="", metavar="RANKS", help="ranks that ignore SIGTERM")
    parser.add_argument("--orphan", default="", metavar="RANKS", help="ranks that leave parent and session")
    parser.add_argument("--heir", default="", metavar="RANKS", help="ranks whose forked child shares what they hold")
    parser.add_argument("--title", default="", help="rename each rank; {rank} stands for its number")
    parser.add_argument("--parent-title", default="", help="rename the parent of the ranks")
    parser.add_argument("--role", default="serving", help="what the cast calls it")
    parser.add_argument("--lifeline", type=int, default=-1, metavar="FD", help="end when this pipe ends")
    return parser


def _fork(options: argparse.Namespace, rank: int, gpu: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    if rank in options.orphan_ranks:
        _orphan()
    try:
        os._exit(_hold(options, rank, [gpu]))
    finally:
        os._exit(1)


def _orphan() -> None:
    """Leave session and parent: fork twice, so that init (or the nearest subreaper) becomes the parent."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def _hold(options: argparse.Namespace, rank: int, gpus: List[int]) -> int:
    if rank in options.deaf_ranks:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.title:
        set_title(options.title.format(rank=rank))
    kept = [_open(options.root, "nvidiactl")] if gpus else []  # type: List[Any]
    for gpu in gpus:
        name = "nvidia%d" % gpu
        if options.monitor:
            kept += [_open(options.root, name) for _ in range(CLIENT_FILES)]
            continue
        kept += [_open(options.root, name) for _ in range(CONTEXT_FILES)]
        kept += [mmap.mmap(kept[-1], DEVICE_BYTES) for _ in range(CONTEXT_MAPS)]
        kept.append(take(options.root, _claim(options, gpu)))
    role = options.role
    if rank in options.heir_ranks and os.fork() == 0:
        role = "heir"
    _announce(options, role, rank, gpus)
    if options.told >= 0:
        os.write(options.told, b"h")
        os.close(options.told)
    _wait(options.lifeline)
    return 0


def _open(root: str, name: str) -> int:
    return os.open(device_path(root, name), os.O_RDWR | os.O_CLOEXEC)


def _claim(options: argparse.Namespace, gpu: int) -> Claim:
    return Claim(
        gpu=gpu,
        pid=os.getpid(),
        used_bytes=int(_within(options.gib, gpu) * GIB),
        pinned_bytes=int(options.pinned_gib * GIB),
        load=options.load,
        period_s=options.period_s,
        release_ms=int(_within(options.release_ms, gpu)),
    )


def _within(span: str, gpu: int) -> float:
    """Choose a value of a span, `60-110`, for a GPU: always the same, and different on neighbours."""
    low, _, high = span.partition("-")
    return float(low) + (float(high or low) - float(low)) * (gpu * 37 % 64) / 63.0


def _announce(options: argparse.Namespace, role: str, rank: int, gpus: List[int]) -> None:
    me = procfs.stat(os.getpid())
    record: Any = {
        "role": role,
        "rank": rank,
        "gpus": gpus,
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else 0,
        "ppid": os.getppid(),
        "command": procfs.command(os.getpid()),
    }
    write_json(os.path.join(options.root, "cast", "%d.json" % os.getpid()), record)


def _wait(lifeline: int) -> None:
    """Wait for a signal that ends the process, or for the end of the pipe."""
    select.select([lifeline] if lifeline >= 0 else [], [], [])


def _passing_on(ranks: List[int]) -> Set[int]:
    """Pass SIGTERM on to the ranks that are still our children: those of the set that is returned."""
    left = set(ranks)

    def stop(number: int, frame: Optional[Any]) -> None:
        for pid in left:
            os.kill(pid, number)  # ours and not yet reaped: the pid cannot be another's

    signal.signal(signal.SIGTERM, stop)
    return left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
