"""Made-up seconds of a host for the record, and reading a record back as a console does."""

from __future__ import annotations

import base64
import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from backend.agent.flight import ops
from backend.agent.flight.columns import columns_of
from backend.fleet.flights import Flights
from backend.wire import (
    GIB,
    MIB,
    NOT_SUPPORTED,
    GpuSample,
    HostSample,
    Progress,
    Reading,
    Run,
    Telemetry,
    encode,
    plain,
    reply,
)
from backend.wire.flight import Block
from tests.runstore import machine

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from backend.wire.flight import Row

START = 1_700_002_800
RUN = "extract-1203-041200-ab12"


def busy_gpu(index: int, rng: random.Random) -> GpuSample:
    """Make a GPU in the middle of prefill: everything that moves on an H200 moves."""
    load = 90 + rng.gauss(0, 6)
    values: dict[str, Any] = {
        "memory_used_bytes": (93 + index) * GIB + rng.randrange(4) * 2 * MIB,
        "memory_total_bytes": 143771 * MIB,
        "utilisation_percent": max(0, min(100, round(load))),
        "temperature_c": round(55 + load / 10 + rng.gauss(0, 0.6)),
        "power_w": round(400 + load * 2 + rng.gauss(0, 15), 3),
        "sm_clock_mhz": 1980 - 15 * rng.randrange(6),
        "clock_reasons": rng.choice((0, 4, 4, 4)),
        "ecc_uncorrected": 0,
        "memory_reserved_bytes": 615 * MIB,
        "power_limit_w": 700.0,
        "ecc_corrected": 0,
        "remapped_pending": 0,
        "remapped_failed": 0,
        "recovery_action": 0,
        "persistence": 1,
        "mig": 0,
        "pcie_gen": 5,
        "pcie_width": 16,
        "fan_percent": NOT_SUPPORTED,
        "thermal_margin_c": 30 + rng.randrange(3),
    }
    return GpuSample(index, {name: v if isinstance(v, Reading) else Reading(v) for name, v in values.items()})


def seconds(count: int, gpus: int = 8, start: float = START, seed: int = 0) -> Iterator[Row]:
    """Make so many seconds of an extraction of 87.8 M tokens beside its server."""
    rng, tokens = random.Random(seed), 0
    for second in range(count):
        at, rate = start + second + rng.random() * 0.02, max(0.0, 2400 + rng.gauss(0, 200))
        tokens += int(rate)
        samples = tokens // 1730
        progress = Progress(
            at, "running", samples, 37312, tokens, 87_800_000, samples * 99_000_000, 37312 * 99_000_000,
            f"data_{samples}.ckpt", 0, 0, 32, rate / 1730, rate, rate * 57_225, at, 5 << 40, requests_in_flight=32,
            staging_bytes=rng.randrange(8) * 100_000_000, staging_high_bytes=GIB, staging_bound_bytes=8 * GIB,
            capture_wait_s=second / 100,
        )  # fmt: skip
        progress.disk_free_bytes = (5 << 40) - progress.bytes_written
        runs = [
            Run(RUN, "extract", "running", started_at=start, log_bytes=tokens // 50, progress=progress),
            Run("serve-1203-040000-cd34", "serve", "running", started_at=start - 700, log_bytes=tokens // 9),
        ]
        host = HostSample(12 + rng.random(), 8 + rng.random(), 2 << 40, (1 << 40) + rng.randrange(1 << 28), 8 * GIB)
        telemetry = Telemetry(second, at, [busy_gpu(gpu, rng) for gpu in range(gpus)], host)
        yield round(at, 1), columns_of(telemetry, runs)


def flights() -> Flights:
    """Answer a console's questions from the record of this process's user, at once and without a recorder."""

    async def request(host: str, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        call = {"flight.blocks": ops.op_blocks, "flight.events": ops.op_events}.get(op, ops.op_info)
        return plain(call(machine(), args))

    def submit(work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            work.send(None)
        except StopIteration as done:
            future.set_result(done.value)
        except Exception as error:
            future.set_exception(error)
        return future

    return Flights(request, submit)


def fetched(step_s: int, **span: float) -> list[Block]:
    """Ask the operation for blocks, page by page; every page must fit a line of the wire."""
    blocks: list[Block] = []
    after = None
    while True:
        page = ops.op_blocks(machine(), {"step_s": step_s, "after": after, **span})
        encode(reply(1, page))
        blocks += [Block(base64.b64decode(data)) for data in page["blocks"]]
        after = page["next"]
        if after is None:
            return blocks


def rows_of(blocks: list[Block]) -> list[Row]:
    """Return the rows of blocks, in their order."""
    return [row for block in blocks for row in block.rows()]
