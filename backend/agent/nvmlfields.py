"""Field values of NVML, by number: what newer records of a GPU are read through. About 3 ms a call on an H200."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def read(nvml: Any, handle: Any, numbers: Sequence[int]) -> List[Tuple[int, Any]]:
    """Read some fields: the return code and the value of each. Raises NVMLError where the call as a whole fails.

    The array is one entry longer than the count: NVML may touch the entry after it.
    """
    if not hasattr(nvml.nvmlLib, "nvmlDeviceGetFieldValues"):
        raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    values = (nvml.c_nvmlFieldValue_t * (len(numbers) + 1))()
    for place, number in zip(values, numbers):
        place.fieldId = number
    code = nvml.nvmlLib.nvmlDeviceGetFieldValues(handle, len(numbers), values)
    if code != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(code)
    return [(place.nvmlReturn, _value(place)) for place in values[: len(numbers)]]


def _value(place: Any) -> Any:
    kind = place.valueType
    return getattr(place.value, KINDS[kind] if kind < len(KINDS) else "ullVal")
