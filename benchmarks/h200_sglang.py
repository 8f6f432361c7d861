"""On a machine with one NVIDIA GPU and SGLang: what the capture costs a real server, and what the extraction makes.

    python benchmarks/h200_sglang.py OUT.json [--shape qwen3-8b] [--disk FOLDER] [--budget-s 570]

Two servers with dummy weights stand beside each other on the GPU: one as the serve stage starts it, with the capture
hook, and one with the same command line without it. The same prompts go to the second, the first, the second: prefill
tokens/s off, on, off, until the last answer and until the last file: while it is on, readers of their own take and
discard the staged files. Then the whole extraction, with its files committed to a disk, beside plain synced writes to
it. With --one-server `off` is the server with the hook, which leaves requests alone that are not its run's.

OUT.json is written after every step. A step that no longer fits into the budget is left out and listed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.extraction.serving import command, installed
from backend.extraction.staging import Staging
from benchmarks.extract_pipeline import plain
from benchmarks.model_shapes import SHAPES
from benchmarks.prefill_load import RUN, Readers, load, prompts

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = {"tokens_per_s": 27_000, "samples_per_s": 50}
"""SpecForge's own figures for Qwen3-8B on one H200."""

EXTRACT_S = 75.0
"""What is kept of the budget for the extraction."""

ON_A_GPU = (
    "--load-format dummy --skip-tokenizer-init --attention-backend triton --sampling-backend pytorch "
    "--max-prefill-tokens 16384 --max-total-tokens 200000 --dtype bfloat16 --log-level warning"
)


class Results:
    """What was found, on disk after every step, and how much time is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._path, self._end = Path(given.out), time.monotonic() + given.budget_s
        self.found: dict[str, Any] = {"shape": given.shape, "one_server": given.one_server, "published": PUBLISHED}
        self.found |= {"servers": [], "points": [], "extractions": [], "left_out": []}

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def fits(self, what: str, seconds: float) -> bool:
        """Say whether a step still fits; list it where it does not."""
        if self.left_s() < seconds:
            self.found["left_out"].append(f"{what}: {self.left_s():.0f} s left of the budget")
            self.save()
            return False
        return True

    def add(self, where: str, record: dict[str, Any]) -> None:
        self.found[where].append(record)
        print(where, json.dumps(record), flush=True)
        self.save()

    def save(self) -> None:
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")


class Server:
    """A server that is started and awaited."""

    def __init__(self, name: str, port: int, argv: list[str], work: Path) -> None:
        self.name, self.port, self._log = name, port, work / f"{name}.log"
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self.began = time.monotonic()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=env | {"EIGHTZEROS_RUN": RUN}, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self, within_s: float) -> float:
        """Wait until it serves and return its seconds. Raises RuntimeError with the end of its log."""
        while time.monotonic() - self.began < within_s and self._process.poll() is None:
            if self.name == "capture" and "ready at http" in self.log():
                return time.monotonic() - self.began
            if self.name == "plain" and self._answers():
                return time.monotonic() - self.began
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not ready, status {self._process.poll()}: {self.log()[-5000:]}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/health_generate")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def servers(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return how to start each: the serve stage's own command, and what it builds, but for the hook."""
    config, points = SHAPES[given.shape]
    model = work / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    extra = shlex.split(given.arguments)
    capture = [sys.executable, "-m", "backend.extraction.main", "serve", "--model", str(model), "--points",
               ",".join(map(str, points)), "--port", str(given.port), "--mem-fraction", str(given.mem_fraction),
               "--staging-root", given.staging, "--grace-s", "5"]  # fmt: skip
    entry = ["-m", "sglang.launch_server"]
    if given.entry:
        entry = [given.entry]
        capture += ["--entry", given.entry]
    found = installed.find([sys.executable, *entry])
    wanted = command.Wanted(str(model), points, 1, given.port + 1, given.mem_fraction, extra)
    chosen = command.plan(wanted, found)
    words = command.build(wanted, found, chosen, [sys.executable, *entry], "[]")
    at = words.index("--forward-hooks")
    off = words[:at] + words[at + 2 :]
    return {"version": found.version, "adapter": chosen.adapter, "capture": [*capture, "--", *extra], "plain": off}


class Bench:
    """The measurements."""

    def __init__(self, given: argparse.Namespace, results: Results) -> None:
        self.given, self.results, self.numbers = given, results, count()
        self.config = SHAPES[given.shape][0]
        self.folder = os.path.join(given.staging, RUN)
        self.ports = {"on": given.port, "off": given.port if given.one_server else given.port + 1}

    def counters(self) -> dict[str, Any]:
        time.sleep(0.7)  # they are written twice a second
        return Staging(self.folder, RUN, "look").ranks()[0]

    def once(self, which: str, ids: list[list[int]], clients: int) -> dict[str, Any]:
        """Send the prompts to one of the servers; return what came of it."""
        session, tokens = f"s{next(self.numbers)}", sum(map(len, ids))
        staging = Staging(self.folder, RUN, session)
        names = [staging.rid(i, 0, len(one)) for i, one in enumerate(ids)]
        if which == "off":
            began, ended = load(self.ports[which], ids, clients, self.given.new, [f"off{name}" for name in names])
            return {"which": which, "seconds": round(ended - began, 3), "tokens_per_s": round(tokens / (ended - began))}
        before, readers = self.counters(), Readers(self.folder, session)
        began, answered = load(self.ports[which], ids, clients, self.given.new, names)
        taken, last = readers.finish(len(ids))
        after, ended = self.counters(), max(answered, last)
        seconds = answered - began
        more = {
            name: after[name] - before[name] for name in ("passes", "rows", "bytes", "whole", "failed", "over_bound")
        }
        return {
            "which": which, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds),
            "samples_per_s": round(len(ids) / seconds, 1),
            "tokens_per_s_to_last_file": round(tokens / (ended - began)), "taken": taken, "missing": len(ids) - taken,
            "last_file_after_last_answer_s": round(ended - answered, 3),
            "gb_per_s": round(more["bytes"] / seconds / 1e9, 3), "wait_s": round(after["wait_s"] - before["wait_s"], 3),
            "high_water_bytes_so_far": after["high_water_bytes"], **more, "error": after["error"],
        }  # fmt: skip

    def point(self, mean: int, clients: int, order: str = "off on off") -> None:
        """Measure one point: the same prompts, off, on, off."""
        if not self.results.fits(f"mean {mean}, {clients} clients", self.given.point_s * 3 + self.given.reserve_s):
            return
        ids = prompts(self.config, mean, self.given.tokens, seed=mean + clients)
        runs = [self.once(which, ids, clients) for which in order.split()]
        off = [run["tokens_per_s"] for run in runs if run["which"] == "off"]
        on = [run["tokens_per_s"] for run in runs if run["which"] == "on"]
        whole = [run["tokens_per_s_to_last_file"] for run in runs if run["which"] == "on"]
        self.results.add("points", {
            "mean": mean, "clients": clients, "samples": len(ids), "tokens": sum(map(len, ids)), "off": off, "on": on,
            "ratio": round(float(np.mean(on) / np.mean(off)), 4),
            "ratio_to_last_file": round(float(np.mean(whole) / np.mean(off)), 4),
            "ratio_of_the_off_runs": round(off[0] / off[-1], 4), "runs": runs,
        })  # fmt: skip

    def warm_up(self) -> None:
        """Have both servers compile and choose their kernels."""
        for mean in (540, 2353):
            ids = prompts(self.config, mean, self.given.tokens // 3, seed=mean)
            for which in ("off", "on"):
                self.once(which, ids, 32)

    def raw(self, mean: int, gigabytes: float) -> float:
        """Write plainly to the disk; return GB/s."""
        size = mean * self.row_bytes
        return plain(Path(self.given.disk) / "plain", max(4, int(gigabytes * 1e9 / size)), size)

    @property
    def row_bytes(self) -> int:
        """What a token takes in a shard: states in bfloat16, its id and its mask."""
        return 2 * self.config["hidden_size"] * (len(SHAPES[self.given.shape][1]) + 1) + 16

    def extraction(self, mean: int, tokens: int) -> None:
        """Extract a corpus to the disk, between two readings of the disk's own rate."""
        if not self.results.fits(f"extraction, mean {mean}", tokens / 27_000 + 15):
            return
        disk = Path(self.given.disk)
        corpus, out = disk / f"corpus{mean}.jsonl", disk / f"out{next(self.numbers)}"
        ids = prompts(self.config, mean, tokens, seed=8)
        corpus.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids))
        raw = [self.raw(mean, self.given.raw_gb)]
        before = self.counters()
        argv = [sys.executable, "-m", "backend.extraction.main", "extract", "--engine", "sglang", "--server",
                f"http://127.0.0.1:{self.given.port}", "--corpus", str(corpus), "--out", str(out),
                "--json"]  # fmt: skip
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=max(20, self.results.left_s()))
        after, lines = self.counters(), done.stdout.strip().splitlines()
        result = json.loads(lines[-1]) if lines else {"state": done.stderr[-2000:]}
        record = {"mean": mean, "exit": done.returncode, "result": result, "raw_gb_per_s": raw,
                  "high_water_bytes_so_far": after["high_water_bytes"],
                  "wait_s": round(after["wait_s"] - before["wait_s"], 3)}  # fmt: skip
        if done.returncode == 0:
            record |= self.rates(out, result)
        shutil.rmtree(out, ignore_errors=True)
        if self.results.left_s() > 15:
            raw.append(self.raw(mean, self.given.raw_gb))
        self.results.add("extractions", record)

    def extractions(self) -> None:
        """Extract short samples, then long ones."""
        self.given.reserve_s = 0.0
        for mean, share in ((540, 1.0), (2353, 0.8)):
            self.extraction(mean, int(self.given.extract_tokens * share))

    def rates(self, out: Path, result: dict[str, Any]) -> dict[str, Any]:
        """Return rates over the whole program, and from the first shard to the last."""
        lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
        entries = sorted((line for line in lines if "crc32" in line), key=lambda line: line["at"])
        span = entries[-1]["at"] - entries[0]["at"] if len(entries) > 1 else 0.0
        later = entries[1:]
        found = {name: round(result[key] / result["seconds"], 2) for name, key in
                 (("tokens_per_s", "tokens"), ("samples_per_s", "samples"), ("bytes_per_s", "bytes"))}  # fmt: skip
        if span:
            found |= {"between_shards_s": round(span, 3),
                      "between_shards_tokens_per_s": round(sum(line["tokens"] for line in later) / span),
                      "between_shards_gb_per_s": round(sum(line["bytes"] for line in later) / span / 1e9, 3),
                      "between_shards_samples_per_s": round(len(later) / span, 1)}  # fmt: skip
        return found


def measure(given: argparse.Namespace, results: Results, work: Path) -> None:
    """Start the servers, measure, and stop them."""
    how, up = servers(given, work), []
    results.found |= {"sglang": how["version"], "adapter": how["adapter"], "arguments": given.arguments}
    bench = Bench(given, results)
    try:
        for name in ["capture"] if given.one_server else ["plain", "capture"]:
            server = Server(name, given.port + (name == "plain"), how[name], work)
            up.append(server)
            results.add("servers", {"name": name, "start_s": round(server.ready(results.left_s()), 1)})
        bench.warm_up()
        if given.extract_first:
            bench.extractions()
        for load_of in given.loads.split(","):
            bench.point(*map(int, load_of.split(":")))
        if not given.extract_first:
            bench.extractions()
        low = [point for point in results.found["points"] if point["ratio"] < 0.97]
        for point in sorted(low, key=lambda one: one["ratio"]):
            bench.point(point["mean"], point["clients"], "off on off on off")
        results.found["ranks"] = Staging(bench.folder, RUN, "look").ranks()
    except Exception as problem:
        results.found["problem"] = f"{type(problem).__name__}: {problem}"
        print(results.found["problem"], flush=True)
        for server in up:
            print(server.name, server.log()[-3000:], flush=True)
    finally:
        results.save()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.stop, up))


def main() -> None:
    """Measure what fits into the budget."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out")
    words.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    words.add_argument("--one-server", action="store_true")
    words.add_argument("--budget-s", type=float, default=570.0)
    words.add_argument("--loads", default="2353:32,540:32,2353:8,540:8,2353:64,540:64", help="mean:clients, ...")
    words.add_argument("--extract-first", action="store_true")
    words.add_argument("--tokens", type=int, default=330_000, help="of one run")
    words.add_argument("--point-s", type=float, default=11.0, help="what a run may take")
    words.add_argument("--reserve-s", type=float, default=EXTRACT_S, help="kept for the extraction")
    words.add_argument("--extract-tokens", type=int, default=800_000)
    words.add_argument("--raw-gb", type=float, default=5.0)
    words.add_argument("--disk", default="/tmp/eightzeros-bench-disk")
    words.add_argument("--staging", default="/dev/shm/eightzeros-bench-sglang")
    words.add_argument("--port", type=int, default=30000)
    words.add_argument("--mem-fraction", type=float, default=0.5)
    words.add_argument("--new", type=int, choices=(0, 1), default=0, help="max_new_tokens")
    words.add_argument("--entry", default="", help="what starts the server instead of sglang.launch_server")
    words.add_argument("--arguments", default=ON_A_GPU)
    given = words.parse_args()
    results, work = Results(given), Path(given.disk)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        measure(given, results, work)
    finally:
        shutil.rmtree(given.staging, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
