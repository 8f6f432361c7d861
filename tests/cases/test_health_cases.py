"""The readings that misled other monitors, as a verdict weighs them: cases N1, N3 and N6."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.reset import baseline, clearance, cycle, health, settling
from backend.agent.reset.cycle import verify
from backend.agent.reset.ops import op_baseline_record
from backend.agent.seam import Machine
from backend.wire import CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, Receipt
from tests.nvml import NvmlDouble
from tests.resetting import FileDevices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOT_SUPPORTED: dict[str, Any] = {"err": 3}


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
    for module, name in ((clearance, "STABLE_S"), (clearance, "SETTLED_S"), (cycle, "VERIFY_S"), (health, "RETRY_S"),
                         (settling, "EVERY_S"), (settling, "SETTLED_S"), (baseline, "SPAN_S")):  # fmt: skip
        monkeypatch.setattr(module, name, 0.05)
    with NvmlDouble(3, tmp_path=tmp_path) as double:
        double.clock(0)
        yield double


def machine(nvml: NvmlDouble) -> Machine:
    return Machine(nvml.make_driver, lambda: FileDevices(str(nvml.path.parent)), [])


def check(nvml: NvmlDouble) -> Receipt:
    return verify(machine(nvml), accept_limited=True)


def test_n1_unified_memory_is_held_by_who_is_listed_and_limited_without(nvml: NvmlDouble) -> None:
    absent = ("memory", "memory_v1", "power_limit_mw", "memory_mhz", "ecc_uncorrected", "ecc_corrected", "remapped",
              "ecc_lifetime", "sram_threshold", "unrepairable", "ecc_mode", "mig", "margin_c", "power_limit_default_mw",
              "pcie_replays", "inforom")  # fmt: skip
    nvml.set_count(1)
    nvml.gpu(0).describe("NVIDIA GB10", bus="0000000F:01:00.0")
    nvml.gpu(0).set(**dict.fromkeys(absent, NOT_SUPPORTED), power_mw=3200, sm_mhz=208)
    holder = subprocess.Popen(["sleep", "600"])
    try:
        nvml.gpu(0).hold(holder.pid, 20064501760)
        assert check(nvml).verdict == NOT_CLEAN
    finally:
        holder.kill()
        holder.wait()
    (gpu,) = check(nvml).after
    assert gpu.verdict == LIMITED
    assert "does not report its memory" in gpu.reason
    assert gpu.used_bytes.unsupported
    assert gpu.findings == []
    stored = op_baseline_record(machine(nvml), {})
    assert stored["gpus"][nvml.gpu(0).uuid]["used_bytes"] is None
    assert check(nvml).verdict == LIMITED


def test_n3_an_error_of_two_seconds_is_no_gap_where_it_passes(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.gpu(0).set(power_mw={"at": [[0, {"err": 999}], [2, 613500]]})
    nvml.gpu(1).set(power_mw={"at": [[0, 0], [1, 76200]]}, ecc_uncorrected={"at": [[0, "NA"], [2, 0]]})
    reread = health.read

    def passing(watch: Any) -> health.Snapshot:
        seen = reread(watch)
        nvml.clock(seconds.pop(0))
        return seen

    seconds = [1.0, 2.0, 2.0]
    monkeypatch.setattr(health, "read", passing)
    assert [one.verdict for one in check(nvml).after] == [CLEAN] * 3
    assert seconds == [], "it was read three times"


def test_n3_an_error_that_stays_is_a_gap_and_no_number(nvml: NvmlDouble) -> None:
    nvml.gpu(1).set(ecc_uncorrected="NA")
    receipt = check(nvml)
    assert [one.verdict for one in receipt.after] == [CLEAN, LIMITED, CLEAN]
    assert "uncorrectable errors: out of range" in receipt.after[1].reason


def test_n6_limits_below_zero_are_offsets_of_the_margin(nvml: NvmlDouble) -> None:
    for index in range(3):
        nvml.gpu(index).set(slowdown_c=NOT_SUPPORTED, shutdown_c=NOT_SUPPORTED)
        for field, offset in ((193, -8), (194, -2), (195, 0), (196, 0)):
            nvml.gpu(index).field(field, offset, "int")
    nvml.gpu(0).set(temperature_c=31, margin_c=56)
    nvml.gpu(1).set(temperature_c=88, margin_c={"at": [[0, 1], [3, 0], [5, -1], [8, 6]]})
    nvml.gpu(2).set(temperature_c=92, margin_c=-3, clock_reasons=72, utilisation=[99, 60])
    for moment, margin in ((0, 1), (3, 0), (5, -1), (8, 6)):
        nvml.clock(moment)
        receipt = check(nvml)
        assert [one.verdict for one in receipt.after] == [CLEAN, CLEAN, UNHEALTHY]
        assert f"warning: {margin} °C are left to its slowdown temperature at 88 °C" in receipt.after[1].reason
    assert receipt.after[0].findings == []
    for said in ("margin -3 °C at 92 °C", "held down by heat (hardware)", "utilisation stays at 99 %"):
        assert said in receipt.after[2].reason
