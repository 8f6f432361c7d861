"""What the capture hook costs a forward pass: a GPU that computes, with the hook and without, in one run.

    python benchmarks/capture_hook.py [--rows 16384] [--prompt 2340] [--pass-ms 400] [--launches 0] [--seconds 6]
                                      [--hidden 4096] [--json OUT]

A pass is matrix products that take `--pass-ms`, or with `--launches` so many small operations, which keep the
interpreter busy and not the GPU, as a server with few clients does; then the hook's call with states of Qwen3-8B's
shape (3 points and the last hidden, bfloat16), cut into prompts. Readers in other processes check and remove what
appears. For each setting it prints the time of a run against the mean of the runs without a hook before and after
it; the last line lets the GPU compute nothing, so that it is the hook's own limit. Without a GPU it only shows that
it runs. First the states of passes that follow each other at once, in the same buffers, are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from backend.extraction.capture.config import Config
from backend.extraction.capture.hook import Capture
from backend.extraction.staging import Staging

RUN, POINTS, PASSES = "bench", [2, 18, 33], 6
FOLDER = Path("/dev/shm/eightzeros-bench")
SETTINGS: list[dict[str, float]] = [{}, {"writers": 2}, {"slot_bytes": 16 << 20, "slots": 128}]
READERS = 4


class Stack:
    """A layer stack that captures what it is asked to."""

    def __init__(self) -> None:
        self.layers_to_capture: list[int] = []
        self.layers = [None] * 36


def read(session: str, number: int, ready: Any, stop: Any) -> None:
    """Remove every state file of a session that falls to this reader, until it is told to stop."""
    staging, wanted = Staging(str(FOLDER), RUN, session), set()
    ready.wait()
    while not (stop.is_set() and not wanted):
        wanted = {rid for rid in staging.look().whole if int(rid.split("-")[2]) % READERS == number}
        for rid in wanted:
            found = staging.open(rid)
            assert found.ids[-1] == found.ids[0] + len(found.ids) - 1
            found.discard()
        time.sleep(0.001)


class Load:
    """A model that is all matrix products, with states that it hands to the hook."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.given, self.size = given, 8192 if self.device.type == "cuda" else 64
        self.a = torch.randn(self.size, self.size, device=self.device, dtype=torch.bfloat16)
        shape = (given.rows, given.hidden)
        self.points = [torch.randn(shape, device=self.device).bfloat16() for _ in POINTS]
        self.last = torch.randn(shape, device=self.device).bfloat16()
        self.ids = torch.arange(given.rows, device=self.device)
        self.small = torch.zeros(64, device=self.device)
        self.products = 0 if given.launches else max(1, round(given.pass_ms / self._product_ms()))

    def _product_ms(self) -> float:
        for _ in range(3):
            self.a @ self.a
        self.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            self.a @ self.a
        self.synchronize()
        return (time.perf_counter() - began) * 50

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compute(self, really: bool = True) -> None:
        """Do what a pass does before its states are there."""
        for _ in range(self.products if really else 0):
            self.a @ self.a
        for _ in range(self.given.launches if really else 0):
            self.small.add_(1)

    def lengths(self) -> list[int]:
        """Return the prompts of a pass."""
        whole, rest = divmod(self.given.rows, self.given.prompt)
        return [self.given.prompt] * whole + ([rest] if rest else [])

    def run(self, hook: Capture | None, session: str, compute: bool = True) -> tuple[float, int, float]:
        """Run passes; return their time, their number and the seconds spent within the hook's call."""
        stack, passes, within, index, lengths = Stack(), 0, 0.0, 0, self.lengths()
        for output in (self.last, (self.last, self.points)) if hook else ():
            hook(stack, (self._batch([]),), output)  # the server's own warm-up
        self.synchronize()
        began = time.perf_counter()
        while time.perf_counter() - began < self.given.seconds:
            self.compute(compute)
            if hook is not None:
                batch = self._batch([f"{RUN}-{session}-{index + i}-0-{n}" for i, n in enumerate(lengths)])
                index, called = index + len(lengths), time.perf_counter()
                output = ([point + 0 for point in self.points], self.last + 0)
                hook(stack, (batch,), (output[1], output[0]))
                within += time.perf_counter() - called
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the scheduler waits for a pass's tokens, not for copies
            passes += 1
        return time.perf_counter() - began, passes, within

    def _batch(self, rids: list[str]) -> Any:
        mode = SimpleNamespace(is_extend=lambda: True)
        lengths = self.lengths() if rids else []
        return SimpleNamespace(
            forward_mode=mode, rids=rids, input_ids=self.ids, extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=[0] * len(lengths),
        )  # fmt: skip


def capture(settings: dict[str, float]) -> Capture:
    """Make a hook."""
    raw = {"run": RUN, "folder": str(FOLDER), "points": POINTS, "bound_bytes": 16 << 30, **settings}
    return Capture(Config.of(raw), rank=0, writes=True)


def check(load: Load) -> None:
    """Compare the states of passes that overlap: each fills the same buffers as soon as the hook has returned."""
    hook, stack, staging = capture({"slot_bytes": 8 << 20}), Stack(), Staging(str(FOLDER), RUN, "check")
    hook(stack, (load._batch([]),), load.last)
    names, lengths = [], load.lengths()
    buffers = [torch.empty_like(load.last) for _ in range(len(POINTS) + 1)]
    for number in range(PASSES):
        for place, (buffer, source) in enumerate(zip(buffers, [*load.points, load.last], strict=True)):
            buffer.copy_(torch.roll(source, 1 + number + place, dims=0))
        rids = [staging.rid(number * len(lengths) + i, 0, n) for i, n in enumerate(lengths)]
        hook(stack, (load._batch(rids),), (buffers[-1], list(buffers[:-1])))
        names.append(rids)
    end = time.monotonic() + 60
    wanted = {rid for rids in names for rid in rids}
    while not wanted <= set(staging.look().whole) and time.monotonic() < end:
        time.sleep(0.01)
    for number, rids in enumerate(names):
        compare(load, staging, rids, number)
    assert hook.counters.failed == 0, hook.counters.error
    hook.close()


def compare(load: Load, staging: Staging, rids: list[str], number: int) -> None:
    """Compare one pass's files with what was on the device in that pass."""
    at, sources = 0, [*load.points, load.last]
    *points, last = [torch.roll(source, 1 + number + place, dims=0) for place, source in enumerate(sources)]
    for rid, rows in zip(rids, load.lengths(), strict=True):
        found, part = staging.open(rid), slice(at, at + rows)
        aux = torch.cat([point[part] for point in points], dim=-1).cpu().view(torch.uint16)
        assert torch.equal(torch.from_numpy(found.aux.copy()), aux)
        assert torch.equal(torch.from_numpy(found.last.copy()), last[part].cpu().view(torch.uint16))
        assert found.ids.tolist() == list(range(at, at + rows))
        found.discard()
        at += rows


def measure(load: Load, settings: dict[str, float], number: int, compute: bool = True) -> dict[str, Any]:
    """Run without, with and without the hook; return what it cost."""
    off = [load.run(None, "")] if compute else []
    hook, session, context = capture(settings), f"s{number}", multiprocessing.get_context("spawn")
    ready, stop = context.Barrier(READERS + 1), context.Event()
    readers = [context.Process(target=read, args=(session, i, ready, stop)) for i in range(READERS)]
    for reader in readers:
        reader.start()
    ready.wait(60)
    seconds, passes, within = load.run(hook, session, compute)
    stop.set()
    for reader in readers:
        reader.join()
    counters = hook.counters
    hook.close()
    off += [load.run(None, "")] if compute else []
    per_pass = seconds / passes
    return {
        "settings": settings,
        "passes": passes,
        "tokens_per_s": round(load.given.rows / per_pass),
        "gb_per_s": round(counters.bytes / seconds / 1e9, 3),
        "ratio": round(sum(s / n for s, n, _ in off) / len(off) / per_pass, 4) if off else None,
        "ratio_of_the_off_runs": round(off[0][0] / off[0][1] / (off[1][0] / off[1][1]), 4) if off else None,
        "hook_ms_a_pass": round(within / passes * 1000, 2),
        "wait_s": round(counters.wait_s, 3),
        "high_water_bytes": counters.high_water_bytes,
        "failed": counters.failed,
        "error": counters.error,
    }


def main() -> None:
    """Check, then measure every setting."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rows", type=int, default=16384)
    words.add_argument("--prompt", type=int, default=2340)
    words.add_argument("--launches", type=int, default=0)
    words.add_argument("--pass-ms", type=float, default=400.0)
    words.add_argument("--seconds", type=float, default=6.0)
    words.add_argument("--hidden", type=int, default=4096)
    words.add_argument("--json", default="")
    given = words.parse_args()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    try:
        load = Load(given)
        name = torch.cuda.get_device_name() if load.device.type == "cuda" else "CPU"
        what = f"{given.rows} rows, {load.products} products and {given.launches} launches a pass"
        print(f"{name}, torch {torch.__version__}, {what}", flush=True)
        check(load)
        print("states are equal bit by bit", flush=True)
        results = []
        for number, settings in enumerate([*SETTINGS, {}]):
            results.append(measure(load, settings, number, compute=number < len(SETTINGS)))
            print(json.dumps(results[-1]), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps({"device": name, "torch": torch.__version__, "runs": results}))
    finally:
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
