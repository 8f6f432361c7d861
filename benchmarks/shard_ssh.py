"""What it costs a host to show a shard of 2 GB over a live SSH connection, beside torch.load(mmap=True), in one run.

    python benchmarks/shard_ssh.py [RESULT.json]

A real OpenSSH server on loopback and the product's own Fleet. All that the host does for it (sshd, the agent, its
workers) is in one control group, whose CPU time is exact, so it needs root; bytes are counted on the TCP connection,
encryption and telemetry included. Three kinds of asks:

- the first of a fresh connection, which has been idle for some seconds: the agent's shard code is not loaded yet;
- later ones on a connection that is idle between them, as an operator asks;
- later ones back to back, as a cursor asks that runs down a folder.

What the idle connection costs by itself (telemetry at 1 Hz of the 8 GPUs of the NVML double) is measured for as long
and subtracted from the CPU time of the first two. torch is asked for the same: keys, types and shapes, by a fresh
process, which imports it, and by one that has imported it and loaded the file before. Figures are medians.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backend.config import Config, Host  # noqa: E402
from backend.fleet import Fleet  # noqa: E402
from tests.nvml.double import NvmlDouble  # noqa: E402
from tests.sshd import Sshd  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_BYTES = 2_000_000_000
HIDDEN = 7168
CONNECTIONS, SPACED, BURST = 8, 8, 200
SETTLED_S, SPACE_S = 4.0, 2.0
WRITE = """
import sys, torch
tokens, hidden = int(sys.argv[2]), int(sys.argv[3])
states = torch.randn(1, tokens, 4 * hidden).to(torch.bfloat16)
torch.save({"input_ids": torch.arange(tokens), "loss_mask": torch.ones(tokens, dtype=torch.int64),
            "aux_hidden_state": states[:, :, hidden:].clone(), "hidden_state": states[:, :, :hidden].clone()},
           sys.argv[1])
"""
LOOK = (
    "{key: (value.dtype, tuple(value.shape)) for key, value in torch.load(name, mmap=True, weights_only=True).items()}"
)
FRESH = f"import sys, torch; name = sys.argv[1]; assert len({LOOK}) == 4"
WARM = f"""
import sys, time, torch
name = sys.argv[1]
for _ in range(50):
    began, cpu = time.perf_counter(), time.process_time()
    {LOOK}
    print(time.perf_counter() - began, time.process_time() - cpu)
"""


class CpuMeter:
    """A control group, of either version, that counts the CPU time of the processes in it."""

    def __init__(self) -> None:
        one = Path("/sys/fs/cgroup/cpuacct")
        self._old = one.is_dir()
        top = one if self._old else Path("/sys/fs/cgroup")
        self._folder = top / f"eightzeros-bench-{os.getpid()}"
        self._folder.mkdir()

    def add(self, pid: int) -> None:
        """Count a process and all that it starts from now on."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def ms(self) -> float:
        """Return the CPU time so far in milliseconds."""
        if self._old:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e6
        [used] = [
            line for line in (self._folder / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec")
        ]
        return int(used.split()[1]) / 1e3

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        self._folder.rmdir()


class Proxy(threading.Thread):
    """Passes TCP connections on to a port, and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._to, self.moved = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._other: dict[socket.socket, socket.socket] = {}

    def run(self) -> None:
        """Pass on for ever."""
        while True:
            for ready in select.select([self._listener, *self._other], [], [])[0]:
                if ready is self._listener:
                    client, server = ready.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                    for each in (client, server):
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._other.update({client: server, server: client})
                elif ready in self._other:
                    self._pass(ready)

    def _pass(self, ready: socket.socket) -> None:
        try:
            data = ready.recv(1 << 16)
            self._other[ready].sendall(data)
        except OSError:
            data = b""
        self.moved += len(data)
        if not data:
            other = self._other.pop(ready)
            del self._other[other]
            ready.close()
            other.close()


class Ask:
    """Asks for the file, and notes of each ask what it cost: CPU and wall in ms, bytes moved."""

    def __init__(self, path: Path, meter: CpuMeter, proxy: Proxy) -> None:
        self._path, self._meter, self._proxy = path, meter, proxy

    def cost(self, way: Callable[[], object]) -> dict[str, float]:
        """Return what happens while `way` runs costs the host, and what it moves."""
        cpu, moved, began = self._meter.ms(), self._proxy.moved, time.perf_counter()
        way()
        wall = time.perf_counter() - began
        return {"cpu_ms": self._meter.ms() - cpu, "wall_ms": wall * 1e3, "bytes": self._proxy.moved - moved}

    def show(self, fleet: Fleet) -> dict[str, float]:
        """Ask once."""

        def way() -> None:
            told = fleet.show_shard("gpu-01", str(self._path)).result(30)
            assert told["ok"] and len(told["entries"]) == 4, told

        return self.cost(way)

    def apart(self, fleet: Fleet) -> dict[str, float]:
        """Ask once, and count the CPU until the host is idle again, less what an idle connection costs in that time."""
        idle = self.cost(lambda: time.sleep(SPACE_S))
        asked: list[dict[str, float]] = []

        def way() -> None:
            asked.append(self.show(fleet))
            time.sleep(SPACE_S - asked[0]["wall_ms"] / 1e3)

        whole = self.cost(way)
        return {**asked[0], "cpu_ms": whole["cpu_ms"] - idle["cpu_ms"]}


def over_ssh(folder: Path, path: Path) -> dict[str, list[dict[str, float]]]:
    """Ask in the three ways."""
    with NvmlDouble(gpus=8, tmp_path=folder) as nvml:
        server, meter = Sshd(folder, "MaxSessions 1", environment=nvml.env), CpuMeter()
        meter.add(server.process.pid)
        proxy = Proxy(server.port)
        proxy.start()
        ssh = Path(os.environ["HOME"]) / ".ssh"
        ssh.mkdir(mode=0o700)
        (ssh / "config").write_text(server.config("gpu-01").replace(f"Port {server.port}", f"Port {proxy.port}"))
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{proxy.port} {server.host_public}\n")
        config, ask = Config(hosts={"gpu-01": Host(address="gpu-01", python=sys.executable)}), Ask(path, meter, proxy)
        found: dict[str, list[dict[str, float]]] = {"first": [], "later, idle between": [], "later, back to back": []}
        try:
            for number in range(CONNECTIONS + 1):
                with Fleet(config) as fleet:
                    fleet.ready("gpu-01", 30).result()
                    time.sleep(SETTLED_S)
                    first = ask.apart(fleet)
                    if number == 0:  # it also wrote the agent to the host, and the host's Python its bytecode
                        found["first after the install"] = [first]
                        continue
                    found["first"].append(first)
                    if number == CONNECTIONS:
                        found["later, idle between"] = [ask.apart(fleet) for _ in range(SPACED)]
                        found["later, back to back"] = [ask.show(fleet) for _ in range(BURST)]
        finally:
            server.stop()
            time.sleep(0.5)
            meter.close()
    return found


def by_torch(path: Path) -> dict[str, dict[str, float]]:
    """Ask torch, fresh and warm."""
    fresh = []
    for _ in range(5):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", FRESH, str(path)], check=True)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    done = subprocess.run([sys.executable, "-c", WARM, str(path)], check=True, capture_output=True, text=True)
    warm = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    return {
        name: {"wall_ms": _median([one[0] for one in rounds]) , "cpu_ms": _median([one[1] for one in rounds])}
        for name, rounds in (("fresh process", [(w * 1e3, c * 1e3) for w, c in fresh]),
                             ("warm", [(w * 1e3, c * 1e3) for w, c in warm]))
    }  # fmt: skip


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def main(result: Path | None) -> None:
    """Write the file, ask, print, and keep the figures where a file is named."""
    with tempfile.TemporaryDirectory(prefix="eightzeros-ssh-") as name:
        folder, path = Path(name), Path(name) / "data_0.ckpt"
        os.environ["HOME"] = f"{name}/console"
        os.mkdir(os.environ["HOME"])
        tokens = FILE_BYTES // (4 * HIDDEN * 2)
        subprocess.run([sys.executable, "-c", WRITE, str(path), str(tokens), str(HIDDEN)], check=True)
        (folder / "sshd").mkdir()
        found = over_ssh(folder / "sshd", path)
        record = {
            "file_bytes": path.stat().st_size, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
            "python": sys.version.split()[0],
            "over_ssh": {
                way: {"asks": len(asks), **{what: _median([ask[what] for ask in asks]) for what in asks[0]},
                      "most_cpu_ms": round(max(ask["cpu_ms"] for ask in asks), 2),
                      "most_bytes": max(ask["bytes"] for ask in asks)}
                for way, asks in found.items()
            },
            "torch.load(mmap=True)": by_torch(path),
        }  # fmt: skip
    print(json.dumps(record, indent=1))
    if result is not None:
        result.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
