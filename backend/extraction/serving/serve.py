"""The launcher: checks, starts the server as its child, waits until it is ready, and stays until it has ended."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.extraction.serving import command, hook, installed, place, ports, tree
from backend.extraction.serving.failures import Failure, find_failure
from backend.extraction.serving.health import Health
from backend.extraction.serving.log import Log, say
from backend.extraction.serving.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK_S = 0.2
HOOK_S = 15.0
"""How long after the first answer each rank may take to say what it captures."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OUR_DEFAULTS = ("OPENBLAS_NUM_THREADS",)
"""What the import of this package sets for itself; the server has its own mind."""


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    wanted: command.Wanted
    entry: list[str]
    ready_timeout_s: float
    grace_s: float
    hook_s: float
    staging_root: str
    staging_gib: float


def main(argv: Sequence[str]) -> int:
    """Serve until the server ends or we are asked to stop.

    Returns the server's exit status (128 and the number of a signal), 0 where it was stopped on request, 1 where it
    failed with status 0, and 2 where it was not started.
    """
    settings = parse(argv)
    report = Report()
    report.tell("starting", "checking the installation")
    try:
        return Launcher(settings, report).run()
    except (command.Unfit, installed.NotInstalled, place.PlaceError) as error:
        return _refuse(report, str(error))


def _refuse(report: Report, text: str) -> int:
    say(f"not started: {text}")
    report.tell("failed", text)
    return 2


def parse(argv: Sequence[str]) -> Settings:
    """Read the command line; what stands after `--` goes to the server."""
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--points", required=True, type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--mem-fraction", type=float)
    parser.add_argument("--ready-timeout-s", type=float, default=1800.0)
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--entry", action="append", default=[], help="a word that starts the server, after Python")
    parser.add_argument("--hook-s", type=float, default=HOOK_S)
    parser.add_argument("--staging-root", default=place.ROOT)
    parser.add_argument("--staging-gib", type=float, default=8.0)
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    found = parser.parse_args(words[:cut])
    wanted = command.Wanted(
        found.model, sorted(found.points), found.tp, found.port, found.mem_fraction, words[cut + 1 :]
    )  # fmt: skip
    entry = [sys.executable, *(found.entry or ["-m", "sglang.launch_server"])]
    return Settings(
        wanted, entry, found.ready_timeout_s, found.grace_s, found.hook_s, found.staging_root, found.staging_gib
    )


class Launcher:
    """One server from its checks to its end."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self._settings, self._report = settings, report
        self._wanted = settings.wanted
        self._stop_at = 0.0
        self._ready_at = 0.0
        self._answered_at = 0.0

    def run(self) -> int:
        """Check, start, watch, end. Raises Unfit, NotInstalled or PlaceError before anything was started."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        found = installed.find(self._settings.entry)
        plan = command.plan(self._wanted, found)
        _free(self._wanted.port)
        run = os.environ.get("EIGHTZEROS_RUN") or f"serve-{os.getpid()}"
        self._folder = place.make(self._settings.staging_root, run)
        try:
            argv = self._command(run, found, plan)
            say(f"SGLang {found.version}, {plan.adapter} adapter, staging {self._folder}")
            for note in plan.notes:
                say(note)
            say("starting " + " ".join(argv))
            return self._serve(argv)
        finally:
            place.clear(self._folder)

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_at = self._stop_at or time.monotonic()

    def _command(self, run: str, found: installed.Installed, plan: command.Plan) -> list[str]:
        from backend.extraction import staging  # needs numpy, which every SGLang has

        bound = int(self._settings.staging_gib * (1 << 30))
        os.mkdir(os.path.join(self._folder, "python"), 0o700)
        staging.install(os.path.join(self._folder, "python"))
        argument = staging.hook_argument(run, self._folder, self._wanted.points, plan.adapter, bound_bytes=bound)
        return command.build(self._wanted, found, plan, self._settings.entry, argument)

    def _environment(self) -> dict[str, str]:
        with open("/proc/self/environ", "rb") as file:
            given = {pair.partition(b"=")[0].decode("utf-8", "replace") for pair in file.read().split(b"\0")}
        kept = {name: value for name, value in os.environ.items() if name not in OUR_DEFAULTS or name in given}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)  # each of its processes would compile everything at each start
        before = kept.get("PYTHONPATH")
        kept["PYTHONPATH"] = os.path.join(self._folder, "python") + (os.pathsep + before if before else "")
        return kept

    def _serve(self, argv: list[str]) -> int:
        log = Log()
        try:
            try:
                server = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log.fd, stderr=log.fd, env=self._environment(),
                    preexec_fn=_die_with_us,
                )  # fmt: skip
            except OSError as error:
                return _refuse(self._report, f"{argv[0]}: {error.strerror}")
            health = Health(self._wanted.port)
            try:
                failure = self._watch(server, log, health)
            finally:
                health.stop()
                self._end(server)
            log.finish()
            return self._account(server, log, failure)
        finally:
            log.close()

    def _watch(self, server: subprocess.Popen[bytes], log: Log, health: Health) -> Failure | None:
        """Tell how it goes until the server ends, must be ended or is to stop; return why it must be ended."""
        began = time.monotonic()
        while server.poll() is None and not self._stop_at:
            log.read()
            failure = self._step(health, log, time.monotonic() - began)
            if failure is not None:
                return failure
            time.sleep(TICK_S)
        return None

    def _step(self, health: Health, log: Log, since_s: float) -> Failure | None:
        if self._ready_at:
            found = hook.ranks(self._folder)
            self._report.figures = hook.figures(found, int(self._settings.staging_gib * (1 << 30)))
            if health.failing_since:
                silent_s = time.monotonic() - health.failing_since
                self._report.tell("running", f"no answer for {silent_s:.0f} s: {health.said}; {log.newest}")
            else:
                self._report.tell("ready", f"http://127.0.0.1:{self._wanted.port}: {hook.summary(found)}")
            return None
        self._report.tell("starting", log.newest)
        if health.answers:
            return self._greet()
        if since_s > self._settings.ready_timeout_s:
            seen = find_failure(log.lines)
            said = f"it was not ready within {self._settings.ready_timeout_s:.0f} s ({health.said})"
            return Failure("timeout", said + (f"; perhaps {seen.sentence}" if seen else ""), log.newest)
        return None

    def _greet(self) -> Failure | None:
        """Take the server for ready once it is ours and every rank captures what it should."""
        self._answered_at = self._answered_at or time.monotonic()
        owner = ports.owner(self._wanted.port)
        ours = {seen.pid for seen in tree.family(os.getpid())}
        if owner is not None and owner.pid and owner.pid not in ours:
            return Failure("port", f"another server answers on port {self._wanted.port}: {owner}")
        found = hook.ranks(self._folder)
        if not hook.settled(found) and time.monotonic() - self._answered_at < self._settings.hook_s:
            return None
        trouble = hook.trouble(found, self._wanted.points)
        if trouble:
            return Failure("capture", trouble)
        self._ready_at = time.monotonic()
        say(f"ready at http://127.0.0.1:{self._wanted.port}: {hook.summary(found)}")
        return None

    def _end(self, server: subprocess.Popen[bytes]) -> None:
        """Ask the server to end, then kill what is left of its tree once the grace is over."""
        if server.poll() is None:
            self._report.tell("stopping", "asked the server to end")
            server.terminate()
        kill_at = time.monotonic() + self._settings.grace_s
        while server.poll() is None and time.monotonic() < kill_at:
            time.sleep(TICK_S / 4)
        while True:
            left = tree.family(os.getpid())
            if not left:
                break
            for seen in left:
                tree.kill(seen)
            time.sleep(TICK_S / 4)
            if server.poll() is not None:
                tree.reap()

    def _account(self, server: subprocess.Popen[bytes], log: Log, failure: Failure | None) -> int:
        """Say how it ended, and end in the same way."""
        code = int(server.returncode)
        if self._stop_at and failure is None:
            self._report.tell("done", "stopped on request")
            say(f"the server has ended, {_status(code)}")
            return 0  # whatever it says of the signals that its whole session was sent
        failure = failure or find_failure(log.lines) or _unexplained(code, log)
        sentence = failure.sentence
        if failure.kind == "port" and failure.port:
            owner = ports.owner(failure.port)
            sentence += f" by {owner}" if owner else "; it is free again now"
        when = "ended" if self._ready_at else "did not start"
        say(f"the server {when}: {sentence}")
        if failure.line:
            say(f"its log says: {failure.line}")
        more = failure.line and failure.sentence not in failure.line
        self._report.tell("failed", f"{sentence} | {failure.line}" if more else sentence)
        return _mirror(code) or 1


def _unexplained(code: int, log: Log) -> Failure:
    if code == -signal.SIGKILL:
        said = "it was killed from outside: by the out-of-memory killer of the host (see dmesg), or by somebody"
        return Failure("killed", said, log.newest)
    return Failure("unknown", f"it ended with {_status(code)} and its log names no cause", log.newest)


def _free(port: int) -> None:
    """See that the port can be had. Raises Unfit naming who has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            owner = ports.owner(port)
            by = f" by {owner}" if owner else f" ({error.strerror})"
            raise command.Unfit(f"port {port} is taken{by}: stop that, or choose another `port`") from None


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _mirror(code: int) -> int:
    """Return an exit status as the shell would write it; a signal's is 128 and its number."""
    return 128 - code if code < 0 else code
