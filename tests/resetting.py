"""A machine for reset tests: plain files stand for devices, locked claims of real processes for their
memory."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from backend.agent.reset import clearance, cycle
from backend.agent.seam import HEALTH, ContextList, DeviceTable, Driver, DriverError, Machine
from backend.wire import NOT_SUPPORTED, SLOW, GpuFacts, Inventory, Reading, failed
from tests import holding
from tests.cuda.beside import library_in, residue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


class FileDevices(DeviceTable):
    """Plain files nvidia0, nvidia1 ... as devices, told by filesystem and inode."""

    def __init__(self, root: str) -> None:
        self._root, self._minors = root, {}
        for name in os.listdir(root):
            if name.startswith("nvidia"):
                st = os.stat(os.path.join(root, name))
                self._minors[st.st_dev, st.st_ino] = int(name[6:])

    def gpus_of(self, st: os.stat_result) -> tuple[int, ...] | None:
        found = self._minors.get((st.st_dev, st.st_ino))
        return None if found is None else (found,)

    def gpus_of_map(self, device: tuple[int, int], inode: int, path: str) -> tuple[int, ...] | None:
        try:
            return self.gpus_of(os.stat(path))
        except OSError:
            return None  # a file of some other process, which may go at any moment

    def scope(self) -> str:
        return self._root


class ClaimDriver(Driver):
    """Reads claims and a script of faults from files, so that the test can change them while the driver's
    child runs.

    settings.json: {gpus, idle_bytes: {index: n}, hang: [index], blocks_at_exit: bool, broken: text, readings: {index:
    {name: value}}, lost: [index], opens: bool (it keeps the device files open, as NVML does), smi: see tests/smi.py,
    curve: {index: [n ...]}: what the GPU shows beside its claims, one reading after the other, the last for ever}

    A reading that is a text stands for one that failed with it.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._readings: dict[int, int] = {}
        self._fds: list[int] = []

    def _settings(self) -> dict[str, Any]:
        with open(os.path.join(self._root, "settings.json"), encoding="utf-8") as file:
            return json.load(file)

    def open(self) -> Inventory:
        settings = self._settings()
        if settings.get("broken"):
            raise DriverError(settings["broken"])
        count = settings["gpus"]
        if settings.get("opens"):
            self._fds = [os.open(holding.device(self._root, i), os.O_RDONLY) for i in range(count) for _ in range(3)]
        return Inventory("580.1", "13.0", [GpuFacts(i, f"GPU-{i:04d}", "Test GPU", minor=i) for i in range(count)])

    def occupancy(self, index: int) -> tuple[Reading, ContextList]:
        settings = self._settings()
        while index in settings.get("hang", []):
            time.sleep(0.05)
            settings = self._settings()
        while settings.get("blocks_at_exit") and self._somebody_exits():
            time.sleep(0.02)
        if index in settings.get("lost", []):
            return failed("GPU is lost (NVML 15)"), ContextList(problem="GPU is lost (NVML 15)")
        used, contexts = settings.get("idle_bytes", {}).get(str(index), 0), ContextList()
        if residue(self._root) == f"GPU-{index:04d}":
            used += 22 << 20  # what a bare context holds on an H200
        curve = settings.get("curve", {}).get(str(index))
        if curve:
            self._readings[index] = number = self._readings.get(index, -1) + 1
            used += curve[min(number, len(curve) - 1)]
        for name in sorted(os.listdir(os.path.join(self._root, "claims"))):
            if name.startswith(f"{index}.") and not name.endswith(".new"):
                claim = self._claim(os.path.join(self._root, "claims", name))
                if claim is not None:
                    used += claim["used_bytes"]
                    contexts.processes.append((claim["pid"], Reading(claim["used_bytes"]), "compute"))
        return Reading(used), contexts

    def _somebody_exits(self) -> bool:
        try:
            with open(os.path.join(self._root, "exiting"), encoding="ascii") as file:
                return os.path.exists(f"/proc/{file.read() or 0}/exe")  # a zombie's link cannot be followed
        except FileNotFoundError:
            return False

    def _claim(self, path: str) -> dict[str, Any] | None:
        """Return a claim that is held, or was released less than its time ago; wait for it where it
        blocks."""
        with open(path, encoding="utf-8") as file:
            claim: dict[str, Any] = json.load(file)
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return claim
                mark = path.replace("claims", "released")
                if not os.path.exists(mark):
                    os.close(os.open(mark, os.O_CREAT | os.O_WRONLY, 0o666))
                left = os.stat(mark).st_mtime + claim["release_s"] - time.clock_gettime(time.CLOCK_REALTIME)
                if left <= 0:
                    return None
                if not claim["blocks"]:
                    return claim
                time.sleep(min(left, 0.1))

    def lean(self, index: int) -> tuple[dict[str, Reading], ContextList]:
        return {"ecc_uncorrected": self._reading(index, "ecc_uncorrected")}, ContextList()

    def slow(self, index: int) -> dict[str, Reading]:
        return {name: self._reading(index, name) for name in SLOW}

    def health(self, index: int) -> dict[str, Reading]:
        told = self._settings().get("readings", {}).get(str(index), {})
        return {name: self._reading(index, name) for name in HEALTH if name in told}

    def _reading(self, index: int, name: str) -> Reading:
        settings = self._settings()
        if index in settings.get("lost", []):
            return failed("GPU is lost (NVML 15)")
        value = settings.get("readings", {}).get(str(index), {}).get(name, "unsupported")
        if isinstance(value, str):
            return NOT_SUPPORTED if value == "unsupported" else failed(value)
        return Reading(value)


def machine(root: str) -> Machine:
    """Return the bench's machine, whose agent is this module."""
    relaunch = [sys.executable, "-m", "tests.resetting", root]
    return Machine(
        lambda: ClaimDriver(root), lambda: FileDevices(root), relaunch, cuda_library=library_in(root),
        smi=[sys.executable, "-m", "tests.smi", root], host_root=os.path.join(root, "site"),
    )  # fmt: skip


class Bench:
    """A host with GPUs, and the holders on it, which are ended with it."""

    def __init__(self, root: Path, gpus: int = 2) -> None:
        self.root = str(root)
        for name in ("claims", "released", "run"):
            os.makedirs(os.path.join(self.root, name))
        for index in range(gpus):
            with open(holding.device(self.root, index), "wb") as file:
                file.truncate(4096)
        self.settings: dict[str, Any] = {"gpus": gpus}
        self.set()
        self.holders: list[holding.Holder] = []
        self.machine = machine(self.root)

    def set(self, **settings: Any) -> None:
        """Change what the driver says from now on."""
        self.settings.update(settings)
        path = os.path.join(self.root, "settings.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(self.settings, file)
        os.rename(path + ".new", path)

    def start(self, mode: str = "", **options: Any) -> holding.Holder:
        """Start a holder."""
        holder = holding.start(self.root, mode=mode, **options)
        self.holders.append(holder)
        return holder

    def spawn(self, words: list[str]) -> holding.Holder:
        """Start another program that says the same line as a holder."""
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        holder = holding.Holder(process, json.loads(process.stdout.readline()))
        self.holders.append(holder)
        return holder

    def close(self) -> None:
        """End the holders."""
        for holder in self.holders:
            holder.end()


@contextmanager
def quick_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Give a host of two GPUs, on which a GPU counts as free after a third of a second."""
    monkeypatch.setattr(clearance, "STABLE_S", 0.3)
    monkeypatch.setattr(clearance, "SETTLED_S", 0.4)
    monkeypatch.setattr(cycle, "VERIFY_S", 0.4)
    folder.mkdir()
    host = Bench(folder)
    yield host
    host.close()


def main() -> int:
    """Play a role of the agent on a bench that exists: python -m tests.resetting ROOT ROLE ..."""
    from backend.agent.main import serve

    return serve(machine(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
