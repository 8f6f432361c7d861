"""A driver whose answers, faults and hangs a test chooses, loaded by the real pynvml."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

from backend.agent import procfs
from tests.nvml.build import ANY, LIBRARY, function_names, library
from tests.nvml.control import MAX_GPUS, MAX_HOLDERS, VALUES, Control, Gpu, Rule, Value

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from backend.agent.seam import Driver

NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
KINDS = {"compute": 0, "graphics": 1, "mps": 2}
FIELD_TYPES = {"double": 0, "uint": 1, "ulong": 2, "ulonglong": 3, "longlong": 4, "int": 5}
H200: dict[str, Any] = {
    "memory": [150754820096, 644939776, 0],
    "utilisation": [0, 0],
    "temperature_c": 36,
    "power_mw": 110080,
    "power_limit_mw": 700000,
    "sm_mhz": 525,
    "memory_mhz": 3201,
    "sm_max_mhz": 1980,
    "clock_reasons": 1,
    "ecc_uncorrected": 0,
    "ecc_corrected": 0,
    "remapped": [0, 0, 0, 0],
    "mig": [0, 0],
    "margin_c": 30,
    "persistence": 1,
    "pcie": [5, 16, 5, 16],
    "energy_mj": 2176334,
    "pcie_rate_kb": 725,
    "ecc_lifetime": [0, 0],
    "sram_threshold": 0,
    "unrepairable": 0,
    "ecc_mode": [1, 1],
    "compute_mode": 0,
    "pcie_replays": 1,
    "inforom": 0,
    "power_limit_default_mw": 700000,
}
"""What an idle H200 answered (driver 580), passed through to a virtual machine: it supports no fan, no absolute
temperature limits, no retired pages, and had neither NVLinks nor a fabric. One PCIe replay is what it had."""


class GpuDouble:
    """One GPU of the double. `set` gives it answers; what it never got answers NOT_SUPPORTED."""

    def __init__(self, nvml: NvmlDouble, index: int) -> None:
        self._nvml, self.index = nvml, index

    @property
    def _raw(self) -> Gpu:
        raw: Gpu = self._nvml.control.gpus[self.index]
        return raw

    @property
    def uuid(self) -> str:
        """Return the GPU's UUID."""
        return bytes(self._raw.uuid).decode("ascii")

    @property
    def minor(self) -> int:
        """Return the number of its device file."""
        return int(self._raw.minor)

    def describe(self, name: str = "", uuid: str = "", bus: str = "", minor: int | None = None) -> None:
        """Change what the GPU is."""
        raw = self._raw
        raw.name, raw.uuid = name.encode() or raw.name, uuid.encode() or raw.uuid
        raw.bus = bus.encode() or raw.bus
        raw.minor = raw.minor if minor is None else minor

    def set(self, **answers: Any) -> None:
        """Set answers by name (`control.VALUES`): a number, a list, "NA", {"err": code} or {"at": [[from_s, answer]]}.

        None makes it unsupported. `memory` is [total, reserved, used], `pcie` is [generation, width, and their maxima],
        `remapped` [corrected, uncorrected, pending, failure], `retired` [single-bit, double-bit, pending],
        `ecc_lifetime` [DRAM, SRAM], `nvlinks` [mask of links, mask of those that are up], `fabric` [state, status,
        health mask, summary]; modes are [current, pending].
        """
        for name, answer in answers.items():
            _write(self._raw.values[VALUES.index(name)], answer)

    def field(self, number: int, answer: Any, kind: str = "uint") -> None:
        """Set the answer of nvmlDeviceGetFieldValues for one field."""
        raw = self._raw
        ids = [raw.fields[i].id for i in range(raw.field_count)]
        place = ids.index(number) if number in ids else raw.field_count
        raw.fields[place].id, raw.fields[place].type = number, FIELD_TYPES[kind]
        _write(raw.fields[place].answer, answer)
        raw.field_count = max(raw.field_count, place + 1)

    def hold(
        self,
        pid: int,
        used_bytes: int,
        kind: str = "compute",
        *,
        owner: int | None = None,
        shown_bytes: int | None = None,
        listed: bool = True,
    ) -> None:
        """Let memory be held: the lists name `pid`, and it stays while `owner` lives (by default the same process).

        An `owner` of 0 holds for ever, `listed=False` holds without being named, `shown_bytes` is what the list says
        (NOT_AVAILABLE for none). Once the owner is gone, the first call that notices starts the release curve.
        """
        holders = self._raw.holders
        place = next(i for i in range(MAX_HOLDERS) if not holders[i].used)
        owner = pid if owner is None else owner
        found = procfs.stat(owner) if owner else None
        held = holders[place]
        held.pid, held.kind, held.listed, held.owner = pid, KINDS[kind], listed, owner
        held.owner_start = found.start_ticks if found else 0
        held.bytes = used_bytes
        held.shown_bytes = used_bytes if shown_bytes is None else shown_bytes
        held.gone_at_s, held.used = 0.0, 1

    def drop(self, pid: int | None = None) -> None:
        """Let go of what a process holds at once, or of everything."""
        for held in self._raw.holders:
            if pid is None or held.pid == pid:
                held.used = 0

    def release(self, delay_s: float = 0.0, over_s: float = 0.0, steps: int = 1) -> None:
        """Set how memory falls once its owner is gone: after a delay, over a time, in steps (0: a straight line)."""
        raw = self._raw
        raw.release_delay_s, raw.release_s, raw.release_steps = delay_s, over_s, steps

    def fail(self, error: int, function: str = ANY, seconds: float | None = None) -> None:
        """Let a function, or every function but those that make handles, answer an nvmlReturn_t for this GPU: for
        some seconds, or until `resume`."""
        _fail(self._rule(function), error, seconds)

    def lose(self) -> None:
        """Take the GPU off the bus: every call but the handle's answers GPU_IS_LOST."""
        self.fail(15)

    def hang(self, seconds: float | None = None, function: str = ANY) -> None:
        """Let calls block for some seconds, or until `resume`."""
        self._rule(function).hang_until_s = float("inf") if seconds is None else time.monotonic() + seconds

    def delay(self, milliseconds: float, function: str = ANY) -> None:
        """Let calls take longer."""
        self._rule(function).delay_us = int(milliseconds * 1000)

    def resume(self) -> None:
        """End every hang, delay and error of this GPU."""
        for function in self._nvml.control.functions:
            rule = function.slots[self.index + 1]
            rule.error, rule.delay_us, rule.hang_until_s = 0, 0, 0.0

    def calls(self, function: str) -> int:
        """Count the calls of one function for this GPU."""
        return int(self._rule(function).calls)

    def _rule(self, function: str) -> Rule:
        return self._nvml.rule(function, self.index + 1)


class NvmlDouble:
    """A libnvidia-ml.so.1 under a test's control.

    A fresh process that gets `env` loads it in the driver's place; `make_driver` does the same inside a forked child
    (it must run there, since a process keeps the first libnvidia-ml.so.1 that it loaded). Changes take effect at the
    next call. `missing` names functions that the library does not have.
    """

    def __init__(self, gpus: int = 1, *, tmp_path: Path, missing: tuple[str, ...] = ()) -> None:
        self.library = library(frozenset(missing))
        self.path = tmp_path / f"nvml-{id(self):x}.control"
        self.path.write_bytes(bytes(ctypes.sizeof(Control)))
        with self.path.open("r+b") as file:
            self.control = Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self.control.size = ctypes.sizeof(Control)
        self.control.driver, self.control.cuda = b"580.159.04", 13000
        self.control.zero_s, self.control.frozen_s = time.monotonic(), -1.0
        for index in range(gpus):
            self.gpu(index).describe(
                "NVIDIA H200",
                f"GPU-{index:08x}-0000-4000-8000-000000000000",
                f"00000000:{0x1A + index:02X}:00.0",
                index,
            )
            self.gpu(index).set(**H200)
            self.gpu(index).field(230, 0)
        self.control.gpu_count = gpus

    def __enter__(self) -> NvmlDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every hang, so that no process is left waiting, and let the file go."""
        self.resume()
        del self.control

    @property
    def env(self) -> dict[str, str]:
        """Return what a fresh process needs in its environment to find the double."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_DOUBLE_CONTROL": str(self.path)}

    @property
    def make_driver(self) -> Callable[[], Driver]:
        """Return a driver factory for a forked child: it loads the double before pynvml looks for the library."""
        where, control = str(self.library), str(self.path)

        def make() -> Driver:
            from backend.agent.nvml import NvmlDriver

            os.environ["NVML_DOUBLE_CONTROL"] = control
            ctypes.CDLL(where, ctypes.RTLD_GLOBAL)
            return NvmlDriver()

        return make

    def gpu(self, index: int) -> GpuDouble:
        """Return one GPU."""
        return GpuDouble(self, index)

    def set_count(self, gpus: int) -> None:
        """Change how many GPUs the driver lists."""
        self.control.gpu_count = gpus

    def clock(self, seconds: float) -> None:
        """Hold the clock of {"at": ...} answers at a moment: a test steps through time without waiting."""
        self.control.frozen_s = seconds

    def fail(self, error: int, function: str = "nvmlInitWithFlags", seconds: float | None = None) -> None:
        """Let a function of the driver as a whole answer an nvmlReturn_t, for some seconds or for good; 0 ends it."""
        _fail(self.rule(function, 0), error, seconds)

    def hang(self, seconds: float | None = None, function: str = ANY) -> None:
        """Let every call block, or those of one function of the driver as a whole (nvmlInitWithFlags)."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        slots = range(MAX_GPUS + 1) if function == ANY else range(1)
        for slot in slots:
            self.rule(function, slot).hang_until_s = until

    def resume(self) -> None:
        """End every hang, delay and error."""
        for slot in range(MAX_GPUS + 1):
            for function in self.control.functions:
                rule = function.slots[slot]
                rule.error, rule.delay_us, rule.hang_until_s = 0, 0, 0.0

    def raise_xid(self, gpu: int, xid: int) -> None:
        """Raise an XID: event sets with which the GPU is registered receive it."""
        count = self.control.xid_count
        place = self.control.xids[count % len(self.control.xids)]
        place.gpu, place.xid = gpu, xid
        self.control.xid_count = count + 1

    def calls(self, function: str) -> int:
        """Count the calls of one function by every process, for all GPUs."""
        slots = self.control.functions[function_names().index(function)].slots
        return sum(int(slot.calls) for slot in slots)

    def rule(self, function: str, slot: int) -> Rule:
        """Return what is wrong with a function: slot 0 is the driver, slot i + 1 is GPU i."""
        rule: Rule = self.control.functions[function_names().index(function)].slots[slot]
        return rule


def _fail(rule: Rule, error: int, seconds: float | None) -> None:
    rule.error_until_s = float("inf") if seconds is None else time.monotonic() + seconds
    rule.error = error


def _write(place: Value, answer: Any) -> None:
    steps = answer["at"] if isinstance(answer, dict) and "at" in answer else [[0, answer]]
    place.count = 0  # a reader in between sees no answer, never half of one
    if answer is None:
        return
    for step, (from_s, what) in zip(place.steps, steps, strict=False):
        step.from_s = from_s
        step.error = what["err"] if isinstance(what, dict) else 0
        numbers = [0] if isinstance(what, dict) else what if isinstance(what, list) else [what]
        for i, number in enumerate(numbers):
            step.value[i] = ctypes.c_int64(NOT_AVAILABLE if number == "NA" else number).value
    place.count = len(steps)


__all__ = ["H200", "LIBRARY", "NOT_AVAILABLE", "GpuDouble", "NvmlDouble"]
