"""What the console costs: 8 hosts x 8 GPUs at 4 Hz in a terminal of 202x60, beside a wall of stock widgets.

    python benchmarks/wall.py [--seconds 20] [--out FILE]

Each side runs in a process of its own under a pty whose output is read as fast as it comes. Every value of every GPU
changes four times a second. Measured are the CPU time of the process in percent of one core, the bytes a second that
reach the terminal, and the time from a key in the terminal to the first byte that it changes (p50 and p95). The
ratio to the stock widgets comes from the same run on the same machine; the naive side may not keep up, so its
paints a second are counted too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOSTS, GPUS, HZ = 8, 8, 4
ROWS, COLUMNS = 60, 202
WARM_S = 4.0
KEYS = (b"\x1b[C", b"\x1b[D")
"""Right and left: each moves the cursor by one GPU and back."""


def ours() -> None:
    """Run the console on a made-up fleet that changes every value four times a second."""
    from backend.config import Console
    from tests.fakefleet import FakeFleet, config, make_progress, make_run
    from tui.app import EightZeros

    fleet = FakeFleet(config(HOSTS, console=Console(fps=HZ)))
    for _ in range(240):
        fleet.tick()
    fleet.hosts["gpu-01"].runs["e"] = make_run("e", "extract", progress=make_progress())

    class Fed(EightZeros):
        """Feeds the fleet on the same clock as the frames."""

        def on_ready(self) -> None:
            self.set_interval(1 / HZ, self.feed)

        def feed(self) -> None:
            fleet.tick()
            count("fed")

    Fed(fleet).run()


def stock() -> None:
    """Run the same wall as anybody would write it first: a container of stock widgets for each GPU."""
    from textual.app import App, ComposeResult
    from textual.containers import Grid, Vertical
    from textual.widgets import Label, ProgressBar, Sparkline, Static

    from tests.fakefleet import FakeFleet, config

    fleet = FakeFleet(config(HOSTS))

    class Pane(Vertical, can_focus=True):
        """One GPU."""

        def compose(self) -> ComposeResult:
            yield Label(classes="name")
            yield ProgressBar(total=100, show_eta=False, show_percentage=False)
            yield Sparkline([0.0] * 22)
            yield Static(classes="power")

    class Wall(App[None]):
        """All GPUs."""

        CSS = "Grid { grid-size: 8; } Pane { height: 5; } Pane:focus { background: $primary; } Sparkline { height: 1; }"
        BINDINGS = [("right", "app.focus_next", ""), ("left", "app.focus_previous", "")]  # noqa: RUF012

        def compose(self) -> ComposeResult:
            with Grid():
                for _ in range(HOSTS * GPUS):
                    yield Pane()

        def on_mount(self) -> None:
            self.panes = list(self.query(Pane))
            self.panes[0].focus()
            self.set_interval(1 / HZ, self.feed)

        def feed(self) -> None:
            fleet.tick()
            hosts = list(fleet.hosts.values())
            for at, pane in enumerate(self.panes):
                host, index = hosts[at // GPUS], at % GPUS
                used, load = host.reading(index, "memory_used_bytes"), host.reading(index, "utilisation_percent")
                pane.query_one(".name", Label).update(f"{index} OK {load.number():.0f}% {used.number() or 0:.0f} B")
                pane.query_one(ProgressBar).update(progress=load.number())
                pane.query_one(Sparkline).data = [v or 0.0 for v in host.history[index]["utilisation_percent"]][-22:]
                pane.query_one(".power", Static).update(f"{host.reading(index, 'power_w').number():.0f} W")
            count("fed")

    Wall().run()


def count(name: str) -> None:
    """Tell the measuring process that a round was fed: one byte on the pipe that it passed."""
    pipe = int(os.environ.get("WALL_PIPE", "-1"))
    if pipe >= 0:
        os.write(pipe, name[:1].encode())


class Terminal:
    """A process in a pty, and what came out of it."""

    def __init__(self, side: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.rounds_fd, writer = os.pipe()
        os.set_blocking(self.rounds_fd, False)
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "WALL_PIPE": str(writer)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        for name in ("NO_COLOR", "SSH_CONNECTION", "TEXTUAL_FPS"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", side],
            stdin=slave, stdout=slave, stderr=slave, env=env, pass_fds=(writer,), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        os.close(writer)
        self.bytes = 0

    def read(self, timeout_s: float) -> int:
        """Read what is there within a time; return how much."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, timeout_s))
        if not ready:
            return 0
        size = len(os.read(self.master, 1 << 20))
        self.bytes += size
        return size

    def read_for(self, seconds: float) -> None:
        """Read for a time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def rounds(self) -> int:
        """Return how many rounds of values were fed since the last call."""
        try:
            return len(os.read(self.rounds_fd, 1 << 20))
        except BlockingIOError:
            return 0

    def cpu_s(self) -> float:
        """Return the CPU time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process and close the pty."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.rounds_fd)


def key_to_paint_ms(terminal: Terminal, key: bytes) -> float:
    """Press a key in a quiet moment and wait for the first byte that follows it.

    A frame that the clock painted anyway would be taken for the answer, so the key waits until a burst of output has
    ended; a side that never falls quiet for 20 ms is measured as it is.
    """
    end = time.monotonic() + 1.0
    while time.monotonic() < end and terminal.read(0.02):
        pass
    began = time.monotonic()
    os.write(terminal.master, key)
    while not terminal.read(5.0):
        if time.monotonic() - began > 5.0:
            break
    return (time.monotonic() - began) * 1000


def measure(side: str, seconds: float) -> dict[str, Any]:
    """Run one side and measure it."""
    terminal = Terminal(side)
    try:
        terminal.read_for(WARM_S)
        terminal.rounds()
        before, began, terminal.bytes = terminal.cpu_s(), time.monotonic(), 0
        terminal.read_for(seconds)
        wall_s = time.monotonic() - began
        cpu, bytes_, rounds = terminal.cpu_s() - before, terminal.bytes, terminal.rounds()
        delays = sorted(key_to_paint_ms(terminal, KEYS[number % 2]) for number in range(40))
    finally:
        terminal.close()
    return {
        "cpu_percent": round(cpu / wall_s * 100, 1),
        "bytes_per_s": round(bytes_ / wall_s),
        "rounds_per_s": round(rounds / wall_s, 2),
        "cpu_ms_per_pane_update": round(cpu * 1000 / max(1, rounds * HOSTS * GPUS), 3),
        "key_to_paint_p50_ms": round(delays[len(delays) // 2], 1),
        "key_to_paint_p95_ms": round(delays[int(len(delays) * 0.95)], 1),
    }


def main() -> None:
    """Measure both sides and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=("ours", "stock"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        return ours() if chosen.side == "ours" else stock()
    found = {side: measure(side, chosen.seconds) for side in ("ours", "stock")}
    ratios = {
        name: round(found["stock"][name] / max(1e-9, found["ours"][name]), 1)
        for name in ("cpu_ms_per_pane_update", "key_to_paint_p95_ms")
    }
    result = {
        "what": f"{HOSTS} hosts x {GPUS} GPUs at {HZ} Hz, terminal {COLUMNS}x{ROWS}, every value changes",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load1": round(os.getloadavg()[0], 2),
        **found,
        "stock_over_ours": ratios,
    }
    for side in ("ours", "stock"):
        print(side.ljust(7), "  ".join(f"{name} {value}" for name, value in found[side].items()))
    print("stock over ours:", "  ".join(f"{name} {value}x" for name, value in ratios.items()))
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
