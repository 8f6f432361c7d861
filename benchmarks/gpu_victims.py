"""Processes that hold a GPU in the ways that a reset meets, by the driver's library alone: one is there in a second.

Run as a program it is the victim, and says `{"pid", "heir"}` once it holds. `torch_victim` holds by torch instead.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH = """
import json, os, signal, sys, time, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = [torch.ones(2**28, dtype=torch.float32, device="cuda") for _ in range(int(sys.argv[1]))]
torch.cuda.synchronize()
heir = os.fork()
if heir == 0:
    time.sleep(600)
    os._exit(0)
print(json.dumps({"pid": os.getpid(), "heir": heir}), flush=True)
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""
BUSY = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 words)
{
    .reg .pred %p;
    .reg .b32 %n<6>;
    .reg .b64 %a<4>;
    ld.param.u64 %a1, [words];
    mov.u32 %n1, %ctaid.x;
    mov.u32 %n2, %ntid.x;
    mov.u32 %n3, %tid.x;
    mad.lo.u32 %n1, %n1, %n2, %n3;
    mov.u32 %n4, 0;
again:
    mad.lo.u32 %n1, %n1, 1664525, 1013904223;
    add.u32 %n4, %n4, 1;
    setp.lt.u32 %p, %n4, 200000;
    @%p bra again;
    cvta.to.global.u64 %a1, %a1;
    st.global.u32 [%a1], %n1;
    ret;
}
"""
GB = 10**9
PIECE_BYTES = 10 * GB


@dataclass
class Victim:
    """A started victim; `heir` is a child that shares its device files, where it has one."""

    process: subprocess.Popen[str]
    pid: int
    heir: int | None
    start_s: float

    def end(self) -> None:
        """Kill what is left of it."""
        self.process.kill()
        self.process.wait()
        if self.heir is not None and Path(f"/proc/{self.heir}/exe").exists():
            os.kill(self.heir, signal.SIGKILL)

    def left(self) -> list[int]:
        """Return its processes that still run; a zombie does not."""
        self.process.poll()
        return [pid for pid in (self.pid, self.heir) if pid is not None and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(*options: str, env: dict[str, str] | None = None) -> Victim:
    """Start a victim of this program with options, and wait until it holds."""
    return _started([sys.executable, str(Path(__file__).resolve()), *options], env)


def torch_victim(folder: Path, gigabytes: int) -> Victim:
    """Start a torch process that multiplies, ignores SIGTERM and has a forked heir."""
    path = folder / "victim.py"
    path.write_text(TORCH)
    return _started([sys.executable, str(path), str(gigabytes)], None)


def _started(words: list[str], env: dict[str, str] | None) -> Victim:
    began = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
                               start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the victim ended at once, status {process.wait()}: {words}")
    said = json.loads(line)
    return Victim(process, said["pid"], said["heir"], round(time.monotonic() - began, 2))


class Cuda:
    """The driver's library, each call of which must succeed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.ask("cuInit", 0)
        self.ask("cuDeviceGet", ctypes.byref(device), 0)
        self.ask("cuCtxCreate_v2", ctypes.byref(context), 0, device)

    def ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: error {code}")

    def hold(self, count: int) -> int:
        at = ctypes.c_uint64()
        self.ask("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(count))
        self.ask("cuMemsetD32_v2", at, ctypes.c_uint(1), ctypes.c_size_t(count // 4))
        return at.value

    def pin(self, count: int) -> None:
        at = ctypes.c_void_p()
        self.ask("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(count), ctypes.c_uint(0))

    def spin(self, at: int) -> None:
        """Keep kernels running for ever."""
        module, kernel, words = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(at)
        self.ask("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(BUSY))
        self.ask("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin")
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        while True:
            self.ask("cuLaunchKernel", kernel, 2048, 1, 1, 256, 1, 1, 0, None, arguments, None)
            self.ask("cuCtxSynchronize")


def _pieces(gigabytes: float) -> list[int]:
    """Split what is to be held: one allocation of 120 GB may not fit where several do."""
    left, found = int(gigabytes * GB), []
    while left > 0:
        found.append(min(left, PIECE_BYTES))
        left -= found[-1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device-gb", type=float, default=1.0)
    parser.add_argument("--pinned-gb", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--heir", action="store_true", help="fork a child in a session of its own, and end")
    options = parser.parse_args()
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cuda = Cuda()
    held = [cuda.hold(count) for count in _pieces(options.device_gb)]
    for count in _pieces(options.pinned_gb):
        cuda.pin(count)
    cuda.ask("cuCtxSynchronize")
    opener, heir = os.getpid(), None
    if options.heir:
        heir = os.fork()
        if heir == 0:
            os.setsid()
            while True:
                signal.pause()
    print(json.dumps({"pid": opener, "heir": heir}), flush=True)
    if options.heir:
        os.kill(opener, signal.SIGKILL)
    if options.busy:
        cuda.spin(held[0])
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
