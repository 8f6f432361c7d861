"""Running a telemetry source as the agent's loop does, until something is seen."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any

from backend.agent.child import DriverChild

if TYPE_CHECKING:
    from collections.abc import Callable

    from backend.agent.seam import Driver
    from backend.agent.telemetry import TelemetrySource
    from backend.wire import GpuSample, Inventory, Telemetry


class Pump:
    """Keeps what a source said: every telemetry and inventory, newest last, and the longest that one step took."""

    def __init__(self, source: TelemetrySource) -> None:
        self.source = source
        self.telemetry: list[Telemetry] = []
        self.inventories: list[Inventory] = []
        self.longest_step_s = 0.0

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def until(self, seen: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Run until `seen` is true, and return what it gave. Fails where it stays false."""
        end = time.monotonic() + timeout_s
        while not (found := seen()):
            now = time.monotonic()
            if now > end:
                newest = self.telemetry[-1] if self.telemetry else None
                raise AssertionError(f"not seen within {timeout_s} s; the newest telemetry is {newest}")
            wait_s = max(0.0, min(self.source.due(), end) - now)
            ready, _, _ = select.select(self.source.filenos(), [], [], wait_s)
            began = time.monotonic()
            messages = self.source.step(set(ready))
            self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)
            self._keep(messages)
        return found

    def ticks(self, count: int) -> list[Telemetry]:
        """Run for some more telemetry and return it."""
        before = len(self.telemetry)
        self.until(lambda: len(self.telemetry) >= before + count)
        return self.telemetry[before:]

    def gpu(self, index: int) -> GpuSample | None:
        """Return the newest sample of a GPU."""
        gpus = self.telemetry[-1].gpus if self.telemetry else []
        return next((gpu for gpu in gpus if gpu.index == index), None)

    def problem(self, index: int) -> str:
        """Return the newest problem of a GPU."""
        found = self.gpu(index)
        return found.problem if found else ""

    def healthy(self, *indices: int) -> bool:
        """Say whether these GPUs have no problem, and memory that was read in this tick."""
        samples = [self.gpu(index) for index in indices]
        return all(
            gpu and not gpu.problem and gpu.readings["memory_total_bytes"].ok and gpu.readings["power_w"].age_s < 0.3
            for gpu in samples
        )

    def _keep(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["t"] == "telemetry":
                self.telemetry.append(message["telemetry"])
            else:
                self.inventories.append(message["inventory"])


class OpenChild:
    """A child with an open driver, for tests that ask it directly: `ask("lean", 0)` returns what the driver did."""

    def __init__(self, make_driver: Callable[[], Driver], skip: tuple[int, ...] = ()) -> None:
        self.child = DriverChild(make_driver, skip)

    def __enter__(self) -> OpenChild:
        self.child.start()
        opened = self.child.gather("open").answers[-1]
        self.inventory: Inventory = opened.value
        self.problem = opened.problem
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()

    def ask(self, kind: str, index: int = 0) -> Any:
        """Ask about one GPU and return the driver's answer; fails where there is none."""
        got = self.child.gather(kind, [index])
        answer = got.answers.get(index)
        assert answer is not None, got.problem
        assert not answer.problem, answer.problem
        return answer.value

    def lean(self, index: int = 0) -> Any:
        """Return the lean readings of one GPU."""
        return self.ask("lean", index)[0]
