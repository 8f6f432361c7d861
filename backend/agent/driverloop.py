"""The child's side: open the driver, answer requests in order, leave when the agent does."""

from __future__ import annotations

import fcntl
import marshal
import os
import pickle
import signal
import struct
import threading
import time
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from backend.agent import ours
from backend.agent.seam import ContextList, Driver, DriverError
from backend.wire import Reading

OPEN = -1
"""The GPU of an answer that is about the driver and not about one GPU."""

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


UNASKED = ("opening", "listening", "xid")
"""Kinds that answer no request: which GPU is touched at the moment, whether XIDs are told from now on (else why not),
and an XID."""

_writing = threading.Lock()
"""Held for each answer, since the thread that listens writes to the same pipe."""


class Answer(NamedTuple):
    """One answer: `value` is what the Driver's method returned, or None with `problem` in words.

    `at` is when it was read, on the monotonic clock that all processes share; `cpu_s` what this child used so far.
    """

    kind: str
    gpu: int
    value: Any
    problem: str
    at: float
    cpu_s: float


def main(make_driver: Callable[[], Driver], skip: FrozenSet[int], requests: int, answers: int, parent: int) -> None:
    """Run the child until its requests end. Never returns."""
    path = ""
    try:
        _reset_signals()
        requests, answers = _close_others(requests, answers)
        die_with(parent)
        path = ours.register("driver")
        _serve(make_driver, skip, requests, answers)
    finally:
        if path:
            ours.forget(path)
        os._exit(0)


def _serve(make_driver: Callable[[], Driver], skip: FrozenSet[int], requests: int, answers: int) -> None:
    driver = make_driver()
    driver.skip = skip
    driver.opening = lambda index: _write(answers, Answer("opening", index, None, "", time.monotonic(), 0.0))
    with os.fdopen(requests, "rb", buffering=1 << 16) as lines:
        for line in lines:
            kind, *indices = line.decode("ascii").split()
            if kind == "listen":
                threading.Thread(target=_listen, args=(driver, answers), daemon=True).start()
                continue
            for index in map(int, indices):
                _write(answers, _answer(driver, kind, index))


def _listen(driver: Driver, answers: int) -> None:
    """Pass on the driver's XIDs. Whatever happens here, the readings go on."""

    def tell(kind: str, index: int, value: Optional[int], problem: str) -> None:
        _write(answers, Answer(kind, index, value, problem, time.monotonic(), time.process_time()))

    try:
        driver.listen(
            lambda why: tell("listening", OPEN, None, why), lambda index, number: tell("xid", index, number, "")
        )
    except OSError:
        return  # nobody reads any more
    except Exception as error:
        tell("listening", OPEN, None, "listening failed: %s: %s" % (type(error).__name__, error))


def _answer(driver: Driver, kind: str, index: int) -> Answer:
    value, problem = None, ""
    try:
        value = driver.open() if kind == "open" else getattr(driver, kind)(index)
    except DriverError as error:
        problem = str(error)
    except Exception as error:  # a fault of ours must not look like a hang of the GPU
        problem = "reading failed: %s: %s" % (type(error).__name__, error)
    return Answer(kind, index, value, problem, time.monotonic(), time.process_time())


def _write(fd: int, answer: Answer) -> None:
    frame = marshal.dumps((*answer[:2], _packed(answer.kind, answer.value), *answer[3:]))
    data = _LENGTH.pack(len(frame)) + frame
    with _writing:
        while data:
            data = data[os.write(fd, data) :]


def frames(data: bytes) -> Tuple[List[Answer], bytes]:
    """Read the answers that are whole, and return the rest of the bytes."""
    found, at = [], 0
    while len(data) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + length
        if end > len(data):
            break
        kind, gpu, value, problem, read_at, cpu_s = marshal.loads(memoryview(data)[at + _LENGTH.size : end])
        found.append(Answer(kind, gpu, _unpacked(kind, value), problem, read_at, cpu_s))
        at = end
    return found, data[at:]


def _packed(kind: str, value: Any) -> Any:
    """Turn a driver's answer into plain tuples: a third of the cost of pickling records at every tick."""
    if value is None:
        return None
    if kind == "open":
        return pickle.dumps(value, protocol=4)
    if kind in ("slow", "health"):
        return _plain(value)
    if kind in UNASKED:
        return value
    reading, contexts = value
    listed = [(pid, tuple(used_bytes), what) for pid, used_bytes, what in contexts.processes]
    return (_plain(reading) if kind == "lean" else tuple(reading)), listed, contexts.problem


def _unpacked(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "open":
        return pickle.loads(value)
    if kind in ("slow", "health"):
        return _readings(value)
    if kind in UNASKED:
        return value
    readings, listed, problem = value
    contexts = ContextList([(pid, Reading(*used_bytes), what) for pid, used_bytes, what in listed], problem)
    return (_readings(readings) if kind == "lean" else Reading(*readings)), contexts


def _plain(readings: Dict[str, Reading]) -> Dict[str, Tuple[Any, ...]]:
    return {name: tuple(reading) for name, reading in readings.items()}


def _readings(plain: Dict[str, Tuple[Any, ...]]) -> Dict[str, Reading]:
    return {name: Reading(*reading) for name, reading in plain.items()}


def _reset_signals() -> None:
    """Undo the agent's handlers. An interrupt at the keyboard is for the console, so it is ignored here."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_others(requests: int, answers: int) -> Tuple[int, int]:
    """Keep two pipes and nothing else: a child that hangs must not hold the agent's channel or lock files open."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (requests, answers):
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself
    requests = fcntl.fcntl(requests, fcntl.F_DUPFD, 3)  # above 2, should the agent have had those closed
    answers = fcntl.fcntl(answers, fcntl.F_DUPFD, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return requests, answers


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the agent dies, whatever this process waits for then."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return  # the end of the requests remains
    if os.getppid() != parent:
        os._exit(0)
