"""The small process that holds one detached run: starts it, waits for it, records how it ended.

It is started by `RunStore` with the run's folder as its argument, the run's lock as an open descriptor, and
the order as JSON on stdin (the only way that values of the environment and secrets in argv take). It answers
one line on stdout once the run has started or could not be, and then belongs to nobody.

A child waits behind a gate until run.json is on disk, so that no process of a run is ever without a record.

The log is a plain file that the run writes to by itself: nothing blocks when nobody reads it, and it grows as
long as the run writes. On a full disk the run's own writes fail, which it must handle; the exit status is
recorded all the same, because its space was taken at the start.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, NoReturn, Optional, Set

from backend.agent import ours, procfs, runfiles
from backend.agent.files import read_json, write_json
from backend.agent.runtree import RUN_DIR_ENV, RUN_ENV, Ending, Identity, members
from backend.wire import SCHEMA, Run, from_dict

PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = 1.0
"""How long the rest of a run may take to end after its main process, before it is reported as left over."""

RECORD_FOR_S = 600.0
"""How long writing exit.json is tried again when the disk refuses even the reserved space."""


def supervise(run_dir: str) -> int:
    """Hold the run of this folder. Returns 0 once its end is recorded, 1 where it could not be started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, no exit status would ever be seen
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.read() or b"null")
    if not isinstance(order, dict):
        sys.stderr.write("eightzeros supervisor: no order on stdin; runs are started through the agent\n")
        return 2
    if os.fork():
        os._exit(0)  # the starter's child ends here: nobody has to reap the supervisor
    os.setsid()
    os.chdir("/")  # keeps no filesystem busy
    if not order.get("spec", {}).get("starts_runs"):  # else every run that it starts would become ours to end
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mark = ours.register("supervisor")
    try:
        return _end_orphan(run_dir) if order.get("end") else Supervisor(run_dir, order).hold()
    finally:
        ours.forget(mark)


class Supervisor:
    """One run from its start to its record."""

    def __init__(self, run_dir: str, order: Dict[str, Any]) -> None:
        self._dir, self._order = run_dir, order
        self._run = Run(id="", stage="", state="starting")
        self._record: Dict[str, Any] = {}
        self._status: Optional[int] = None
        self._maxrss_bytes = 0
        self._ending: Optional[Ending] = None

    def hold(self) -> int:
        """Start the run, report, wait, record."""
        try:
            problem = self._start()
        except OSError as error:  # the child, if there is one, waits behind its gate and ends with us
            problem = {
                "message": "%s cannot be written: %s" % (self._dir, error),
                "hint": "free space on its disk",
            }
        _report({"error": problem} if problem else {"run": self._record})
        if problem:
            record = {"schema": SCHEMA, "code": None, "at": time.time(), "never_started": True}
            runfiles.write_exit(self._dir, dict(record, reason=problem["message"]))
            return 1
        self._watch()
        left = self._settle()
        self._write_exit(left)
        return 0

    def _start(self) -> Optional[Dict[str, str]]:
        gate_r, gate_w = os.pipe()
        error_r, error_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(gate_w)
            _become(self._order, self._dir, gate_r, error_w)
        os.close(gate_r)
        os.close(error_w)
        self._record = self._describe(pid)
        self._run = from_dict(Run, self._record)
        runfiles.reserve_exit(self._dir)
        write_json(os.path.join(self._dir, runfiles.RUN), self._record)
        os.write(gate_w, b"g")
        os.close(gate_w)
        with os.fdopen(error_r, "rb") as file:
            said = file.read()
        if not said:
            return None
        os.waitpid(pid, 0)
        problem = json.loads(said)
        return {"message": str(problem["message"]), "hint": str(problem["hint"])}

    def _describe(self, pid: int) -> Dict[str, Any]:
        child, me = procfs.stat(pid), procfs.stat(os.getpid())
        assert child is not None  # unreaped
        assert me is not None
        spec = read_json(os.path.join(self._dir, runfiles.SPEC))
        where, kills = runfiles.oom_kills()
        run = from_dict(Run, spec_to_run(spec, "running"))
        run.pid, run.pid_start = pid, child.start_ticks
        run.supervisor_pid, run.supervisor_start = me.pid, me.start_ticks
        run.boot_id, run.started_at = procfs.boot_id(), time.time()
        kept = {name: value for name, value in vars(run).items() if name not in ("progress", "log_bytes")}
        return dict(kept, host=spec["host"], pid_namespace=runfiles.pid_namespace(), oom_where=where, oom_kills=kills)

    def _watch(self) -> None:
        """Wait until the main process has ended and, where it was asked to stop, all that belongs to it."""
        while True:
            self._reap()
            over = self._ending is None or self._ending.step()
            self._reap()
            if self._status is not None and over:
                return
            self._wait(None if self._ending is None else self._ending.pause_s())

    def _wait(self, timeout_s: Optional[float]) -> None:
        wanted = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
        if timeout_s is None:
            info: Optional[signal.struct_siginfo] = signal.sigwaitinfo(wanted)
        else:
            info = signal.sigtimedwait(wanted, timeout_s)
        if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT):
            self._stop()

    def _stop(self) -> None:
        grace_s = stop_grace_s(self._dir, self._run.grace_s)
        if self._ending is None:
            self._ending = Ending(self._run, self._members, grace_s)
        else:
            self._ending.hasten(grace_s)

    def _members(self) -> Set[Identity]:
        return members(self._run, self._dir, by_environ=False)  # as the subreaper we are everyone's ancestor

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._run.pid:
                self._status, self._maxrss_bytes = status, usage.ru_maxrss * 1024

    def _settle(self) -> List[Identity]:
        """Give what is left a moment, then return it."""
        end = time.monotonic() + SETTLE_S
        left = self._members()
        while left and self._ending is None and time.monotonic() < end:
            self._wait(SETTLE_S / 10)
            self._reap()
            left = self._members()
        return sorted(left)

    def _write_exit(self, left: List[Identity]) -> None:
        assert self._status is not None
        code = exit_code(self._status)
        record = {
            "schema": SCHEMA, "code": code, "at": time.time(), "maxrss_bytes": self._maxrss_bytes,
            "leftovers": len(left), "reason": self._reason(code, left),
        }  # fmt: skip
        end = time.monotonic() + RECORD_FOR_S
        while True:
            try:
                return runfiles.write_exit(self._dir, record)
            except OSError as error:
                if time.monotonic() >= end:
                    raise
                sys.stderr.write("eightzeros supervisor: exit.json cannot be written yet: %s\n" % error)
                signal.sigtimedwait({signal.SIGINT}, 1.0)

    def _reason(self, code: int, left: List[Identity]) -> str:
        words = []
        if self._ending is not None:
            words.append("stopped on request")
        if code < 0:
            words.append("ended by %s" % signal_name(-code))
        if code == -signal.SIGKILL:
            words.append(runfiles.oom_evidence(self._record))
        if self._ending is not None and self._ending.killed:
            words.append("%d processes did not end by themselves and were killed" % len(self._ending.killed))
        if left:
            words.append("%d of its processes still run: %s" % (len(left), _names(left)))
        return "; ".join(word for word in words if word)


def _become(order: Dict[str, Any], run_dir: str, gate: int, error: int) -> NoReturn:
    """Turn the forked child into the run. Reports over `error` and ends where that is not possible."""
    where = ""
    try:
        os.setsid()
        _default_signals()
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(os.path.join(run_dir, runfiles.LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        _close_all_but({0, 1, 2, gate, error})
        if os.read(gate, 1) != b"g":
            os._exit(127)  # the supervisor died before the run was on record
        spec = order["spec"]
        where = os.path.expanduser(spec["cwd"] or "~")
        os.chdir(where)
        where = ""
        env = dict(os.environ)
        env["PYTHONUNBUFFERED"] = "1"
        env.update(spec["env"])
        env[RUN_ENV], env[RUN_DIR_ENV] = spec["id"], run_dir
        os.execvpe(spec["argv"][0], spec["argv"], env)
    except BaseException as problem:  # the parent must learn of every kind
        os.write(error, json.dumps(_explain(problem, order, where)).encode("ascii"))
    os._exit(127)


def _default_signals() -> None:
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP and what the C library keeps
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _close_all_but(kept: Set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


def _explain(problem: BaseException, order: Dict[str, Any], where: str) -> Dict[str, str]:
    """Say what could not be started and what to do, in the operator's words."""
    number = getattr(problem, "errno", None)
    text = os.strerror(number) if number else repr(problem)
    if where:
        return {"message": "working folder %s: %s" % (where, text), "hint": "correct `cwd` of the stage"}
    program = str(order["spec"]["argv"][0])
    hint = "name a program that this host has, by its whole path"
    if number == errno.ENOEXEC:
        hint = "give the script a first line such as #!/bin/sh"
    elif number == errno.EACCES:
        hint = "make it executable (chmod +x), and check that its filesystem is not mounted noexec"
    elif number == errno.E2BIG:
        hint = "the command line and the environment together are too long"
    elif number == errno.ENOENT and os.path.exists(program):
        hint = "the file is there, so the interpreter in its first line is not"
    return {"message": "%s: %s" % (program, text), "hint": hint}


def _report(answer: Dict[str, Any]) -> None:
    """Answer the starter, who may be gone, and let go of its pipes."""
    try:
        os.write(1, json.dumps(answer).encode("ascii") + b"\n")
    except OSError:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _end_orphan(run_dir: str) -> int:
    """End a run whose supervisor is gone. Its exit status belongs to a process that is no child of ours."""
    run = from_dict(Run, read_json(os.path.join(run_dir, runfiles.RUN)))
    try:
        lock = runfiles.take_lock(run_dir)  # while it is held the run shows as stopping
    except BlockingIOError:
        _report({"run": vars(run)})
        return 0  # another is at it, and reads what this one was asked
    ending = Ending(run, lambda: members(run, run_dir), stop_grace_s(run_dir, run.grace_s))
    _report({"run": vars(run)})
    while not ending.step():
        signal.sigtimedwait({signal.SIGTERM}, ending.pause_s())
        ending.hasten(stop_grace_s(run_dir, run.grace_s))
    reason = "stopped on request; its exit status is unknown, because its supervisor had died"
    if ending.left:
        reason += "; %d of its processes still run: %s" % (len(ending.left), _names(sorted(ending.left)))
    record = {"schema": SCHEMA, "code": None, "at": time.time(), "leftovers": len(ending.left)}
    runfiles.write_exit(run_dir, dict(record, reason=reason))
    os.close(lock)
    return 0


def spec_to_run(spec: Dict[str, Any], state: str) -> Dict[str, Any]:
    """Return the fields of a Run that its stored spec gives."""
    return dict(spec, state=state, started_at=spec["at"])


def stop_grace_s(run_dir: str, default_s: float) -> float:
    """Return the grace that was asked for; where the signal came from elsewhere, record the run's own."""
    path = os.path.join(run_dir, runfiles.STOP)
    try:
        asked = read_json(path)
        if asked is None:
            asked = {"schema": SCHEMA, "at": time.time(), "grace_s": default_s}
            write_json(path, asked)
        return float(asked["grace_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return default_s  # a full disk must not keep a run from being stopped


def exit_code(status: int) -> int:
    """Return the exit code of a wait status, negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def _names(left: List[Identity]) -> str:
    shown = ", ".join("%d %s" % (pid, procfs.command(pid, 60)) for pid, _ in left[:3])
    return shown + (", ..." if len(left) > 3 else "")
