"""Detached runs on this host: started once, found again by anybody, stopped by identity.

The store is files; nothing runs here for a run but its supervisor. What a run's state is follows from what is
on disk and which processes live, so it is the same for every console and after every crash.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from backend.agent import procfs, runfiles, runtree
from backend.agent.files import read_json, write_json
from backend.agent.paths import state_dir
from backend.agent.progress import ProgressReader
from backend.agent.runlog import read_log
from backend.agent.seam import Machine
from backend.agent.supervisor import spec_to_run
from backend.wire import RUN_ENDED, RUN_LIVE, SCHEMA, Refused, Run, RunSpec, from_dict, printable

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
ANSWER_S = 15.0
"""How long a start waits for its supervisor; a slow one goes on, and the run shows as starting."""

DRAFT = ".new-"
DRAFT_S = 3600.0
"""How old a folder that was never claimed must be before it is swept: claiming one takes milliseconds."""


class _Known(NamedTuple):
    run: Run
    ended: bool


class RunStore:
    """The runs in one folder of this host. Those of other hosts in it (a shared home) are not shown."""

    def __init__(self, machine: Machine, root: Optional[str] = None) -> None:
        self._relaunch = machine.relaunch
        self._root = os.path.realpath(root or state_dir("runs"))
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        self._host = socket.gethostname()
        self._known: Dict[str, _Known] = {}
        self._progress = ProgressReader()
        self._slow: List["subprocess.Popen[bytes]"] = []
        self._sweep()

    def start(self, spec: RunSpec) -> Run:
        """Start a run and return it once it is on record; an id that exists returns its run instead.

        Raises Refused: `bad-id`, `bad-spec`, `id-taken` (by another host in a shared home) or `cannot-start`.
        """
        _check(spec)
        folder = self._folder(spec.id)
        if not os.path.isdir(folder):
            lock = self._claim(spec, folder)
            if lock is not None:
                try:
                    self._launch(folder, {"spec": vars(spec)}, lock)
                finally:
                    os.close(lock)
        run = self.get(spec.id)
        if run is None:
            text = "run id `%s` belongs to another host that shares %s" % (spec.id, self._root)
            raise Refused("id-taken", text, "choose another id")
        return run

    def list(self) -> List[Run]:
        """Return every run of this host, the newest first."""
        runs = [self._look(name) for name in self._names()]
        return sorted([run for run in runs if run is not None], key=lambda run: run.started_at, reverse=True)

    def get(self, run_id: str) -> Optional[Run]:
        """Return a run, or None where this host has none of that id."""
        return self._read(run_id) if _ID.match(run_id) else None

    def folder(self, run_id: str) -> str:
        """Return where a run keeps its files. Raises Refused `not-found`."""
        if self.get(run_id) is None:
            raise Refused("not-found", "there is no run `%s` on this host" % run_id)
        return self._folder(run_id)

    def stop(self, run_id: str, grace_s: float) -> Run:
        """Ask a run to end, have what is left of it killed after `grace_s`, and return at once."""
        run = self.get(run_id)
        if run is None:
            raise Refused("not-found", "there is no run `%s` on this host" % run_id)
        if run.state in RUN_ENDED:
            return run
        if not run.pid:
            raise Refused("not-started", "run %s is still being started" % run_id, "ask again in a moment")
        folder = self._folder(run_id)
        try:
            write_json(os.path.join(folder, runfiles.STOP), {"schema": SCHEMA, "at": time.time(), "grace_s": grace_s})
        except OSError:
            pass  # on a full disk the supervisor takes the run's own grace
        asked = run.supervised and runtree.signal_process(run.supervisor_pid, run.supervisor_start, signal.SIGTERM)
        if not asked:
            self._launch(folder, {"end": True}, None)
        run = self.get(run_id) or run
        if run.state in RUN_LIVE:
            run.state = "stopping"
        return run

    def log(self, run_id: str, offset: int, limit: int) -> Dict[str, Any]:
        """Return a piece of a run's log as `runlog.read_log` describes it."""
        run = self.get(run_id)
        if run is None:
            raise Refused("not-found", "there is no run `%s` on this host" % run_id)
        return read_log(os.path.join(self._folder(run_id), runfiles.LOG), offset, limit, run.state in RUN_ENDED)

    def poll(self) -> List[Run]:
        """Return the runs that are new or changed since the last poll; ended ones are not read again."""
        self._slow = [supervisor for supervisor in self._slow if supervisor.poll() is None]
        changed = []
        names = self._names()
        for name in names:
            known = self._known.get(name)
            if known is not None and known.ended:
                continue
            run = self._read(name)
            if run is None:
                continue
            ended = run.state in RUN_ENDED
            if known is None or known.run != run:
                changed.append(run)
            self._known[name] = _Known(run, ended)
        for name in set(self._known) - set(names):
            del self._known[name]
        return changed

    def any_live(self) -> bool:
        """Say whether a run had not ended at the last poll."""
        return any(not known.ended for known in self._known.values())

    def members(self, run_id: str) -> Set[Tuple[int, int]]:
        """Return (pid, start ticks) of the live processes of a run, without its supervisor."""
        record, _ = _json(self._folder(run_id), runfiles.RUN)
        try:
            run = from_dict(Run, record)
            return runtree.members(run, self._folder(run_id)) if run.boot_id == procfs.boot_id() else set()
        except TypeError:
            return set()  # no record, or none that makes sense

    def run_of(self, pid: int) -> Optional[str]:
        """Return the id of the run that a process belongs to, its supervisor included."""
        folder = runtree.environ_value(pid, runtree.RUN_DIR_ENV)
        if folder and os.path.dirname(folder) == self._root and os.path.isdir(folder):
            return os.path.basename(folder)
        line = set(runtree.ancestry(pid))
        session = procfs.stat(pid)
        for run in self.list():
            if run.state in RUN_LIVE and line & {
                (run.pid, run.pid_start),
                (run.supervisor_pid, run.supervisor_start),
            }:
                return run.id
            if run.state != "failed" and session is not None and run.pid and session.sid == run.pid and (
                session.start_ticks >= run.pid_start and run.boot_id == procfs.boot_id()
            ):  # fmt: skip
                return run.id
        return None

    def _sweep(self) -> None:
        """Remove what starters left that died before they had claimed their run."""
        for name in os.listdir(self._root):
            draft = os.path.join(self._root, name)
            try:
                if name.startswith(DRAFT) and time.time() - os.stat(draft).st_mtime > DRAFT_S:
                    shutil.rmtree(draft, ignore_errors=True)
            except FileNotFoundError:
                continue  # its starter renamed it at this moment

    def _folder(self, run_id: str) -> str:
        return os.path.join(self._root, run_id)

    def _names(self) -> List[str]:
        try:
            return [name for name in os.listdir(self._root) if _ID.match(name)]
        except FileNotFoundError:
            return []  # somebody cleared the folder

    def _claim(self, spec: RunSpec, folder: str) -> Optional[int]:
        """Make the run's folder and hold its lock, or return None where somebody else was first.

        It is prepared under another name and renamed, which fails on a folder that is there and not empty: so
        it appears at once, locked and with its spec, and exactly one of two starters has it.
        """
        lock, draft = -1, tempfile.mkdtemp(prefix=DRAFT, dir=self._root)
        try:
            lock = runfiles.take_lock(draft)
            write_json(os.path.join(draft, runfiles.SPEC), runfiles.stored_spec(spec))
            os.rename(draft, folder)
            return lock
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            if lock >= 0 and os.path.isdir(folder):
                return None
            hint = "set XDG_STATE_HOME to a disk with free space and file locks"
            raise Refused("cannot-start", "%s: %s" % (self._root, error.strerror), hint) from None

    def _launch(self, folder: str, order: Dict[str, Any], lock: Optional[int]) -> None:
        """Start a supervisor, hand it its order and wait for its answer. Raises Refused: `cannot-start`."""
        log = os.open(os.path.join(folder, runfiles.LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        argv = [*self._relaunch, "supervise", folder]
        try:
            supervisor = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )  # fmt: skip
        except OSError as error:
            raise Refused("cannot-start", "%s: %s" % (argv[0], error.strerror), "is the agent whole?") from None
        finally:
            os.close(log)
        try:
            said = _converse(supervisor, json.dumps(order, default=vars).encode("ascii"))
        finally:
            if supervisor.stdout is not None:
                supervisor.stdout.close()
        if said is None:
            self._slow.append(supervisor)  # it goes on, and is reaped when it has left us
            return
        supervisor.wait()
        problem = said.get("error")
        if problem:
            raise Refused("cannot-start", str(problem.get("message")), str(problem.get("hint")))
        if not said:
            tail = read_log(os.path.join(folder, runfiles.LOG), -1, 1000, True)["text"].strip().split("\n")[-1]
            raise Refused("cannot-start", "the supervisor ended at once: %s" % (tail or "no word of why"),
                          "the run's log says more: %s" % os.path.join(folder, runfiles.LOG))  # fmt: skip

    def _look(self, run_id: str) -> Optional[Run]:
        known = self._known.get(run_id)
        return known.run if known is not None and known.ended else self._read(run_id)

    def _read(self, run_id: str) -> Optional[Run]:
        """Work out a run's state; one whose record makes no sense is lost, and harms no other."""
        try:
            return self._work_out(run_id)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            why = "its record cannot be read: %s" % printable(str(error), 200)
            return Run(run_id, "?", "lost", reason=why, supervised=False)

    def _work_out(self, run_id: str) -> Optional[Run]:
        folder = self._folder(run_id)
        if not os.path.isdir(folder):
            return None
        ended, problem = _json(folder, runfiles.EXIT)
        record, broken = _json(folder, runfiles.RUN)
        if not record:
            return self._unborn(run_id, folder, ended, broken or problem)
        if record.get("host") != self._host:
            return None
        run = from_dict(Run, record)
        if not ended:
            run.state, run.reason = self._judge(run, folder, record)
            if run.state == "lost":
                ended, _ = _json(folder, runfiles.EXIT)  # written between the two looks
        if ended:
            _apply(run, ended)
        self._measure(run, folder)
        if run.state == "lost" and not run.ended_at:
            run.ended_at = _last_sign(folder, run.started_at)
        return run

    def _unborn(self, run_id: str, folder: str, ended: Dict[str, Any], problem: str) -> Optional[Run]:
        """Read a run that has no run.json: it is being started, or it never was."""
        spec, broken = _json(folder, runfiles.SPEC)
        if spec and spec.get("host") != self._host:
            return None
        known = spec_to_run(spec, "starting") if spec else {"id": run_id, "stage": "?", "state": "starting"}
        run = from_dict(Run, known)
        if not runfiles.locked(folder):
            if os.path.exists(os.path.join(folder, runfiles.RUN)) and not problem:
                return self._read(run_id)  # written between the two looks
            run.state = "failed"
            run.reason = broken or problem or str(ended.get("reason") or "its starter died before it was started")
            run.ended_at = float(ended.get("at") or _last_sign(folder, run.started_at))
        return run

    def _judge(self, run: Run, folder: str, record: Dict[str, Any]) -> Tuple[str, str]:
        """Return the state and its reason of a run that has not recorded its end."""
        if run.boot_id != procfs.boot_id():
            return "lost", "the host was restarted while it ran"
        run.supervised = procfs.alive(run.supervisor_pid, run.supervisor_start)
        stopping = os.path.exists(os.path.join(folder, runfiles.STOP))
        if run.supervised or runtree.runs(run.pid, run.pid_start):
            return ("stopping" if stopping else "running"), ""
        if stopping and runfiles.locked(folder):
            return "stopping", "its supervisor is gone; what is left of it is being ended"
        if record.get("pid_namespace") != runfiles.pid_namespace():
            return "lost", "the container was restarted while it ran, or it runs in another one"
        evidence = runfiles.oom_evidence(record) or "its exit status is unknown"
        return "lost", "it ended together with its supervisor, killed from outside; " + evidence

    def _measure(self, run: Run, folder: str) -> None:
        """Fill in the log's size and the progress."""
        try:
            run.log_bytes = os.stat(os.path.join(folder, runfiles.LOG)).st_size
        except OSError:
            run.log_bytes = 0
        live = run.state in RUN_LIVE
        run.progress, note = self._progress.read(folder, run.out_dir, live)
        if note and not run.reason:
            run.reason = note


def _check(spec: RunSpec) -> None:
    """Refuse a spec that cannot be run."""
    if not isinstance(spec.id, str) or not _ID.match(spec.id):
        text = "run id %r: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit" % (spec.id,)
        raise Refused("bad-id", text, "choose another id")
    words = isinstance(spec.argv, list) and spec.argv and all(isinstance(word, str) for word in spec.argv)
    if not words or not spec.argv[0] or any("\0" in word for word in spec.argv):
        raise Refused("bad-spec", "run %s: `argv` must be a list of words that names a program" % spec.id)
    if not isinstance(spec.env, dict) or not all(
        isinstance(name, str) and isinstance(value, str) and name and "=" not in name and "\0" not in name + value
        for name, value in spec.env.items()
    ):
        raise Refused("bad-spec", "run %s: `env` must map names to text" % spec.id)


def _converse(supervisor: "subprocess.Popen[bytes]", order: bytes) -> Optional[Dict[str, Any]]:
    """Give the order and read the answer: {} where it died without one, None where it takes too long."""
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    try:
        supervisor.stdin.write(order)
        supervisor.stdin.close()
    except BrokenPipeError:
        pass  # it died; what it said, if anything, is read below
    answer, end = b"", time.monotonic() + ANSWER_S
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([supervisor.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        data = os.read(supervisor.stdout.fileno(), 65536)
        if not data:
            break
        answer += data
    try:
        said = json.loads(answer)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _json(folder: str, name: str) -> Tuple[Dict[str, Any], str]:
    """Return (content, problem) of a file that the agent or a supervisor wrote; an absent one is empty."""
    try:
        content = read_json(os.path.join(folder, name))
    except (OSError, ValueError) as error:
        return {}, printable(str(error), 300)
    if content is not None and not isinstance(content, dict):
        return {}, "%s: not a JSON object" % os.path.join(folder, name)
    return content or {}, ""


def _apply(run: Run, ended: Dict[str, Any]) -> None:
    """Take over what exit.json says."""
    code = ended.get("code")
    run.exit_code = code if isinstance(code, int) else None
    run.state = "failed" if ended.get("never_started") else "lost" if run.exit_code is None else "exited"
    run.reason, run.ended_at = str(ended.get("reason") or ""), float(ended.get("at") or 0.0)


def _last_sign(folder: str, default: float) -> float:
    """Return when the run last wrote something, in wall seconds."""
    times = [default]
    for name in (runfiles.LOG, runfiles.PROGRESS, runfiles.RUN):
        try:
            times.append(os.stat(os.path.join(folder, name)).st_mtime)
        except OSError:
            continue
    return max(times)
