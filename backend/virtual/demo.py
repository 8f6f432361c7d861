"""The whole chain on a virtual host, unattended: extract, be killed, resume, inspect, kill and verify.

It goes through the same Fleet as the console. What it reports is what the host answered; the test of it believes none
of that and looks for itself, which is what `keep` leaves everything for.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.agent.files import write_json
from backend.fleet import Fleet, LinkState
from backend.shardfmt import layout
from backend.virtual import belongings
from backend.virtual.corpus import CONSOLE_TOKENS, HEADLESS_TOKENS
from backend.virtual.host import NAME, VirtualHost
from backend.wire import CLEAN, GIB, LIMITED, Receipt, Refused, Run, plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from backend.fleet import HostState

OK, FAILED, USAGE = 0, 1, 2
LEAST_SAMPLES = 8
"""Fewer are done before a kill can come between."""

READY_S, RUN_S, SHORT_S = 60.0, 600.0, 120.0
POLL_S = 0.02
KILLED = -9


class DemoFailed(Exception):
    """The chain did not do what it should; the text says what."""


TROUBLE = (DemoFailed, Refused, ConnectionError, TimeoutError, OSError)
"""What may go wrong on a virtual host as on a real one; everything else is a fault of this program."""


def run_headless(samples: int, keep: Path | None, *, as_json: bool = False) -> int:
    """Run the chain and print how it went: progress on stderr, with `as_json` one JSON object on stdout.

    Returns 0 only where every sample is there once, after a kill and a resume, and every GPU is clean; 1 where not,
    2 where the arguments are of no use.
    """
    if samples < LEAST_SAMPLES:
        _complain(f"{samples} samples are done before a kill can come between: take {LEAST_SAMPLES} or more")
        return USAGE
    try:
        with tidy_end(), folder(keep) as place, VirtualHost(place, samples, HEADLESS_TOKENS) as host:
            result = Rehearsal(host).run()
    except FileExistsError as error:
        _complain(str(error))
        return USAGE
    except TROUBLE as error:
        result = {"virtual": True, "ok": False, "error": str(error) or type(error).__name__}
        _complain(result["error"])
    if keep is None:
        result["receipt"] = ""  # it lay in the folder that is gone
    if as_json:
        print(json.dumps(result), flush=True)
    return OK if result["ok"] else FAILED


def _complain(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


@contextmanager
def fleet(samples: int, keep: Path | None = None) -> Iterator[Fleet]:
    """Put up a virtual host and give a Fleet for it, not started: the console starts and stops it.

    Raises FileExistsError where `keep` holds anything.
    """
    with tidy_end(), folder(keep) as place, VirtualHost(place, samples, CONSOLE_TOKENS) as host:
        ours = Fleet(host.config(), archives=host.archive)
        try:
            yield ours
        finally:
            ours.stop()


@contextmanager
def tidy_end() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the demo as an exception does, so that it takes everything down."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def folder(keep: Path | None) -> Iterator[Path]:
    """Give the demo's folder: a temporary one, or `keep`. Raises FileExistsError where that holds anything."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="eightzeros-demo-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    keep.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise FileExistsError(f"{keep} is not empty; name a new folder")
    yield keep


class Rehearsal:
    """One run of the chain on one virtual host."""

    def __init__(self, host: VirtualHost) -> None:
        self._host = host
        self._fleet = Fleet(host.config(), archives=host.archive)
        self._began = time.monotonic()
        self._found: dict[str, Any] = {"virtual": True, "ok": False}

    def run(self) -> dict[str, Any]:
        """Do it all. Raises DemoFailed at the first thing that is not as it should be."""
        try:
            with self._fleet:
                self._connect()
                self._extract()
                self._inspect()
                self._reset()
            self._found["ok"] = self._as_it_should_be()
        finally:
            self._found["seconds"] = round(time.monotonic() - self._began, 1)
            self._leave_behind()
        return self._found

    def _as_it_should_be(self) -> bool:
        found = self._found
        passed = (CLEAN, LIMITED) if self._host.config().hosts[NAME].accept_limited else (CLEAN,)
        whole: bool = found["samples"] == found["shards"] == self._host.samples
        return whole and found["verdict"] in passed and found["resumed"] is True

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _connect(self) -> None:
        state = self._fleet.ready(NAME, READY_S).result()
        _must(state.link.state is LinkState.LIVE, f"the host refused: {state.link.reason}")
        used = self._fleet.wait(lambda: _memory_used(state), READY_S).result()
        self._found["gpus"] = len(used)
        self._say(f"live: {len(used)} virtual GPUs, {sum(used) / GIB:,.0f} GiB held by real processes")

    # --- extract, kill, resume ---

    def _extract(self) -> None:
        first = self._fleet.launch(NAME, "extract").result(SHORT_S)
        self._say(f"launched {first.id}: {self._host.samples} samples, {self._host.tokens:,} tokens")
        self._kill_at_a_third(first)
        ended = self._fleet.run_ended(NAME, first.id, RUN_S).result()
        _must(ended.exit_code == KILLED, f"the killed extraction ended with {ended.exit_code}, not {KILLED}")
        committed = len(self._journal())
        self._say(f"it ended with {ended.exit_code}; {committed} samples were committed")
        second = self._fleet.launch(NAME, "extract").result(SHORT_S)
        self._say(f"launched {second.id}: the same command, which resumes")
        ended = self._watch(second)
        progress = ended.progress
        _must(ended.exit_code == 0, f"the resumed extraction ended with {ended.exit_code}: {ended.reason}")
        if progress is None:
            raise DemoFailed("the resumed extraction told no progress")
        resumed = progress.samples_resumed
        _must(resumed == committed, f"{resumed} samples were resumed, {committed} had been committed")
        self._found.update(
            samples=progress.samples_done, tokens=progress.tokens_done, bytes=progress.bytes_written,
            resumed=resumed > 0, samples_resumed=resumed, runs=[first.id, second.id], killed_run=first.id,
        )  # fmt: skip

    def _kill_at_a_third(self, run: Run) -> None:
        """Kill the extraction itself, not its supervisor, once a third is safely written."""
        end = time.monotonic() + RUN_S
        while len(self._journal()) < self._host.samples / 3:
            ended = self._fleet.hosts[NAME].runs[run.id].exit_code is not None
            _must(not ended and time.monotonic() < end, "the extraction ended before a third of it was there")
            time.sleep(POLL_S)
        _must(belongings.kill(run.pid, run.pid_start), "the extraction was gone before it could be killed")
        self._found["extraction_killed"] = {"pid": run.pid, "start_ticks": run.pid_start, "run": run.id}
        self._say(f"killed process {run.pid}, the extraction, with SIGKILL")

    def _journal(self) -> list[bytes]:
        """Return the committed samples' lines: whole ones, after the header."""
        path = self._host.out / layout.JOURNAL_NAME
        return path.read_bytes().split(b"\n")[1:-1] if path.exists() else []

    def _watch(self, run: Run) -> Run:
        """Follow a run to its end, with a line of progress every few seconds."""
        ended = self._fleet.run_ended(NAME, run.id, RUN_S)
        told_at = time.monotonic()
        while not ended.done():
            progress = self._fleet.hosts[NAME].runs[run.id].progress
            if progress is not None and time.monotonic() - told_at > 3.0:
                told_at = time.monotonic()
                self._say(f"{progress.samples_done} of {progress.samples_total} samples, "
                          f"{progress.tokens_per_s:,.0f} tokens/s")  # fmt: skip
            time.sleep(POLL_S)
        return ended.result()

    # --- inspect ---

    def _inspect(self) -> None:
        """Count the shards as the host lists them, and look into the first, the middle and the last."""
        files = []
        for group in self._listed(self._host.out, "folder"):
            files += [f"{group}/{name}" for name in self._listed(self._host.out / group, "shard")]
        expected = [layout.shard_path(index) for index in range(self._host.samples)]
        _must(
            sorted(files) == sorted(expected),
            f"{len(files)} shards are listed, {len(expected)} were expected",
        )
        looked_at = sorted({0, len(expected) // 2, len(expected) - 1})
        for number in looked_at:
            shown = self._fleet.show_shard(NAME, str(self._host.out / expected[number])).result(SHORT_S)
            keys = [entry["key"] for entry in shown["entries"]]
            _must(
                shown["ok"] and sorted(keys) == sorted(layout.CANONICAL_KEYS),
                f"{expected[number]}: {shown['notes']}",
            )
        self._found["shards"] = len(files)
        self._say(f"{len(files)} shards listed, {len(looked_at)} looked into: whole")

    def _listed(self, path: Path, kind: str) -> list[str]:
        listing = self._fleet.list_shards(NAME, str(path)).result(SHORT_S)
        _must(not listing["truncated"], f"{path} has more entries than one answer holds")
        return [str(entry["name"]) for entry in listing["entries"] if entry["kind"] == kind]

    # --- kill and verify ---

    def _reset(self) -> None:
        plan = self._fleet.plan_reset(NAME).result(SHORT_S)
        self._say(f"planned: {len(plan.victims)} to end, {len(plan.spared)} spared")
        run = self._fleet.start_reset(NAME, plan).result(SHORT_S)
        receipt = self._fleet.reset_result(NAME, run.id).result()
        total_s = receipt.durations.get("total", 0.0)
        self._say(f"{receipt.verdict}: {len(receipt.killed)} ended, {total_s:.1f} s")
        verified = self._fleet.verify(NAME).result(SHORT_S)
        self._say(f"verified again: {verified.verdict}")
        _must(
            verified.verdict == receipt.verdict,
            f"the reset said {receipt.verdict}, then it was {verified.verdict}",
        )
        self._check_victims(receipt)
        self._found.update(
            killed=len(receipt.killed), spared=len(plan.spared), verdict=receipt.verdict, reset_s=round(total_s, 2),
            receipt=receipt.path,
        )  # fmt: skip
        write_json(str(self._host.folder / "receipt.json"), plain(receipt))

    def _check_victims(self, receipt: Receipt) -> None:
        """Compare with the cast: who held memory is gone, and nobody else is."""
        holders = {one["pid"] for one in self._host.of_role("serving", "heir")}
        killed = {one.pid for one in receipt.killed}
        _must(killed == holders, f"killed {sorted(killed)}, but {sorted(holders)} held memory")
        for one in self._host.of_role("monitor", "bystander"):
            _must(belongings.lives(one["pid"], one["start_ticks"]), f"the {one['role']} did not survive")

    def _leave_behind(self) -> None:
        """Write what others need to check all of it."""
        host = self._host
        record = {
            **self._found,
            "cast": host.cast,
            "victims": host.of_role("serving", "heir"),
            "bystander": host.of_role("bystander")[0],
            "monitor": host.of_role("monitor")[0],
            "corpus": str(host.corpus),
            "out": str(host.out),
            "home": str(host.home),
        }
        write_json(str(host.folder / "demo.json"), record)


def _memory_used(host: HostState) -> list[float]:
    """Return the memory in use of every GPU, in bytes; nothing until each has told."""
    used = [host.reading(index, "memory_used_bytes").number() for index in host.gpu_indices]
    known = [value for value in used if value is not None]
    return known if len(known) == len(used) else []


def _must(held: bool, otherwise: str) -> None:
    if not held:
        raise DemoFailed(otherwise)
