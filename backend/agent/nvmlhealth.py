"""The error records, links and settings of a GPU that only a verdict asks for: too dear for every second.

What a GPU does not offer is unsupported, which is most of this on a consumer card, with MIG on, or under an older
driver; only what should have answered and did not has failed (facts: reset, sections 2 and 7).
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, List, Tuple

from backend.agent import nvmlerrors as errors
from backend.agent import nvmlfields
from backend.agent.nvmlchecks import COUNT, DEGREES_LEFT, FLAG, GENERATION, LANES, ROWS, SMALL, WATTS, Check
from backend.agent.seam import HEALTH
from backend.wire import NOT_SUPPORTED, Reading, failed

FIELDS: Tuple[Tuple[str, int, Check], ...] = (
    ("slowdown_offset_c", 194, DEGREES_LEFT),  # NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: where the margin ends, -2
    ("nvlink_crc_flit_errors", 38, COUNT),  # NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL: all links together
    ("nvlink_crc_data_errors", 45, COUNT),
    ("nvlink_replays", 52, COUNT),
    ("nvlink_recoveries", 59, COUNT),
)

ABSENT_CODES = (2, 25)
"""INVALID_ARGUMENT is the answer for a link or field that a GPU lacks (facts: monitors, TensorRT-LLM#17060);
ARGUMENT_VERSION_MISMATCH that for a structure which an older driver does not know."""

INFOROM_CORRUPTED = 14
FABRIC_BAD_BITS = (0, 4)
"""Where a health mask (NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*) says 1 for degraded bandwidth and unhealthy routes."""

Part = Tuple[Tuple[str, ...], Callable[[Any, Any], List[Reading]]]


def read(nvml: Any, handle: Any) -> Dict[str, Reading]:
    """Read all of `HEALTH`. Where the GPU as a whole is gone it stops there, and the rest has failed for that."""
    readings: Dict[str, Reading] = {}
    gone = ""
    for names, get in _parts(nvml):
        try:
            values = get(nvml, handle)
        except nvml.NVMLError as error:
            if errors.gpu_is_gone(error.value):
                gone = errors.words(error.value)
                break
            values = [_absent_or_failed(error.value)] * len(names)
        readings.update(zip(names, values))
    return {name: readings.get(name, failed(gone)) for name in HEALTH}


def _parts(n: Any) -> List[Part]:
    """Bind the getters: each gives the readings of its names."""
    corrected, lifetime = n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_AGGREGATE_ECC

    def errors_in(place: int) -> Callable[[Any], Any]:
        return lambda handle: n.nvmlDeviceGetMemoryErrorCounter(handle, corrected, lifetime, place)

    return [
        _one("ecc_corrected_dram_lifetime", errors_in(n.NVML_MEMORY_LOCATION_DRAM), COUNT),
        _one("ecc_corrected_sram_lifetime", errors_in(n.NVML_MEMORY_LOCATION_SRAM), COUNT),
        (("sram_threshold_exceeded",), _sram),
        (("memory_unrepairable",), _unrepairable),
        (("remapped_corrected", "remapped_uncorrected"), _remapped),
        _one("retired_single_bit", lambda h: len(n.nvmlDeviceGetRetiredPages(h, 0)), COUNT),
        _one("retired_double_bit", lambda h: len(n.nvmlDeviceGetRetiredPages(h, 1)), COUNT),
        _one("retired_pending", n.nvmlDeviceGetRetiredPagesPendingStatus, FLAG),
        (("ecc_mode", "ecc_mode_pending"), lambda n, h: [FLAG(value) for value in n.nvmlDeviceGetEccMode(h)]),
        (("mig_pending",), lambda n, h: [FLAG(n.nvmlDeviceGetMigMode(h)[1])]),
        _one("compute_mode", n.nvmlDeviceGetComputeMode, SMALL),
        _one("pcie_width_max", n.nvmlDeviceGetMaxPcieLinkWidth, LANES),
        _one("pcie_gen_max", n.nvmlDeviceGetMaxPcieLinkGeneration, GENERATION),
        _one("pcie_replays", n.nvmlDeviceGetPcieReplayCounter, ROWS),
        _one("power_limit_default_w", n.nvmlDeviceGetPowerManagementDefaultLimit, WATTS),
        (("nvlink_active",), _links),
        (("fabric_state", "fabric_status", "fabric_health"), _fabric),
        (("inforom_valid",), _inforom),
        (tuple(name for name, _, _ in FIELDS), _fields),
    ]


def _one(name: str, get: Callable[[Any], Any], check: Check) -> Part:
    return (name,), lambda _, handle: [check(get(handle))]


def _absent_or_failed(code: int) -> Reading:
    return NOT_SUPPORTED if code in ABSENT_CODES else errors.reading(code)


def _sram(n: Any, handle: Any) -> List[Reading]:
    status = n.c_nvmlEccSramErrorStatus_v1_t()
    n.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return [FLAG(status.bThresholdExceeded)]


def _unrepairable(n: Any, handle: Any) -> List[Reading]:
    """Read a flag that older bindings (13.580) do not know; what they lack is not offered either."""
    get = getattr(n, "nvmlDeviceGetUnrepairableMemoryFlag_v1", None)
    return [FLAG(get(handle)) if get else NOT_SUPPORTED]


def _remapped(n: Any, handle: Any) -> List[Reading]:
    corrected, uncorrected, _, _ = n.nvmlDeviceGetRemappedRows(handle)
    return [ROWS(corrected), ROWS(uncorrected)]


def _links(n: Any, handle: Any) -> List[Reading]:
    """Read which NVLinks are up, one bit a link; unsupported where the GPU has none."""
    offered, active = False, 0
    for link in range(n.NVML_NVLINK_MAX_LINKS):
        try:
            up = n.nvmlDeviceGetNvLinkState(handle, link)
        except n.NVMLError as error:
            if not _absent_or_failed(error.value).unsupported:
                raise
            continue
        offered, active = True, active | bool(up) << link
    return [Reading(active) if offered else NOT_SUPPORTED]


def _fabric(n: Any, handle: Any) -> List[Reading]:
    """Read how far a GPU is in its NVSwitch fabric: state, status and health as nvmlGpuFabricState_t,
    nvmlReturn_t and NVML_GPU_FABRIC_HEALTH_SUMMARY_* give them.

    A driver without the third structure has no summary: the second one's mask stands for it.
    """
    info = n.c_nvmlGpuFabricInfo_v3_t()
    try:
        n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        health = int(info.healthSummary)
    except n.NVMLError as error:
        if not errors.no_such_version(error.value):
            raise
        info = n.c_nvmlGpuFabricInfo_v2_t()
        n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        health = 2 if any(info.healthMask >> bit & 3 == 1 for bit in FABRIC_BAD_BITS) else 1
    if info.state == n.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return [NOT_SUPPORTED] * 3
    return [SMALL(info.state), Reading(int(info.status)), SMALL(health) if health else NOT_SUPPORTED]


def _inforom(n: Any, handle: Any) -> List[Reading]:
    try:
        n.nvmlDeviceValidateInforom(handle)
    except n.NVMLError as error:
        if error.value != INFOROM_CORRUPTED:
            raise
        return [Reading(0)]
    return [Reading(1)]


def _fields(n: Any, handle: Any) -> List[Reading]:
    found = []
    for (_, _, check), (code, value) in zip(FIELDS, nvmlfields.read(n, handle, [number for _, number, _ in FIELDS])):
        if errors.gpu_is_gone(code):
            raise n.NVMLError(code)
        found.append(_absent_or_failed(code) if code else check(value))
    return found
