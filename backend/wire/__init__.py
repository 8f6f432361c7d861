"""The records that cross between host and console, one JSON object a line.

Standard library only and Python 3.8, because the agent speaks it. Records are plain dataclasses: `encode` writes
them, the agent reads back its own files with `from_dict`, and the console validates what a host sent with msgspec
against these same classes. A field that is added gets a default, so that an older peer is still understood.
"""

from backend.wire.lines import (
    GIB,
    MAX_LINE_BYTES,
    MIB,
    PROTOCOL,
    SCHEMA,
    Refused,
    WireError,
    decode,
    encode,
    from_dict,
    plain,
    printable,
    refusal,
    reply,
)
from backend.wire.pipeline import CHAIN_ENV, PIPELINE, RESET, Pipeline, Step
from backend.wire.reset import (
    CLEAN,
    LIMITED,
    NOT_CLEAN,
    UNHEALTHY,
    UNKNOWN,
    VERDICTS,
    GpuResetPlan,
    GpuVerdict,
    Leftover,
    Leftovers,
    Plan,
    Process,
    Receipt,
    ResetEvent,
)
from backend.wire.runs import AGENT, RUN_ENDED, RUN_LIVE, Gate, Progress, Run, RunSpec
from backend.wire.telemetry import (
    LEAN,
    NOT_READ,
    NOT_SUPPORTED,
    SLOW,
    UNSUPPORTED,
    GpuFacts,
    GpuSample,
    Hello,
    Holder,
    HostSample,
    Inventory,
    Reading,
    Telemetry,
    failed,
)
from backend.wire.xids import Xid

__all__ = [
    "AGENT", "CHAIN_ENV", "CLEAN", "GIB", "LEAN", "LIMITED", "MAX_LINE_BYTES", "MIB", "NOT_CLEAN", "NOT_READ",
    "NOT_SUPPORTED", "PIPELINE", "PROTOCOL", "RESET", "RUN_ENDED", "RUN_LIVE", "SCHEMA", "SLOW", "UNHEALTHY",
    "UNKNOWN", "UNSUPPORTED", "VERDICTS", "Gate", "GpuFacts", "GpuResetPlan", "GpuSample", "GpuVerdict", "Hello",
    "Holder", "HostSample", "Inventory", "Leftover", "Leftovers",
    "Pipeline", "Plan", "Process", "Progress", "Reading", "Receipt", "Refused",
    "ResetEvent", "Run", "RunSpec", "Step", "Telemetry", "WireError", "Xid", "decode", "encode", "failed",
    "from_dict", "plain", "printable", "refusal", "reply",
]  # fmt: skip
