"""The health checklist, rule by rule: what a driver answers, through pynvml, and what is said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.reset import health
from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.rules.case import Case, Readings
from backend.agent.reset.watch import Watch
from backend.agent.seam import HEALTH
from backend.wire import NOT_SUPPORTED, Reading
from tests.nvml import NvmlDouble

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Bench:
    """One GPU of the double, watched as a reset watches it."""

    def __init__(self, nvml: NvmlDouble) -> None:
        self.nvml, self.gpu = nvml, nvml.gpu(0)
        self.watch = Watch(nvml.make_driver)
        self.watch.open()

    def set(self, **answers: Any) -> None:
        """Set answers; `fields` are those of field values, by number."""
        for number, value in answers.pop("fields", {}).items():
            self.gpu.field(number, value, "int")
        self.gpu.set(**answers)

    def read(self) -> Readings:
        return health.read(self.watch).gpus[0]

    def found(self, **case: Any) -> list[Finding]:
        return health.findings(Case(self.gpu.uuid, self.read(), **case))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with NvmlDouble(1, tmp_path=tmp_path) as nvml:
        made = Bench(nvml)
        yield made
        made.watch.close()


def only(found: list[Finding], level: str, words: str) -> None:
    """Check that one thing was found, that it can be seen by hand, and that something can be done."""
    (one,) = found
    assert one.level == level
    assert words in one.reason
    assert one.action
    assert "nvidia-smi" in one.command


def test_an_idle_h200_has_no_fault_no_warning_and_no_gap(bench: Bench) -> None:
    readings = bench.read()
    assert set(HEALTH) <= set(readings)
    assert bench.found(idle=True) == []
    assert health.unread(readings) == []


@pytest.mark.parametrize(("answers", "level", "words"), [
    ({"fields": {230: 1}}, FAIL, "asks for a GPU reset"),
    ({"fields": {230: 2}}, FAIL, "asks for a reboot"),
    ({"fields": {230: 3}}, WARN, "draining its peer-to-peer"),
    ({"fields": {230: 4}}, FAIL, "a drain, then a GPU reset"),
    ({"fields": {230: 5}}, WARN, "recovery of IMEX"),
    ({"fields": {230: 6}}, FAIL, "a bus reset"),
    ({"fields": {230: 7}}, FAIL, "a system reboot"),
    ({"fields": {230: 99}}, FAIL, "action 99, which this version does not know"),
    ({"ecc_uncorrected": 2}, WARN, "2 uncorrectable memory errors since the driver was loaded"),
    ({"ecc_lifetime": [0, 10_001]}, WARN, "10001 cache errors were corrected"),
    ({"ecc_lifetime": [20_000_001, 10_000]}, WARN, "20000001 memory errors were corrected"),
    ({"sram_threshold": 1}, FAIL, "cache has had more uncorrectable errors"),
    ({"unrepairable": 1}, FAIL, "cannot be repaired"),
    ({"remapped": [0, 1, 1, 0]}, FAIL, "waits to be remapped"),
    ({"remapped": [0, 1, 0, 1]}, FAIL, "could not be remapped"),
    ({"remapped": [0, 512, 0, 0]}, FAIL, "512 rows"),
    ({"retired": [0, 1, 1]}, FAIL, "waits to be retired"),
    ({"retired": [47, 16, 0]}, FAIL, "63 pages"),
    ({"retired": [0, 16, 0]}, WARN, "16 pages"),
    ({"margin_c": -2, "fields": {194: -2}}, FAIL, "slowdown temperature: margin -2"),
    ({"margin_c": 0, "fields": {194: -2}}, WARN, "0 °C are left"),
    ({"margin_c": None, "slowdown_c": 90, "temperature_c": 90}, FAIL, "slowdown temperature: margin 0"),
    ({"margin_c": None, "temperature_c": 94}, FAIL, "at 94 °C, over 93"),
    ({"power_limit_mw": 500000}, WARN, "power limit is 500 W, by default 700"),
    ({"pcie": [5, 8, 5, 16]}, WARN, "8 lanes of 16"),
    ({"fabric": [1, 0, 0, 0]}, FAIL, "was not started"),
    ({"fabric": [2, 0, 0, 0]}, FAIL, "is not finished"),
    ({"fabric": [3, 999, 0, 1]}, FAIL, "fabric failed (NVML 999)"),
    ({"fabric": [3, 0, 0, 2]}, FAIL, "the NVLink fabric calls it unhealthy"),
    ({"fabric": [3, 0, 0, 3]}, WARN, "limited capacity"),
    ({"fabric": [3, 0, 1 << 4, -1]}, FAIL, "the NVLink fabric calls it unhealthy"),
    ({"persistence": 0}, WARN, "persistence mode is off"),
    ({"ecc_mode": [1, 0]}, WARN, "ECC is on and will be off after a GPU reset"),
    ({"mig": [0, 1]}, WARN, "MIG is off and will be on after a GPU reset"),
    ({"compute_mode": 2}, FAIL, "lets nobody use it"),
    ({"compute_mode": 3}, WARN, "exclusive process"),
    ({"inforom": {"err": 14}}, FAIL, "infoROM is corrupted"),
])  # fmt: skip
def test_what_a_gpu_says_of_itself(bench: Bench, answers: dict[str, Any], level: str, words: str) -> None:
    bench.set(**answers)
    only(bench.found(), level, words)


@pytest.mark.parametrize("answers", [
    {"remapped": [5, 511, 0, 0]}, {"retired": [40, 15, 0]}, {"ecc_lifetime": [20_000_000, 10_000]}, {"margin_c": 10},
    {"margin_c": None, "temperature_c": 93}, {"fabric": [3, 0, 0, 1]}, {"fabric": [0, 0, 0, 0]},
    {"fabric": [3, 0, 0, -1]}, {"nvlinks": [0x3FFFF, 0x3FFFF]}, {"clock_reasons": 4}, {"mig": [1, 1]},
])  # fmt: skip
def test_what_is_within_its_limits_is_not_said(bench: Bench, answers: dict[str, Any]) -> None:
    bench.set(**answers)
    assert bench.found() == []


LINKS = {"nvlinks": [0x3FFFF, 0x3FFFF], "fields": dict.fromkeys((38, 45, 52, 59), 0)}


@pytest.mark.parametrize(("answers", "seconds", "during", "since"), [
    ({"ecc_uncorrected": 5}, 5, (FAIL, "5 uncorrectable memory errors during"), (WARN, "5 of them since the baseline")),
    ({"ecc_corrected": 1001}, 5, (WARN, "1001 memory errors were corrected during"), None),
    ({"remapped": [0, 1, 0, 0]}, 5, (WARN, "1 more rows"), (WARN, "1 more rows")),
    ({"pcie": [5, 8, 5, 16]}, 5, (FAIL, "8 lanes and had 16"), (FAIL, "8 lanes and had 16")),
    ({"pcie_replays": 18}, 5, (WARN, "17 PCIe replays during"), (WARN, "17 PCIe replays since")),
    ({"pcie_replays": 64}, 5, (FAIL, "63 PCIe replays"), (FAIL, "63 PCIe replays")),
    ({"pcie_replays": 16}, 5, None, None),
    ({"pcie_replays": 64}, 300, None, None),
    ({"pcie_replays": 33, "pcie": [4, 16, 4, 16]}, 5, (FAIL, "32 PCIe replays"), (FAIL, "32 PCIe replays")),
    ({"nvlinks": [0x3FFFF, 0x3FFF5]}, 5, (FAIL, "NVLink 1, 3 is down"), (FAIL, "NVLink 1, 3 is down")),
    ({"fields": {38: 2, 45: 3}}, 5, (WARN, "5 NVLink CRC errors"), (WARN, "5 NVLink CRC errors")),
    ({"fields": {38: 500}}, 5, (FAIL, "500 NVLink CRC errors"), (FAIL, "500 NVLink CRC errors")),
    ({"fields": {52: 1}}, 5, (FAIL, "1 NVLink replays during"), (WARN, "1 NVLink replays since")),
    ({"fields": {59: 1}}, 5, (FAIL, "1 NVLink recoveries during"), (WARN, "1 NVLink recoveries since")),
    ({"persistence": 0}, 5, (WARN, "turned off during the reset"), (WARN, "persistence mode is off")),
    ({"ecc_mode": [0, 0]}, 5, (WARN, "ECC is off and was on"), (WARN, "ECC is off and was on")),
    ({"mig": [1, 1]}, 5, (WARN, "MIG is on and was off"), (WARN, "MIG is on and was off")),
])  # fmt: skip
@pytest.mark.parametrize("against", ["before", "base"])
def test_what_changed_during_the_reset_or_since_the_baseline(
    bench: Bench, answers: dict[str, Any], seconds: float, during: Any, since: Any, against: str
) -> None:
    bench.set(**LINKS)
    old = {against: bench.read()}
    bench.set(**answers)
    found = bench.found(**old, elapsed_s=seconds, base_s=seconds)
    expected = during if against == "before" else since
    if expected:
        only(found, *expected)
    else:
        assert found == []


def test_a_counter_that_began_anew_and_a_link_that_came_back_say_nothing(bench: Bench) -> None:
    bench.set(ecc_corrected=5000, pcie_replays=900, nvlinks=[0x3FFFF, 0x3FFFE], pcie=[5, 8, 5, 16])
    old = bench.read()
    bench.set(ecc_corrected=0, pcie_replays=0, nvlinks=[0x3FFFF, 0x3FFFF], pcie=[5, 16, 5, 16])
    assert bench.found(before=old, base=old, elapsed_s=5, base_s=5) == []


def test_what_a_baseline_accepts_is_not_said_again(bench: Bench) -> None:
    bench.set(persistence=0, compute_mode=3, power_limit_mw=500_000)
    base = {"persistence": Reading(0), "compute_mode": Reading(3), "power_limit_w": Reading(500.0)}
    assert bench.found(base=base) == []


@pytest.mark.parametrize("idle", [True, False])
def test_heat_and_power_at_rest_are_warnings_of_a_verification_alone(bench: Bench, idle: bool) -> None:
    bench.set(temperature_c=61, power_mw=160_000)
    found = bench.found(base={"power_w": Reading(100.0)}, idle=idle)
    assert [one.level for one in found] == [WARN, WARN] * idle
    if idle:
        assert "at 61 °C" in found[0].reason
        assert "draws 160 W, at the baseline 100" in found[1].reason


def test_a_gpu_that_a_display_server_draws_on_may_be_busy_and_warm(bench: Bench) -> None:
    busy = [{"utilisation_percent": Reading(7)}] * 3
    bench.set(temperature_c=65)
    assert len(bench.found(settled=busy, idle=True)) == 2
    assert bench.found(settled=busy, idle=True, drawn_on=True) == []


EVERY = (
    "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetUnrepairableMemoryFlag_v1", "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceValidateInforom", "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetComputeMode", "nvmlDeviceGetEccMode", "nvmlDeviceGetRetiredPages",
)  # fmt: skip


def test_functions_that_an_older_driver_lacks_are_neither_gap_nor_finding(tmp_path: Path) -> None:
    with NvmlDouble(1, tmp_path=tmp_path, missing=EVERY) as nvml:
        bench = Bench(nvml)
        readings = bench.read()
        bench.watch.close()
    assert health.unread(readings) == []
    assert health.findings(Case("GPU-0", readings, before=readings, idle=True)) == []
    assert readings["sram_threshold_exceeded"] == NOT_SUPPORTED


def test_a_function_that_older_bindings_lack_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pynvml.nvmlDeviceGetUnrepairableMemoryFlag_v1", raising=False)
    with NvmlDouble(1, tmp_path=tmp_path) as nvml:
        bench = Bench(nvml)
        readings = bench.read()
        bench.watch.close()
    assert readings["memory_unrepairable"] == NOT_SUPPORTED
    assert readings["remapped_uncorrected"] == Reading(0)


@pytest.mark.parametrize("code", [3, 2, 25])
def test_what_a_consumer_card_does_not_offer_is_neither(bench: Bench, code: int) -> None:
    for function in EVERY:
        bench.gpu.fail(code if function not in ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues",
                                                "nvmlDeviceGetMarginTemperature") else 3, function)  # fmt: skip
    assert bench.found() == []
    assert health.unread(bench.read()) == []


@pytest.mark.parametrize(("code", "words"), [(4, "no permission"), (10, "timed out"), (999, "unknown error")])
def test_records_that_fail_are_gaps_said_once_for_each_reason(bench: Bench, code: int, words: str) -> None:
    for function in ("nvmlDeviceGetRemappedRows", "nvmlDeviceValidateInforom", "nvmlDeviceGetNvLinkState"):
        bench.gpu.fail(code, function)
    readings = bench.read()
    (said,) = health.unread(readings)
    assert words in said
    for name in ("failed row remaps", "pending row remaps", "NVLink states", "infoROM"):
        assert name in said
    assert bench.found() == [], "and no number is made of them"


@pytest.mark.parametrize(("answers", "name"), [
    ({"remapped": [0, 0xFFFFFFFF, 0, 0]}, "remapped_uncorrected"),
    ({"unrepairable": 0xFFFFFFFF}, "memory_unrepairable"),
    ({"pcie_replays": 0xFFFFFFFF}, "pcie_replays"), ({"ecc_lifetime": ["NA", 0]}, "ecc_corrected_dram_lifetime"),
    ({"sram_threshold": 7}, "sram_threshold_exceeded"), ({"compute_mode": 0xFFFFFFFF}, "compute_mode"),
    ({"pcie": [5, 16, 5, 0]}, "pcie_width_max"), ({"ecc_mode": [0xFFFFFFFF, 1]}, "ecc_mode"),
    ({"power_limit_default_mw": 0}, "power_limit_default_w"), ({"retired": [0, 0, 9]}, "retired_pending"),
])  # fmt: skip
def test_sentinels_and_absurd_values_are_failed_and_never_a_finding(
    bench: Bench, answers: dict[str, Any], name: str
) -> None:
    bench.set(**answers)
    reading = bench.read()[name]
    assert reading.failed
    assert reading.problem.startswith("out of range")
    assert bench.found(before=bench.read()) == []


@pytest.mark.parametrize("code", [15, 16])
def test_a_gpu_that_is_gone_is_one_finding(bench: Bench, code: int) -> None:
    bench.gpu.fail(code)
    readings = bench.read()
    assert all(readings[name].failed for name in HEALTH)
    (one,) = bench.found()
    assert one.level == FAIL
    assert f"(NVML {code})" in one.reason
    assert health.unread(readings) == []


def test_the_second_read_of_what_failed_for_a_moment_is_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.02)
    bench.nvml.clock(0)
    bench.set(remapped={"at": [[0, {"err": 999}], [1, [0, 0, 0, 0]]]})
    wait = bench.watch.step

    def later(*args: Any) -> None:
        bench.nvml.clock(1)
        wait(*args)

    assert health.unread(bench.read()) != []
    monkeypatch.setattr(bench.watch, "step", later)
    assert health.unread(health.read_surely(bench.watch).gpus[0]) == []


def test_no_time_is_spent_on_what_will_not_be_permitted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 600.0)
    bench.gpu.fail(4, "nvmlDeviceGetRemappedRows")
    calls = bench.gpu.calls("nvmlDeviceGetComputeMode")
    assert health.unread(health.read_surely(bench.watch).gpus[0]) != []
    assert bench.gpu.calls("nvmlDeviceGetComputeMode") == calls + 1


def test_neither_the_lean_nor_the_slow_set_pays_for_health(bench: Bench) -> None:
    before = {name: bench.nvml.calls(name) for name in EVERY}
    bench.watch.read("lean")
    assert {name: bench.nvml.calls(name) for name in EVERY} == before
    bench.watch.read("slow")
    dear = ("nvmlDeviceValidateInforom", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetGpuFabricInfoV")
    assert [bench.nvml.calls(name) for name in dear] == [before[name] for name in dear]
