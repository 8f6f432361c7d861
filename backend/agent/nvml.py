"""NVML as a Driver: what each reading means, and what to do where the driver cannot be used.

Costs and traps are from an H200 with driver 580: the lean getters take 1.5 to 8 us each; field values, fan and MIG
take 0.2 to 3 ms and belong to the slow set (facts: monitors, section 3; reset, section 2).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from backend.agent import nvmlerrors as errors
from backend.agent import nvmlevents, nvmlfields, nvmlhealth
from backend.agent.nvmlchecks import (
    ACTION,
    CELSIUS,
    COUNT,
    DEGREES_LEFT,
    FAN,
    FLAG,
    GENERATION,
    LANES,
    MEGAHERTZ,
    PERCENT,
    REASONS,
    WATTS,
    Check,
    within,
)
from backend.agent.seam import HEALTH, ContextList, Driver, DriverError
from backend.wire import LEAN, NOT_SUPPORTED, SLOW, GpuFacts, Inventory, Reading, failed

FIELD_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; 226 and 227 are its deprecated forerunners."""


class NvmlDriver(Driver):
    """The real driver, by pynvml. See `Driver` for the contract."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: Dict[int, Any] = {}
        self._memory_v1 = False
        self._lean: List[Tuple[str, Callable[[Any], Any], Check]] = []
        self._slow: List[Tuple[str, Callable[[Any], Any], Check]] = []

    def open(self) -> Inventory:
        """Initialise NVML and list the GPUs. Raises DriverError with what to do where it cannot be used."""
        try:
            import pynvml
        except ImportError as error:
            raise DriverError("pynvml is missing beside the agent: %s" % error) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise DriverError(errors.at_open(error.value)) from None
        self._lean, self._slow = self._tables()
        inventory = Inventory(driver=self._text(pynvml.nvmlSystemGetDriverVersion), cuda=self._cuda())
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            inventory.problem = "the driver cannot count its GPUs: %s" % errors.words(error.value)
            return inventory
        for index in range(count):
            inventory.gpus.append(self._facts(index))
        inventory.memory_api = "v1" if self._memory_v1 else "v2"
        if not count:
            inventory.problem = errors.no_gpus(inventory.driver)
        return inventory

    def lean(self, index: int) -> Tuple[Dict[str, Reading], ContextList]:
        """Read the 1 Hz set and the compute list."""
        handle, problem = self._handle(index)
        if problem:
            return dict.fromkeys(LEAN, failed(problem)), ContextList(problem=problem)
        readings, gone = self._memory(handle)
        gone = gone or self._read_all(handle, self._lean, readings)
        if gone:
            return {name: readings.get(name, failed(gone)) for name in LEAN}, ContextList(problem=gone)
        return readings, self._contexts(handle, ("compute",))

    def slow(self, index: int) -> Dict[str, Reading]:
        """Read the slow set."""
        handle, problem = self._handle(index)
        if problem:
            return dict.fromkeys(SLOW, failed(problem))
        readings: Dict[str, Reading] = {"memory_reserved_bytes": self._reserved(handle)}
        gone = self._read_all(handle, self._slow, readings)
        if not gone:
            readings["remapped_pending"], readings["remapped_failed"] = self._remapped(handle)
        return {name: readings.get(name, failed(gone)) for name in SLOW}

    def health(self, index: int) -> Dict[str, Reading]:
        """Read what only a verdict asks for."""
        handle, problem = self._handle(index)
        return dict.fromkeys(HEALTH, failed(problem)) if problem else nvmlhealth.read(self._nvml, handle)

    def occupancy(self, index: int) -> Tuple[Reading, ContextList]:
        """Read memory used and every process list: what clearance polls."""
        handle, problem = self._handle(index)
        if problem:
            return failed(problem), ContextList(problem=problem)
        readings, _ = self._memory(handle)
        return readings["memory_used_bytes"], self._contexts(handle, ("compute", "graphics", "mps"))

    def listen(self, registered: Callable[[str], None], raised: Callable[[int, int], None]) -> None:
        """Tell XIDs as they are raised, of the GPUs that answered when the driver was opened."""
        nvmlevents.listen(self._nvml, sorted(self._handles.items()), registered, raised)

    def _tables(self) -> Tuple[List[Tuple[str, Callable[[Any], Any], Check]], ...]:
        """Bind the getters. A driver older than the names of the clock event reasons has them as throttle reasons."""
        n = self._nvml
        reasons = n.nvmlDeviceGetCurrentClocksEventReasons
        if not self._has("nvmlDeviceGetCurrentClocksEventReasons"):
            reasons = n.nvmlDeviceGetCurrentClocksThrottleReasons
        volatile, uncorrected, corrected = (
            n.NVML_VOLATILE_ECC, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        )  # fmt: skip
        lean = [
            ("utilisation_percent", lambda h: n.nvmlDeviceGetUtilizationRates(h).gpu, PERCENT),
            ("temperature_c", lambda h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU), CELSIUS),
            ("power_w", n.nvmlDeviceGetPowerUsage, WATTS),
            ("sm_clock_mhz", lambda h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM), MEGAHERTZ),
            ("clock_reasons", reasons, REASONS),
            ("ecc_uncorrected", lambda h: n.nvmlDeviceGetTotalEccErrors(h, uncorrected, volatile), COUNT),
        ]
        slow = [
            ("power_limit_w", n.nvmlDeviceGetEnforcedPowerLimit, WATTS),
            ("ecc_corrected", lambda h: n.nvmlDeviceGetTotalEccErrors(h, corrected, volatile), COUNT),
            ("recovery_action", lambda h: self._field(h, FIELD_RECOVERY_ACTION), ACTION),
            ("persistence", n.nvmlDeviceGetPersistenceMode, FLAG),
            ("mig", lambda h: n.nvmlDeviceGetMigMode(h)[0], FLAG),
            ("pcie_gen", n.nvmlDeviceGetCurrPcieLinkGeneration, GENERATION),
            ("pcie_width", n.nvmlDeviceGetCurrPcieLinkWidth, LANES),
            ("fan_percent", n.nvmlDeviceGetFanSpeed, FAN),
            ("thermal_margin_c", self._margin, DEGREES_LEFT),
        ]
        return lean, slow

    def _has(self, function: str) -> bool:
        return hasattr(self._nvml.nvmlLib, function)

    def _read_all(
        self, handle: Any, table: List[Tuple[str, Callable[[Any], Any], Check]], readings: Dict[str, Reading]
    ) -> str:
        """Read a table into `readings`. Returns why the GPU as a whole is gone, or an empty string; it stops there."""
        error_kind = self._nvml.NVMLError
        for name, get, check in table:
            try:
                readings[name] = check(get(handle))
            except error_kind as error:
                if errors.gpu_is_gone(error.value):
                    return errors.words(error.value)
                readings[name] = errors.reading(error.value)
        return ""

    def _read(self, get: Callable[..., Any], *args: Any) -> Tuple[Any, Optional[Reading]]:
        """Call one getter: its value and None, or None and the reading that stands for its failure."""
        try:
            return get(*args), None
        except self._nvml.NVMLError as error:
            return None, errors.reading(error.value)

    def _text(self, get: Callable[..., Any], *args: Any) -> str:
        value, problem = self._read(get, *args)
        if problem:
            return ""
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    def _cuda(self) -> str:
        version, problem = self._read(self._nvml.nvmlSystemGetCudaDriverVersion)
        return "" if problem else "%d.%d" % (version // 1000, version % 1000 // 10)

    def _facts(self, index: int) -> GpuFacts:
        n = self._nvml
        if index in self.skip:
            return GpuFacts(index, "", "", problem="left out: it did not answer before")
        if self.opening is not None:
            self.opening(index)
        handle, problem = self._handle(index)
        if problem:
            return GpuFacts(index, "", "", problem=problem)
        uuid, wrong = self._read(n.nvmlDeviceGetUUID, handle)
        pci, _ = self._read(n.nvmlDeviceGetPciInfo, handle)
        minor, _ = self._read(n.nvmlDeviceGetMinorNumber, handle)
        memory, _ = self._memory(handle)
        facts = GpuFacts(index, str(uuid or ""), self._text(n.nvmlDeviceGetName, handle))
        facts.bus_id = "" if pci is None else _as_text(pci.busId)
        facts.minor = -1 if minor is None else int(minor)
        facts.memory_total_bytes = memory["memory_total_bytes"]
        facts.power_limit_w = self._checked(WATTS, n.nvmlDeviceGetEnforcedPowerLimit, handle)
        facts.sm_clock_max_mhz = self._checked(MEGAHERTZ, n.nvmlDeviceGetMaxClockInfo, handle, n.NVML_CLOCK_SM)
        facts.persistence = self._checked(FLAG, n.nvmlDeviceGetPersistenceMode, handle)
        facts.mig = self._checked(FLAG, lambda h: n.nvmlDeviceGetMigMode(h)[0], handle)
        facts.ecc_mode = self._checked(FLAG, lambda h: n.nvmlDeviceGetEccMode(h)[0], handle)
        facts.problem = wrong.problem if wrong is not None and wrong.failed else ""
        return facts

    def _checked(self, check: Check, get: Callable[..., Any], *args: Any) -> Reading:
        value, problem = self._read(get, *args)
        return problem or check(value)

    def _handle(self, index: int) -> Tuple[Any, str]:
        """Return a GPU's handle, or why there is none; one that failed is tried again at each call."""
        handle = self._handles.get(index)
        if handle is None:
            try:
                handle = self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
            except self._nvml.NVMLError as error:
                return None, errors.words(error.value)
        return handle, ""

    def _memory(self, handle: Any) -> Tuple[Dict[str, Reading], str]:
        """Read used and total bytes, and say why where the GPU is gone.

        v2 leaves out what the driver reserves (615 MiB on an idle H200), v1 counts it. v1 is asked only where the
        library has no v2, and `_reserved` says so; a machine with unified memory offers neither, which is no failure.
        """
        n = self._nvml
        try:
            if self._memory_v1:
                memory = n.nvmlDeviceGetMemoryInfo(handle)
            else:
                memory = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
        except n.NVMLError as error:
            if not self._memory_v1 and errors.no_such_version(error.value):
                self._memory_v1 = True
                return self._memory(handle)
            wrong = errors.reading(error.value)
            gone = wrong.problem if errors.gpu_is_gone(error.value) else ""
            return {"memory_used_bytes": wrong, "memory_total_bytes": wrong}, gone
        return _memory_readings(memory.used, memory.total), ""

    def _reserved(self, handle: Any) -> Reading:
        if self._memory_v1:
            return failed("this driver only has the first memory call: its used bytes include what it reserves")
        memory, problem = self._read(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2))
        return problem or within(0, memory.total, "bytes")(memory.reserved)

    def _remapped(self, handle: Any) -> Tuple[Reading, Reading]:
        rows, problem = self._read(self._nvml.nvmlDeviceGetRemappedRows, handle)
        return (problem, problem) if problem else (FLAG(rows[2]), FLAG(rows[3]))

    def _margin(self, handle: Any) -> Any:
        """Return the degrees left before the GPU slows itself; negative where it is past that point.

        Hopper and later give this as T.Limit and their limits as offsets from it (slowdown -2, shutdown -8), so a
        limit is never compared with a temperature there. Older ones give absolute limits.
        """
        n = self._nvml
        try:
            return n.nvmlDeviceGetMarginTemperature(handle)
        except n.NVMLError as error:
            if not errors.reading(error.value).unsupported:
                raise
        limit = n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        return limit - n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)

    def _field(self, handle: Any, number: int) -> Any:
        ((code, value),) = nvmlfields.read(self._nvml, handle, [number])
        if code != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(code)
        return value

    def _contexts(self, handle: Any, kinds: Tuple[str, ...]) -> ContextList:
        """Read process lists. A list that this GPU does not offer is empty; one that fails says so."""
        found, problems = ContextList(), []
        names = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
        for kind in kinds:
            get = getattr(self._nvml, "nvmlDeviceGet%sRunningProcesses_v3" % names[kind])
            if not self._has(get.__name__):
                get = getattr(self._nvml, "nvmlDeviceGet%sRunningProcesses_v2" % names[kind])
            processes, problem = self._read(get, handle)
            if problem is not None:
                if problem.failed:
                    problems.append("%s list: %s" % (kind, problem.problem))
                continue
            found.processes.extend((p.pid, _held(p.usedGpuMemory), kind) for p in processes)
        found.problem = "; ".join(problems)
        return found


def _memory_readings(used: int, total: int) -> Dict[str, Reading]:
    if total == 0:
        return {"memory_used_bytes": NOT_SUPPORTED, "memory_total_bytes": NOT_SUPPORTED}
    if total >= 1 << 62:
        wrong = failed("out of range: %d bytes in total" % total)
        return {"memory_used_bytes": wrong, "memory_total_bytes": wrong}
    return {"memory_used_bytes": within(0, total, "bytes")(used), "memory_total_bytes": Reading(total)}


def _held(used_bytes: Optional[int]) -> Reading:
    if used_bytes is None:
        return failed("the driver does not say")
    return within(0, (1 << 62) - 1, "bytes")(used_bytes)


def _as_text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
