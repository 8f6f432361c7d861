"""Who holds virtual memory: a file per holder and GPU, locked for as long as any process has it open.

The kernel keeps the truth, not the files' text. A holder takes an flock on its claim; its forked children
share the open file, so the lock goes when the last of them is gone, whatever pid the text names: so it was
on the H200, where the driver went on naming a dead opener while its heir held the memory (facts: reset,
section 3). A reader that finds a claim unlocked moves it to `released/` under the time of that observation.
Only one reader can, so that every reader sees the same release.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Dict, List, Optional

from backend.agent.procfs import INITIAL_PID_NAMESPACE

DEVICE_BYTES = 4096
"""The size of a device file: enough to be mapped."""

FORGOTTEN_S = 120.0
"""A released claim is removed after this: no reading shows it any more."""


@dataclass(frozen=True)
class Claim:
    """What one process holds on one GPU.

    `used_bytes` is device memory, `pinned_bytes` is host memory that the kernel would unpin first
    (declared, never allocated). `load` from 0 to 1 is how busy it keeps the GPU, swaying a little over
    `period_s`. `release_ms` is how long the memory takes to go once the last holder is gone. The times
    are on the host's monotonic clock.
    """

    gpu: int
    pid: int
    used_bytes: int
    pinned_bytes: int = 0
    load: float = 0.0
    period_s: float = 20.0
    release_ms: int = 100
    claimed_at_s: float = 0.0
    released_at_s: Optional[float] = None


def device_path(root: str, name: str) -> str:
    """Return the path of a device file of the virtual host."""
    return os.path.join(root, "dev", name)


def lay_out(root: str, gpus: int) -> None:
    """Make the folders and the device files of a virtual host with so many GPUs."""
    for folder in ("dev", "claims", "released", "cast"):
        os.makedirs(os.path.join(root, folder), mode=0o700, exist_ok=True)
    for name in ["nvidiactl"] + ["nvidia%d" % index for index in range(gpus)]:
        with open(device_path(root, name), "ab") as file:
            file.truncate(DEVICE_BYTES)
    _lay_out_site(root)


def site_path(root: str) -> str:
    """Return where the /proc of the virtual host lies that says what kind of host it is."""
    return os.path.join(root, "site")


def _lay_out_site(root: str) -> None:
    """Describe a host of bare metal without a display."""
    names = os.path.join(site_path(root), "proc/self/ns")
    os.makedirs(names, mode=0o700, exist_ok=True)
    if not os.path.lexists(os.path.join(names, "pid")):
        os.symlink("pid:[%d]" % INITIAL_PID_NAMESPACE, os.path.join(names, "pid"))
    with open(os.path.join(site_path(root), "proc/modules"), "ab"):
        pass


def gpu_count(root: str) -> int:
    """Count the GPUs of a virtual host: nvidia0, nvidia1 and so on."""
    count = 0
    while os.path.exists(device_path(root, "nvidia%d" % count)):
        count += 1
    return count


def take(root: str, claim: Claim) -> int:
    """Write and lock a claim. Returns the open file: the claim lasts until its last copy is closed.

    It is locked before it gets its name, so that no reader can take it for released.
    """
    stamped = asdict(replace(claim, claimed_at_s=time.monotonic(), released_at_s=None))
    name = "%d.%d.%d" % (claim.gpu, claim.pid, time.monotonic_ns())
    temporary = os.path.join(root, "claims", "." + name)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, json.dumps(stamped).encode("ascii"))
    os.rename(temporary, os.path.join(root, "claims", name))
    return fd


class Ledger:
    """Reads the claims of a virtual host. What a claim says never changes, so its text is read once."""

    def __init__(self, root: str) -> None:
        self._live = os.path.join(root, "claims")
        self._released = os.path.join(root, "released")
        self._texts: Dict[str, Claim] = {}

    def on(self, gpu: int) -> List[Claim]:
        """Return the claims on a GPU, oldest first: those held, and those released not long ago."""
        prefix = "%d." % gpu
        found = {}
        for name in os.listdir(self._live):
            if name.startswith(prefix):
                claim = self._observe(name)
                if claim is not None:
                    found[name] = claim
        for entry in os.listdir(self._released):
            name, _, at_ns = entry.rpartition(".")
            if name.startswith(prefix) and name not in found:
                released = self._remembered(entry, name, int(at_ns) / 1e9)
                if released is not None:
                    found[name] = released
        return sorted(found.values(), key=lambda claim: (claim.claimed_at_s, claim.pid))

    def _observe(self, name: str) -> Optional[Claim]:
        """Return a claim that is held; move one that no process holds any more to the released ones."""
        path = os.path.join(self._live, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._text(name, fd)
        else:
            try:
                os.rename(path, os.path.join(self._released, "%s.%d" % (name, time.monotonic_ns())))
            except FileNotFoundError:
                pass  # another reader saw it first
            return None
        finally:
            os.close(fd)

    def _remembered(self, entry: str, name: str, released_at_s: float) -> Optional[Claim]:
        path = os.path.join(self._released, entry)
        try:
            if time.monotonic() - released_at_s > FORGOTTEN_S:
                os.unlink(path)
                self._texts.pop(name, None)
                return None
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None  # another reader removed it
        try:
            return replace(self._text(name, fd), released_at_s=released_at_s)
        finally:
            os.close(fd)

    def _text(self, name: str, fd: int) -> Claim:
        if name not in self._texts:
            self._texts[name] = Claim(**json.loads(os.read(fd, 65536)))
        return self._texts[name]
