"""The baseline: what is recorded, for which driver and settings it holds, and what a new boot voids."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from backend.agent import procfs
from backend.agent.reset import baseline
from backend.agent.reset.ops import op_baseline_record
from backend.agent.seam import Machine
from backend.wire import MIB, NOT_SUPPORTED, GpuFacts, Inventory, Reading, Refused, failed
from tests.nvml import NvmlDouble
from tests.resetting import FileDevices

DRIVER = "580.159.04"
ON, OFF = Reading(1), Reading(0)
GPUS = Inventory(DRIVER, "13.0", [
    GpuFacts(0, "GPU-a", "H200", persistence=ON, mig=OFF, ecc_mode=ON),
    GpuFacts(1, "GPU-b", "H200", persistence=ON, mig=OFF, ecc_mode=ON),
])  # fmt: skip
OLD = Path(__file__).parent / "cases" / "baseline_schema1.json"
ROWS = [Reading(value * MIB) for value in (3, 450, 3, 4, 3)]


def now(**changes: Reading) -> Inventory:
    """Return the same host, whose first GPU has other settings."""
    return replace(GPUS, gpus=[replace(GPUS.gpus[0], **changes), GPUS.gpus[1]])  # type: ignore[arg-type]


def test_a_baseline_is_the_median_of_each_gpu() -> None:
    stored = baseline.store(GPUS, {0: ROWS, 1: ROWS})
    assert stored["gpus"]["GPU-a"]["used_bytes"] == 3 * MIB
    assert stored["gpus"]["GPU-a"]["jitter_bytes"] == 447 * MIB
    assert baseline.load() == stored
    assert baseline.limit(stored, GPUS, 0).most_bytes == 19 * MIB
    assert baseline.in_words(stored, GPUS).startswith("recorded 20")
    assert baseline.in_words(stored, replace(GPUS, gpus=[])) == "none: the driver lists no GPU"


@pytest.mark.parametrize(("inventory", "said"), [
    (replace(GPUS, driver="595.1"), f"recorded under driver {DRIVER}, now 595.1"),
    (replace(GPUS, memory_api="v1"), "recorded with memory reading v2, now v1"),
    (now(persistence=OFF), "recorded with persistence mode on, now off"),
    (now(mig=ON), "recorded with MIG mode off, now on"),
    (now(ecc_mode=OFF), "recorded with ECC mode on, now off"),
])  # fmt: skip
def test_another_key_voids_it_and_is_named(inventory: Inventory, said: str) -> None:
    stored = baseline.store(GPUS, {0: ROWS, 1: ROWS})
    void = baseline.limit(stored, inventory, 0)
    assert (void.baseline_bytes, void.most_bytes) == (None, 16 * MIB)
    assert said in void.said
    assert baseline.in_words(stored, inventory).startswith("none")


@pytest.mark.parametrize("unknown", [NOT_SUPPORTED, failed("no permission (NVML 4)")])
def test_a_setting_that_cannot_be_read_is_no_change(unknown: Reading) -> None:
    stored = baseline.store(GPUS, {0: ROWS, 1: ROWS})
    assert baseline.limit(stored, now(persistence=unknown), 0).baseline_bytes == 3 * MIB


def test_a_failed_reading_is_no_baseline() -> None:
    rows = [Reading(0)] * 4 + [failed("GPU is lost (NVML 15)")]
    with pytest.raises(Refused, match="GPU 0: its memory could not be read: GPU is lost"):
        baseline.store(GPUS, {0: rows, 1: rows})
    assert baseline.load()["gpus"] == {}


def test_a_gpu_without_memory_of_its_own_has_the_rest_of_a_baseline() -> None:
    stored = baseline.store(GPUS, {0: [NOT_SUPPORTED] * 5, 1: ROWS}, {0: {"pcie_width": Reading(16)}})
    assert stored["gpus"]["GPU-a"]["used_bytes"] is None
    assert baseline.limit(stored, GPUS, 0).baseline_bytes is None
    assert baseline.in_words(stored, GPUS).startswith("recorded")
    assert baseline.counters(stored, "GPU-a", "")["pcie_width"] == Reading(16)


def test_counters_hold_for_the_boot_in_which_they_were_recorded() -> None:
    read = {"pcie_replays": Reading(7), "remapped_uncorrected": Reading(2), "ecc_uncorrected": failed("timed out")}
    stored = baseline.store(GPUS, {0: ROWS, 1: ROWS}, {0: read})
    same = baseline.counters(stored, "GPU-a", procfs.boot_id())
    assert (same["pcie_replays"], same["remapped_uncorrected"]) == (Reading(7), Reading(2))
    assert "ecc_uncorrected" not in same, "what failed is not recorded, and never as zero"
    later = baseline.counters(stored, "GPU-a", "another boot")
    assert "pcie_replays" not in later
    assert later["remapped_uncorrected"] == Reading(2), "a GPU keeps its remapped rows"
    assert baseline.counters(stored, "GPU-c", procfs.boot_id()) == {}


def test_a_baseline_of_the_schema_before_is_read() -> None:
    shutil.copy(OLD, baseline.path())
    stored = baseline.load()
    assert stored["schema"] == baseline.BASELINE_SCHEMA
    assert baseline.limit(stored, GPUS, 0).most_bytes == 11 * MIB
    assert baseline.limit(stored, GPUS, 1).baseline_bytes == 450 * MIB
    assert baseline.limit(stored, replace(GPUS, memory_api="v1"), 0).baseline_bytes is None
    assert baseline.counters(stored, "GPU-a", procfs.boot_id()) == {}


@pytest.mark.parametrize("text", [
    "{", "[]", '{"schema": 99, "gpus": {}}', '{"schema": 2, "gpus": {"GPU-a": {"index": 0}}}', '{"schema": 1}',
])  # fmt: skip
def test_a_spoilt_baseline_is_named_and_never_taken_for_none(text: str) -> None:
    Path(baseline.path()).write_text(text, "ascii")
    with pytest.raises(Refused, match=r"baseline\.json"):
        baseline.load()


@pytest.mark.parametrize("missing", [(), ("nvmlDeviceGetMemoryInfo_v2",)], ids=["v2", "v1"])
def test_what_is_recorded_is_what_the_driver_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    monkeypatch.setattr(baseline, "SPAN_S", 0.1)
    with NvmlDouble(1, tmp_path=tmp_path, missing=missing) as nvml:
        nvml.gpu(0).set(remapped=[0, 3, 0, 0], pcie_replays=5, nvlinks=[0x3FFFF, 0x3FFFF], mig={"err": 999})
        machine = Machine(nvml.make_driver, lambda: FileDevices(str(tmp_path)), [])
        stored = op_baseline_record(machine, {})
        entry = stored["gpus"][nvml.gpu(0).uuid]
    assert entry["memory_api"] == ("v1" if missing else "v2")
    assert entry["used_bytes"] == (644939776 if missing else 0)
    assert (entry["persistence"], entry["mig"], entry["ecc_mode"]) == (1, None, 1)
    assert entry["readings"]["remapped_uncorrected"] == 3
    assert entry["readings"]["pcie_replays"] == 5
    assert entry["readings"]["pcie_width"] == 16
    assert entry["readings"]["nvlink_active"] == 0x3FFFF
    assert entry["readings"]["power_w"] == pytest.approx(110.08)
    assert stored["boot_id"] == procfs.boot_id()
    assert json.loads(Path(baseline.path()).read_text("ascii")) == stored
