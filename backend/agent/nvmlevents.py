"""XIDs as the driver raises them: one event set for all GPUs, waited on in a thread beside the readings.

Events have no pid and no text, and only come from the registration on; the kernel log has all three where it may be
read. A GPU or driver without events says so once.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Callable, Dict, Iterable, List, Tuple

from backend.agent import nvmlerrors as errors

WAIT_MS = 5000
"""How long one wait lasts: an event ends it at once, so this is only how often the thread looks whether to go on."""

AGAIN_S = 5.0
"""How long after an error (a GPU of the set is lost) a new set is made, of the GPUs that can still be registered."""

TIMED_OUT = 10


def listen(nvml: Any, handles: Iterable[Tuple[int, Any]], registered: Callable[[str], None],
           raised: Callable[[int, int], None]) -> None:  # fmt: skip
    """Wait for ever. Calls `registered` with an empty text once events would be told, or with why they will not be,
    and then returns; `raised` with GPU index and XID. `handles` are (index, handle) of every GPU."""
    known, first = list(handles), True
    while True:
        try:
            events, places, why = _register(nvml, known)
        except nvml.NVMLError as error:
            events, places, why = None, {}, errors.words(error.value)
        if first:
            registered("" if places else why or "the driver lists no GPU")
            if not places:
                return
        first = False
        try:
            while places:
                _wait(nvml, events, places, raised)
        except nvml.NVMLError:
            pass  # the set tells nothing any more; which GPU is lost, the readings say
        _free(nvml, events)
        time.sleep(AGAIN_S)


def _register(nvml: Any, known: List[Tuple[int, Any]]) -> Tuple[Any, Dict[int, int], str]:
    """Make a set. Returns it, the GPU index by handle, and why a GPU could not be registered."""
    events, places, why = nvml.nvmlEventSetCreate(), {}, ""
    for index, handle in known:
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            places[_pointer(handle)] = index
        except nvml.NVMLError as error:
            why = errors.words(error.value)
    return events, places, why


def _wait(nvml: Any, events: Any, places: Dict[int, int], raised: Callable[[int, int], None]) -> None:
    try:
        event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except nvml.NVMLError as error:
        if error.value != TIMED_OUT:
            raise
        return
    index = places.get(_pointer(event.device))
    if index is not None:
        raised(index, int(event.eventData))


def _free(nvml: Any, events: Any) -> None:
    if events is not None:
        try:
            nvml.nvmlEventSetFree(events)
        except nvml.NVMLError:
            pass


def _pointer(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
