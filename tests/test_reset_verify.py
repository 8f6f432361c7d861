"""A verification of GPUs whose driver is the double: settling readings, faults, the host's set of GPUs."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import gates, kernelgpus
from backend.agent.reset import baseline, clearance, cycle, health, settling
from backend.agent.reset.cycle import Cycle, verify
from backend.agent.reset.finding import FAIL, WARN
from backend.agent.reset.ops import op_baseline_record
from backend.agent.reset.watch import Watch
from backend.agent.seam import Machine
from backend.wire import CLEAN, LIMITED, MIB, UNHEALTHY, UNKNOWN, Gate, GpuFacts, Receipt
from tests.nvml import NvmlDouble
from tests.resetting import FileDevices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 0.05


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
    """Give a driver of three GPUs, and waits of a twentieth of a second where a host waits one or two."""
    for module, name in ((clearance, "STABLE_S"), (cycle, "VERIFY_S"), (health, "RETRY_S"), (settling, "EVERY_S"),
                         (settling, "SETTLED_S"), (baseline, "SPAN_S")):  # fmt: skip
        monkeypatch.setattr(module, name, WAIT_S)
    with NvmlDouble(3, tmp_path=tmp_path) as double:
        yield double


def machine(nvml: NvmlDouble) -> Machine:
    return Machine(nvml.make_driver, lambda: FileDevices(str(nvml.path.parent)), [])


def check(nvml: NvmlDouble) -> Receipt:
    return verify(machine(nvml), accept_limited=False)


def gate_of(nvml: NvmlDouble, receipt: Receipt) -> Gate:
    return gates.check(machine(nvml), {"clean_gpus": True}, lambda: receipt)[0]


def words(receipt: Receipt) -> list[str]:
    return [one.verdict for one in receipt.after]


class TestSettling:
    """Utilisation and the reasons of the clocks lag behind a release."""

    @pytest.mark.parametrize(("answers", "level", "said"), [
        ({"clock_reasons": 0x48}, FAIL, "held down by heat (hardware)"),
        ({"clock_reasons": 0x80}, FAIL, "power brake"),
        ({"clock_reasons": 0x20}, WARN, "held down by heat (software)"),
        ({"clock_reasons": 0x08}, WARN, "held down by the hardware"),
        ({"utilisation": [100, 0]}, FAIL, "utilisation stays at 100 %"),
    ])  # fmt: skip
    def test_what_stays_at_every_moment_is_found(
        self, nvml: NvmlDouble, answers: dict[str, Any], level: str, said: str
    ) -> None:
        nvml.gpu(1).set(**answers)
        receipt = check(nvml)
        assert words(receipt) == [CLEAN, UNHEALTHY if level == FAIL else CLEAN, CLEAN]
        (one,) = receipt.after[1].findings
        assert one["level"] == level
        assert said in one["reason"]
        assert said in receipt.after[1].reason

    @pytest.mark.parametrize("answers", [
        {"utilisation": [99, 40]}, {"clock_reasons": 0x40}, {"clock_reasons": 0x80},
    ])  # fmt: skip
    def test_what_passes_within_its_moments_is_not(
        self, nvml: NvmlDouble, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml.gpu(0).set(**answers)
        waits: list[float] = []

        def settled(watch: Watch, due: float) -> None:
            waits.append(due)
            if len(waits) == settling.heat.SAMPLES:
                nvml.gpu(0).set(utilisation=[0, 0], clock_reasons=1)

        monkeypatch.setattr(settling, "_wait", settled)
        assert words(check(nvml)) == [CLEAN] * 3
        assert len(waits) == settling.heat.SAMPLES
        assert waits[2] - waits[0] == pytest.approx(2 * WAIT_S)

    @pytest.mark.parametrize("reasons", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
    def test_a_healthy_host_waits_for_nothing(
        self, nvml: NvmlDouble, reasons: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml.gpu(0).set(clock_reasons=reasons)
        monkeypatch.setattr(settling, "SETTLED_S", 600.0)
        assert words(check(nvml)) == [CLEAN] * 3

    def test_a_display_server_may_keep_its_gpu_busy(self, nvml: NvmlDouble, tmp_path: Path) -> None:
        program = tmp_path / "Xorg"
        shutil.copy("/bin/sleep", program)
        server = subprocess.Popen([program, "600"])
        try:
            nvml.gpu(0).set(utilisation=[7, 1])
            nvml.gpu(0).hold(server.pid, 4 * MIB, "graphics")
            receipt = check(nvml)
        finally:
            server.kill()
            server.wait()
        assert words(receipt) == [CLEAN] * 3
        assert receipt.after[0].findings == []

    def test_it_counts_from_the_clear(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(utilisation=[100, 0])
        watch = Watch(nvml.make_driver)
        watch.open()
        cleared_at = time.monotonic()
        seen = settling.settle(watch, [0, 1], cleared_at)
        watch.close()
        assert time.monotonic() - cleared_at >= settling.SETTLED_S + 2 * settling.EVERY_S
        assert {index: len(moments) for index, moments in seen.items()} == {0: settling.heat.SAMPLES}

    def test_the_last_moment_leaves_room_for_a_verdict_within_five_seconds_of_the_release(self) -> None:
        assert settling.SETTLED_S + (settling.heat.SAMPLES - 1) * settling.EVERY_S <= 4.0


class TestFaults:
    """One faulty GPU beside healthy ones."""

    def test_a_record_that_cannot_be_read_limits(self, nvml: NvmlDouble) -> None:
        nvml.gpu(2).fail(4, "nvmlDeviceGetRemappedRows")
        receipt = check(nvml)
        assert words(receipt) == [CLEAN, CLEAN, LIMITED]
        assert "no permission" in receipt.after[2].reason

    @pytest.mark.parametrize("code", [15, 16])
    def test_a_gpu_that_is_gone_is_unhealthy(self, nvml: NvmlDouble, code: int) -> None:
        nvml.gpu(1).fail(code)
        assert words(check(nvml)) == [CLEAN, UNHEALTHY, CLEAN]

    def test_a_gpu_that_is_lost_once_it_was_free_is_unhealthy(self, nvml: NvmlDouble) -> None:
        nvml.gpu(1).fail(15, "nvmlDeviceGetComputeMode")
        receipt = check(nvml)
        assert words(receipt) == [CLEAN, UNHEALTHY, CLEAN]
        assert "GPU is lost" in receipt.after[1].reason

    def test_a_gpu_that_hangs_for_good_at_its_health_is_unknown(
        self, nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Watch.__init__, "__defaults__", (0.3,))
        nvml.gpu(1).hang(function="nvmlDeviceValidateInforom")
        receipt = check(nvml)
        assert words(receipt) == [CLEAN, UNKNOWN, CLEAN]
        assert "not answering" in receipt.after[1].reason

    def test_an_error_that_lasts_a_moment_is_waited_out(
        self, nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health, "RETRY_S", 0.4)
        nvml.gpu(1).fail(999, "nvmlDeviceGetRemappedRows", seconds=0.7)
        assert words(check(nvml)) == [CLEAN] * 3

    def test_an_unreadable_power_does_not_hold_up_a_launch(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(power_mw={"err": 999})
        assert words(check(nvml)) == [CLEAN] * 3

    def test_mig_takes_readings_away_and_is_no_fault(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(mig=[1, 1], utilisation=None, ecc_uncorrected=None, remapped=None, nvlinks=None)
        assert words(check(nvml)) == [CLEAN] * 3

    def test_errors_during_a_reset_are_set_against_before_it(self, nvml: NvmlDouble, tmp_path: Path) -> None:
        nvml.clock(0)
        nvml.gpu(1).set(ecc_uncorrected={"at": [[0, 1], [1, 4]]})
        (tmp_path / "run").mkdir()
        reset = Cycle(machine(nvml), str(tmp_path / "run"), {"id": "r1", "grace_s": 1.0, "deadline_s": 1.0})
        stop = reset._carry_out
        reset._carry_out = lambda *args: (nvml.clock(1), stop(*args))[1]  # type: ignore[method-assign]
        assert reset.run() == 1
        assert words(reset._receipt) == [CLEAN, UNHEALTHY, CLEAN]
        assert "3 uncorrectable memory errors during the reset" in reset._receipt.after[1].reason
        assert "warning: 1 uncorrectable" in reset._receipt.before[1].reason


class TestTheSetOfGpus:
    """A GPU that is missing cannot be judged: it is a fault of the host."""

    def test_one_that_the_baseline_knows_and_the_driver_does_not_makes_the_host_unhealthy(
        self, nvml: NvmlDouble
    ) -> None:
        op_baseline_record(machine(nvml), {})
        assert check(nvml).verdict == CLEAN
        lost = nvml.gpu(2).uuid
        nvml.set_count(2)
        receipt = check(nvml)
        assert (receipt.verdict, words(receipt)) == (UNHEALTHY, [CLEAN, CLEAN])
        (one,) = receipt.host_findings
        assert one["level"] == FAIL
        assert f"GPU {lost} is missing" in one["reason"]
        assert any(lost in note for note in receipt.notes)
        gate = gate_of(nvml, receipt)
        assert gate.ok is False
        assert lost in gate.detail

    def test_one_that_the_baseline_does_not_know_is_noted(self, nvml: NvmlDouble) -> None:
        nvml.set_count(2)
        op_baseline_record(machine(nvml), {})
        nvml.set_count(3)
        receipt = check(nvml)
        assert receipt.verdict == CLEAN
        (one,) = receipt.host_findings
        assert (one["level"], nvml.gpu(2).uuid in one["reason"]) == (WARN, True)

    def test_one_that_gives_no_uuid_is_there_and_judged_by_itself(self, nvml: NvmlDouble) -> None:
        op_baseline_record(machine(nvml), {})
        nvml.gpu(1).fail(15, "nvmlDeviceGetHandleByIndex_v2")
        receipt = check(nvml)
        assert receipt.host_findings == []
        assert words(receipt) == [CLEAN, UNHEALTHY, CLEAN]

    def test_without_a_baseline_none_is_missed(self, nvml: NvmlDouble) -> None:
        assert check(nvml).host_findings == []

    def test_a_library_of_another_version_than_the_module_is_a_fault_of_the_host(self, nvml: NvmlDouble) -> None:
        nvml.fail(18)
        receipt = check(nvml)
        assert (receipt.verdict, receipt.after) == (UNHEALTHY, [])
        assert "reboot" in receipt.host_findings[0]["action"]
        assert gate_of(nvml, receipt).ok is False

    def test_settings_changed_since_the_baseline_void_its_memory(self, nvml: NvmlDouble) -> None:
        nvml.gpu(0).set(memory=[150754820096, 644939776, 40 * MIB])
        op_baseline_record(machine(nvml), {})
        assert check(nvml).verdict == CLEAN
        nvml.gpu(0).set(persistence=0)
        receipt = check(nvml)
        assert "recorded with persistence mode on, now off" in receipt.after[0].reason
        assert receipt.after[0].baseline_bytes is None


class TestTheKernelsList:
    """/proc/driver/nvidia against the driver's list, in a folder that stands for the root."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for minor, bus in enumerate(("0000:1a:00.0", "0000:1b:00.0")):
            folder = tmp_path / "proc/driver/nvidia/gpus" / bus
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n", "ascii")
        (tmp_path / "dev").mkdir()
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (tmp_path / "dev" / name).touch()
        return tmp_path

    GPUS = (GpuFacts(0, "GPU-a", "H200", "00000000:1A:00.0", 0), GpuFacts(1, "GPU-b", "H200", "00000000:1B:00.0", 1))

    def test_a_whole_host_has_no_fault_and_one_without_the_module_says_nothing(self, root: Path) -> None:
        assert kernelgpus.faults([*self.GPUS], str(root)) == []
        assert kernelgpus.faults([*self.GPUS], str(root / "elsewhere")) == []

    def test_one_that_the_driver_does_not_list_is_named(self, root: Path) -> None:
        ((text, _, _, fails),) = kernelgpus.faults([self.GPUS[0]], str(root))
        assert fails
        assert "0000:1b:00.0" in text

    def test_one_without_a_device_file_was_not_given_to_this_container(self, root: Path) -> None:
        (root / "dev/nvidia1").unlink()
        assert kernelgpus.faults([self.GPUS[0]], str(root)) == []

    def test_one_that_is_listed_without_an_address_is_not_missed(self, root: Path) -> None:
        assert kernelgpus.faults([self.GPUS[0], GpuFacts(1, "", "", problem="GPU is lost")], str(root)) == []

    @pytest.mark.parametrize(("name", "fails"), [("nvidia1", True), ("nvidiactl", True), ("nvidia-uvm", False)])
    def test_a_missing_device_file_is_named(self, root: Path, name: str, fails: bool) -> None:
        (root / "dev" / name).unlink()
        ((text, _, _, found),) = kernelgpus.faults([*self.GPUS], str(root))
        assert f"/dev/{name} is missing" in text
        assert found is fails

    def test_one_bound_to_nouveau_is_a_warning(self, root: Path) -> None:
        (root / "sys/bus/pci/drivers/nouveau/0000:3d:00.0").mkdir(parents=True)
        (root / "sys/bus/pci/drivers/nouveau/bind").touch()
        ((text, _, _, fails),) = kernelgpus.faults([*self.GPUS], str(root))
        assert not fails
        assert "0000:3d:00.0 is bound to nouveau" in text
