"""Real processes that hold GPU device files in every awkward way, started and ended by the tests.

Run as a program it is the holder. It opens the device files as often as a CUDA context does on an H200 (20
times), or a monitor (3 times), and keeps a locked claim file for the memory: its forked children share the
lock, so the memory stays until the last of them is gone, as it does under the real driver.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

CONTEXT_OPENS = 20
MONITOR_OPENS = 3
MIB = 1 << 20


class Holder:
    """One started holder. `pid` holds the GPU; `pids` are all that it started."""

    def __init__(self, process: subprocess.Popen[bytes], said: dict[str, Any]) -> None:
        self.process, self.said = process, said
        self.pid: int = said["pid"]
        self.pids: list[int] = said["pids"]
        self._fds = [os.pidfd_open(pid) for pid in self.pids]

    def alive(self, number: int = 0) -> bool:
        """Say whether one of its processes still lives."""
        return not select.select([self._fds[number]], [], [], 0)[0]

    def untouched(self, number: int = 0) -> bool:
        """Say whether a witness lives and no signal reached it: it blocks all of them, so each would be pending."""
        with open(f"/proc/{self.pids[number]}/status", encoding="ascii") as file:
            fields = dict(line.split(":\t", 1) for line in file)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return self.alive(number) and not pending and fields["State"][0] not in "TtZ"

    def end(self) -> None:
        """Kill what is left of it, by handle."""
        for fd in self._fds:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(fd)
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout):
            if file:
                file.close()


def start(root: str, *, gpus: str = "0", mode: str = "", used_mib: int = 1000, **more: Any) -> Holder:
    """Start a holder and wait until it holds. `mode` is one of the functions below, `more` its options."""
    words = [sys.executable, "-I", "-S", os.path.abspath(__file__), "--root", root, "--gpus", gpus, "--mode", mode]
    words += ["--used-mib", str(used_mib)]
    for name, value in more.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.stdout.close()
        raise AssertionError(f"the holder ended at once, status {process.wait()}")
    return Holder(process, json.loads(line))


def device(root: str, gpu: int) -> str:
    """Return a GPU's device file."""
    return os.path.join(root, f"nvidia{gpu}")


def hold(root: str, gpus: list[int], used_mib: int, opens: int, options: Any) -> list[int]:
    """Open the device files, and lock a claim for each GPU's memory; without memory it is a monitor."""
    files = []
    for gpu in gpus:
        files += [os.open(device(root, gpu), os.O_RDWR) for _ in range(opens)]
        if used_mib:
            claim = {"pid": options.named or os.getpid(), "used_bytes": used_mib * MIB, "release_s": options.release_s,
                     "blocks": options.blocks}  # fmt: skip
            path = os.path.join(root, "claims", f"{gpu}.{os.getpid()}")
            fd = os.open(path + ".new", os.O_RDWR | os.O_CREAT, 0o666)
            os.write(fd, json.dumps(claim).encode())
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.rename(path + ".new", path)
            files.append(fd)
    return files


def ready(*pids: int) -> None:
    """Tell the test who holds."""
    os.write(1, json.dumps({"pid": pids[0], "pids": list(pids)}).encode() + b"\n")


def witness() -> None:
    """Block every signal, so that one that was sent stays to be seen; but not the kernel's word on a dead child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})


def sleep() -> None:
    """Sleep for ever."""
    while True:
        signal.pause()


def child(run: Callable[[], None]) -> int:
    """Fork a child that runs and sleeps; returns when it says that it is set up."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run()
        os.write(writer, b"%d" % os.getpid())
        os.close(writer)
        sleep()
    os.close(writer)
    said = int(os.read(reader, 20))
    os.close(reader)
    return said


def main() -> None:
    """Hold as told by the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root")
    parser.add_argument("--gpus")
    parser.add_argument("--mode", default="")
    parser.add_argument("--used-mib", type=int)
    parser.add_argument("--named", type=int, default=0, help="the pid that the driver names, where it is another")
    parser.add_argument("--release-s", type=float, default=0.05)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--uid", type=int, default=0)
    parser.add_argument("--exit-s", type=float, default=1.0)
    parser.add_argument("--comm", default="")
    parser.add_argument("--title", default="", help="words that only stand on the command line")
    options = parser.parse_args()
    gpus = [int(part) for part in options.gpus.split(",") if part]
    Modes(options, gpus).run()


class Modes:
    """The ways to hold."""

    def __init__(self, options: Any, gpus: list[int]) -> None:
        self.options, self.gpus = options, gpus
        self.files: list[int] = []

    def run(self) -> None:
        """Hold in the way that was asked for, and sleep."""
        if self.options.uid:
            os.setresgid(self.options.uid, self.options.uid, self.options.uid)
            os.setresuid(self.options.uid, self.options.uid, self.options.uid)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # open to its own user again, as after an exec
        if self.options.comm:
            ctypes.CDLL(None).prctl(15, os.fsencode(self.options.comm), 0, 0, 0)
        getattr(self, self.options.mode.replace("-", "_") or "plain")()
        sleep()

    def _hold(self, opens: int = CONTEXT_OPENS) -> None:
        self.files = hold(self.options.root, self.gpus, self.options.used_mib, opens, self.options)

    def plain(self) -> None:
        """Hold, and end at SIGTERM."""
        self._hold()
        ready(os.getpid())

    def ignore_term(self) -> None:
        """Ignore SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.plain()

    def swallow_term(self) -> None:
        """Take SIGTERM and go on."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.plain()

    def slow_exit(self) -> None:
        """Take a while to end after SIGTERM, and say meanwhile that it is on its way out."""

        def leave(*_: Any) -> None:
            with open(os.path.join(self.options.root, "exiting"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
            time.sleep(self.options.exit_s)
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        self.plain()

    def stopped(self) -> None:
        """Stand still, as after SIGSTOP."""
        self.plain()
        os.kill(os.getpid(), signal.SIGSTOP)

    def monitor(self) -> None:
        """Have what an NVML client has: a few open files and no memory."""
        witness()
        self.options.used_mib = 0
        self._hold(MONITOR_OPENS)
        ready(os.getpid())

    def doubtful(self) -> None:
        """Hold as many files as a context, of which the driver knows nothing."""
        self.options.used_mib = 0
        self.plain()

    def bystander(self) -> None:
        """Hold nothing at all."""
        witness()
        ready(os.getpid())

    def mapped(self) -> None:
        """Keep a mapping and close the file."""
        self._hold(0)
        libc = ctypes.CDLL(None, use_errno=True)  # Python's own mmap would keep a copy of the file open
        libc.mmap.restype = ctypes.c_void_p
        for gpu in self.gpus:
            fd = os.open(device(self.options.root, gpu), os.O_RDWR)
            shared, readable = 1, 1
            assert libc.mmap(None, ctypes.c_size_t(4096), readable, shared, fd, ctypes.c_long(0))
            os.close(fd)
        ready(os.getpid())

    def zombie_leader(self) -> None:
        """End the first thread while another goes on: the process shows as a zombie and holds everything."""
        self._hold()
        threading.Thread(target=time.sleep, args=(1000,)).start()
        ready(os.getpid())
        ctypes.CDLL(None).pthread_exit(None)

    def with_child(self) -> None:
        """Start a child that holds nothing itself."""
        pid = child(lambda: None)
        self._hold()
        ready(os.getpid(), pid)

    def orphan(self) -> None:
        """Leave session and parent behind, twice forked."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            self.plain()
            return
        os.waitpid(pid, 0)
        os._exit(0)

    def heir(self) -> None:
        """Fork a child that shares the files, in a session of its own, and end: the driver goes on naming
        us."""
        self._hold()
        pid = child(os.setsid)
        ready(pid, os.getpid())
        os._exit(0)

    def fork_at_term(self) -> None:
        """Leave a child with the files behind at SIGTERM, in a session of its own and under another
        parent."""

        def leave(*_: Any) -> None:
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                sleep()
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        self.plain()

    def respawner(self) -> None:
        """Start a holder, and another whenever it ends. The parent holds nothing."""
        words = [sys.executable, "-I", "-S", __file__, "--root", self.options.root, "--gpus", self.options.gpus]
        words += ["--used-mib", str(self.options.used_mib)]
        first: int | None = None
        while True:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            if first is None:
                first = said["pid"]
                ready(first, os.getpid())
            process.wait()

    def become(self) -> None:
        """Turn into another program at SIGUSR1, keeping pid and files."""
        self._hold()
        for fd in self.files:
            os.set_inheritable(fd, True)
        signal.signal(signal.SIGUSR1, lambda *_: os.execv("/bin/sleep", ["sleep", "100"]))
        ready(os.getpid())

    def unreaped(self) -> None:
        """Start a holder in a group of its own and never reap it. The parent holds nothing."""
        witness()
        pid = child(self._apart)
        ready(pid, os.getpid())

    def traced(self) -> None:
        """Start a holder and trace it, so that its end waits for us. The tracer holds nothing."""
        witness()
        pid = child(self._apart)
        seize = 0x4206
        assert ctypes.CDLL(None).ptrace(seize, pid, None, None) == 0
        ready(pid, os.getpid())

    def vfork_parent(self) -> None:
        """Be a parent that waits in the kernel until its child becomes a program, which it never does."""
        self._hold()
        clone, vfork = 56 if os.uname().machine == "x86_64" else 220, 0x4000
        ready(os.getpid())
        if ctypes.CDLL(None).syscall(clone, vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            sleep()

    def in_flight(self) -> None:
        """Send the files to a socket that nobody reads, and close them: no process shows them any more."""
        self._hold()
        self.pair = socket.socketpair()
        for fd in self.files:
            socket.send_fds(self.pair[0], [b"x"], [fd])
            os.close(fd)
        witness()
        ready(os.getpid())

    def memory_alone(self) -> None:
        """Keep the memory without a file of the device."""
        witness()
        self._hold(0)
        ready(os.getpid())

    def frees_early(self) -> None:
        """Give the memory back at SIGTERM, and take a while to end."""

        def leave(*_: Any) -> None:
            for fd in self.files:
                os.close(fd)
            time.sleep(self.options.exit_s)
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        self.plain()

    def waits_for_file(self) -> None:
        """Hold, and ask for a file that may never be told."""
        self._hold()
        ready(os.getpid())
        os.stat(self.options.title)

    def subreaped(self) -> None:
        """Start an orphan whose new parent is this process, not init. The reaper holds nothing."""
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        witness()
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.write(writer, b"%d" % child(self._apart))
            os._exit(0)
        pid = int(os.read(reader, 20))
        os.waitpid(middle, 0)
        ready(pid, os.getpid())

    def _apart(self) -> None:
        """Hold as a process in a session of its own, with no signal blocked."""
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._hold()


if __name__ == "__main__":
    main()
