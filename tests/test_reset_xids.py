"""XIDs in a verdict: which count, against which GPU, and which are only what a reset's own kill left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import kernelgpus, procfs
from backend.agent.kernelgpus import address
from backend.agent.reset import baseline, clearance, cycle, health, receipt, settling
from backend.agent.reset.cycle import Cycle, verify
from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.ops import op_baseline_record
from backend.agent.reset.rules.case import Case
from backend.agent.reset.xids.blame import Kill, blame
from backend.agent.reset.xids.gathering import Gathering
from backend.agent.reset.xids.settled import Settled
from backend.agent.reset.xids.sighting import AFTER, BEFORE, DURING, KERNEL_LOG, KILL, Sighting
from backend.agent.reset.xids.weighing import weigh
from backend.agent.seam import Machine
from backend.agent.xid.lines import Lines, Said
from backend.wire import CLEAN, LIMITED, UNHEALTHY, Reading, Receipt
from tests.kernellogs import USER, KernelLogFile, xid
from tests.nvml import NvmlDouble
from tests.resetting import Bench, FileDevices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = {"0000:1a:00": 0, "0000:1b:00": 1}
VICTIM, OTHER = 4711, 815
DONE = Kill(frozenset({VICTIM}), frozenset({0}), frozenset())


def said(text: str) -> Said:
    found = Lines().take(text)
    assert found is not None
    return found


def seen(number: int, rest: str = "x", phase: str = KILL, bus: str = "0000:1a:00", seq: int = 9) -> Sighting:
    return Sighting(said(xid(number, rest, bus)), phase, 0.0, seq, KERNEL_LOG, GPUS.get(bus))


def by(pid: int | str) -> str:
    return f"pid={pid}, name=python3, Ch 00000011"


class TestBlame:
    """Only what ending a process leaves behind, of a process that was ended, from the first signal on."""

    @pytest.mark.parametrize("number", [13, 31, 43, 45, 174])
    @pytest.mark.parametrize("phase", [KILL, AFTER])
    def test_what_a_kill_leaves_of_its_victim_is_its_own_doing(self, number: int, phase: str) -> None:
        one = seen(number, by(VICTIM), phase)
        blame([one], DONE)
        assert one.ours
        assert str(VICTIM) in one.why

    @pytest.mark.parametrize(("one", "kill"), [
        (seen(43, by(OTHER)), DONE),
        (seen(43, by(VICTIM), DURING), DONE),
        (seen(43, by(VICTIM), BEFORE), DONE),
        (seen(43, by(VICTIM)), DONE._replace(comparable=False)),
        (seen(43, f"pid={VICTIM}"), DONE),
        (seen(48, by(VICTIM)), DONE),
        (seen(79, by(VICTIM)), DONE),
        (seen(8, by(VICTIM)), DONE),
        (seen(45, by(VICTIM) + " caused by previous Xid 48"), DONE),
        (seen(43, by("<unknown>"), AFTER), DONE),
        (seen(43, by("<unknown>"), DURING), DONE),
        (seen(43, by("<unknown>"), bus="0000:1b:00"), DONE),
        (seen(43, by("<unknown>"), bus="0000:99:00"), DONE),
        (seen(43, by("<unknown>")), Kill()),
        (seen(109, by("<unknown>")), DONE._replace(computing=frozenset({0}))),
    ], ids=str)  # fmt: skip
    def test_nothing_else_is(self, one: Sighting, kill: Kill) -> None:
        blame([one], kill)
        assert not one.ours

    @pytest.mark.parametrize("rest", [by("<unknown>"), by("'<unknown>'"), "Ch 00000011"])
    def test_without_a_pid_it_is_where_and_while_its_victims_die(self, rest: str) -> None:
        one = seen(43, rest)
        blame([one], DONE)
        assert one.ours

    def test_what_follows_from_what_it_caused_is_too(self) -> None:
        one = seen(45, by(VICTIM) + " caused by previous Xid 31")
        blame([one], DONE)
        assert one.ours

    @pytest.mark.parametrize(("times", "computing", "ours"), [
        (1, {0}, True), (2, {0}, False), (1, {1}, False), (1, set(), False),
    ])  # fmt: skip
    def test_a_switch_timeout_is_forgiven_once_and_only_to_a_gpu_that_computes(
        self, times: int, computing: set[int], ours: bool
    ) -> None:
        timeouts = [seen(109, by(VICTIM)) for _ in range(times)]
        follower = seen(45, by(VICTIM) + " caused by previous Xid 109")
        blame([*timeouts, follower], DONE._replace(computing=frozenset(computing)))
        assert {one.ours for one in [*timeouts, follower]} == {ours}


def weighed(*sightings: Sighting, known: Settled | None = None, **readings: Any) -> tuple[list[Finding], list[Finding]]:
    """Return what is found of GPU 0 and of the host."""
    cases = {
        index: Case(f"GPU-{index}", {name: Reading(value) for name, value in readings.items()}) for index in (0, 1)
    }
    found = weigh(list(sightings), cases, known or Settled())
    return found.gpus.get(0, []), found.host


class TestWeighing:
    """From lines to findings."""

    @pytest.mark.parametrize("phase", [BEFORE, DURING, KILL, AFTER])
    def test_a_fault_counts_whenever_it_came_and_says_what_to_do(self, phase: str) -> None:
        ((found,), host) = weighed(seen(48, by(VICTIM), phase))
        assert (found.level, host) == (FAIL, [])
        assert "XID 48: double-bit memory error" in found.reason
        assert f"process {VICTIM} (python3)" in found.reason
        assert "--gpu-reset --gpu GPU-0" in found.action
        assert "dmesg" in found.command
        assert ("baseline record" in found.action) == (phase == BEFORE)

    def test_the_same_again_is_one_finding_with_its_count(self) -> None:
        ((found,), _) = weighed(seen(31, by(1)), seen(31, by(2)), seen(31, by(2)))
        assert found.level == WARN
        assert "3 times during this check" in found.reason
        assert "by 2 processes, last process 2" in found.reason

    def test_what_the_kill_caused_is_no_finding(self) -> None:
        assert weighed(replace(seen(45, by(VICTIM)), ours=True)) == ([], [])

    def test_a_notice_is_none(self) -> None:
        assert weighed(seen(37)) == ([], [])

    def test_a_cut_line_is_shown_as_it_is(self) -> None:
        ((found,), _) = weighed(seen(43, "pid=21"))
        assert "pid=21" in found.reason

    @pytest.mark.parametrize("known", [Settled(baseline_seq=9), Settled(baseline_seq=12)])
    def test_a_baseline_settles_what_came_before_it(self, known: Settled) -> None:
        ((found,), _) = weighed(seen(48, phase=BEFORE), known=known)
        assert found.level == WARN
        assert "a baseline was recorded since" in found.reason
        assert weighed(seen(31, phase=BEFORE), known=known) == ([], [])

    @pytest.mark.parametrize(("phase", "seq", "known"), [
        (BEFORE, 9, Settled(baseline_seq=8)), (DURING, 9, Settled(baseline_seq=9)), (BEFORE, -1, Settled()),
    ])  # fmt: skip
    def test_and_nothing_that_came_after(self, phase: str, seq: int, known: Settled) -> None:
        ((found,), _) = weighed(seen(48, phase=phase, seq=seq), known=known)
        assert found.level == FAIL

    @pytest.mark.parametrize(("phase", "pid", "seq", "said_again"), [
        (BEFORE, VICTIM, 9, False), (BEFORE, OTHER, 9, True), (BEFORE, VICTIM, 13, True), (DURING, VICTIM, 9, True),
    ])  # fmt: skip
    def test_what_an_earlier_reset_caused_is_not_said_again(
        self, phase: str, pid: int, seq: int, said_again: bool
    ) -> None:
        known = Settled(of_resets=(("0000:1a:00.0", 45, VICTIM, 5, 12),))
        found, _ = weighed(seen(45, by(pid), phase, seq=seq), known=known)
        assert bool(found) == said_again


def action(number: int, bus: str = "0000:1a:00", phase: str = BEFORE) -> Sighting:
    return seen(154, f"GPU recovery action changed from 0x0 (x) to 0x{number:x} (y)", phase, bus)


class TestRecoveryActions:
    """XID 154: the log's last word on each GPU, and the driver's own now."""

    @pytest.mark.parametrize(("numbers", "level"), [
        ((1,), FAIL), ((4, 1), FAIL), ((4, 1, 0), None), ((0, 2), FAIL), ((9,), FAIL), ((1, 3), WARN), ((0,), None),
    ])  # fmt: skip
    def test_the_last_line_wins(self, numbers: tuple[int, ...], level: str | None) -> None:
        found, _ = weighed(*[action(number) for number in numbers])
        assert [one.level for one in found] == ([level] if level else [])

    def test_no_other_gpus_line_wins(self) -> None:
        found, _ = weighed(action(2), action(0, "0000:1b:00"))
        assert [one.level for one in found] == [FAIL]

    def test_a_fault_that_the_driver_recovered_from_before_is_a_warning(self) -> None:
        fatal = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 03 (0x02146dc6)"
        found, _ = weighed(seen(149, fatal, BEFORE), action(4), action(0))
        assert [one.level for one in found] == [WARN]
        assert [one.level for one in weighed(action(0), seen(149, fatal, BEFORE))[0]] == [FAIL]
        assert [one.level for one in weighed(seen(149, fatal, DURING), action(0))[0]] == [FAIL]
        assert FAIL in [one.level for one in weighed(seen(149, fatal, BEFORE), action(1))[0]]

    @pytest.mark.parametrize(("number", "now", "count"), [(1, 1, 0), (1, 0, 1), (2, 1, 1)])
    def test_what_the_driver_says_now_is_not_said_twice_and_never_hides_the_log(
        self, number: int, now: int, count: int
    ) -> None:
        found, _ = weighed(action(number), recovery_action=now)
        assert [one.level for one in found] == [FAIL] * count


class TestOtherDevices:
    """What is of no GPU that the driver lists."""

    def test_a_lost_gpu_is_named_by_its_address_and_fails_the_host(self) -> None:
        _, (found,) = weighed(replace(seen(79, bus="0000:b1:00"), uuid="GPU-b1"))
        assert found.level == FAIL
        assert "the GPU at 0000:b1:00.0 (GPU-b1), which the driver does not list: XID 79" in found.reason

    def test_an_nvswitch_is_one_of_the_hosts(self) -> None:
        text = "nvidia-nvswitch1: SXid (PCI:0000:a7:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"
        _, (found,) = weighed(Sighting(said(text), BEFORE, 0.0, 1, KERNEL_LOG))
        assert found.level == FAIL
        assert "nvidia-nvswitch1 at 0000:a7:00.0: SXid 20034" in found.reason

    def test_a_gpu_of_another_container_blames_nobody_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away = address("0000:b1:00")
        assert away is not None
        assert weighed(seen(79, bus="0000:b1:00"), known=Settled(withheld=(away,))) == ([], [])
        assert len(weighed(seen(79, bus="0000:b1:00"), known=Settled(withheld=(away,), ours=(away,)))[1]) == 1
        monkeypatch.setattr(procfs, "in_initial_pid_namespace", lambda: False)
        assert weighed(seen(79, bus="0000:b1:00")) == ([], [])
        assert len(weighed(seen(79, bus="0000:b1:00"), known=Settled(ours=(away,)))[1]) == 1
        assert len(weighed(seen(79))[0]) == 1

    def test_the_kernels_gpus_without_a_device_file_are_not_given_to_this_container(self, tmp_path: Path) -> None:
        for minor, bus in enumerate(("0000:1a:00.0", "0000:1b:00.0")):
            folder = tmp_path / "proc/driver/nvidia/gpus" / bus
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Device Minor: \t {minor}\n", "ascii")
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").touch()
        assert kernelgpus.withheld(str(tmp_path)) == ["0000:1b:00.0"]
        assert kernelgpus.withheld(str(tmp_path / "nowhere")) == []


@pytest.fixture
def log(tmp_path: Path) -> KernelLogFile:
    return KernelLogFile(tmp_path)


class TestVerification:
    """GPUs of the NVML double, and a file in the kernel log's place."""

    @pytest.fixture
    def nvml(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
        for module, name in ((clearance, "STABLE_S"), (cycle, "VERIFY_S"), (health, "RETRY_S"), (baseline, "SPAN_S"),
                             (settling, "EVERY_S"), (settling, "SETTLED_S")):  # fmt: skip
            monkeypatch.setattr(module, name, 0.05)
        with NvmlDouble(2, tmp_path=tmp_path) as double:
            yield double

    def check(self, nvml: NvmlDouble, log: str, keep: bool = False) -> Receipt:
        return verify(self.machine(nvml, log), accept_limited=False, keep=keep)

    def machine(self, nvml: NvmlDouble, log: str) -> Machine:
        return Machine(nvml.make_driver, lambda: FileDevices(str(nvml.path.parent)), [], kernel_log=log)

    def test_a_quiet_log_is_clean_and_written_down_as_read(self, nvml: NvmlDouble, log: KernelLogFile) -> None:
        log.say("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", xid(48, "forged"), priority=USER)
        said = self.check(nvml, str(log.path))
        assert (said.verdict, said.xids, said.kernel_log) == (CLEAN, [], "")

    def test_a_fault_makes_its_gpu_unhealthy_until_a_baseline_is_recorded(
        self, nvml: NvmlDouble, log: KernelLogFile
    ) -> None:
        log.say(xid(95, by(OTHER), "0000:1b:00"), xid(31, by(OTHER)))
        said = self.check(nvml, str(log.path))
        assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
        assert "XID 95" in said.after[1].reason
        assert "warning: XID 31" in said.after[0].reason
        assert [(row["xid"], row["gpu"], row["level"], row["phase"], row["ours"]) for row in said.xids] == [
            (95, 1, "fail", BEFORE, False), (31, 0, "warn", BEFORE, False),
        ]  # fmt: skip
        op_baseline_record(self.machine(nvml, str(log.path)), {})
        again = self.check(nvml, str(log.path))
        assert again.verdict == CLEAN
        assert "warning: XID 95" in again.after[1].reason
        log.say(xid(95, by(OTHER), "0000:1b:00"))
        assert self.check(nvml, str(log.path)).verdict == UNHEALTHY

    def test_a_baseline_of_another_boot_settles_nothing(
        self, nvml: NvmlDouble, log: KernelLogFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log.say(xid(95))
        op_baseline_record(self.machine(nvml, str(log.path)), {})
        monkeypatch.setattr(procfs, "boot_id", lambda: "another")
        assert self.check(nvml, str(log.path)).verdict == UNHEALTHY

    def test_a_log_that_cannot_be_read_limits_and_is_never_none(self, nvml: NvmlDouble, tmp_path: Path) -> None:
        said = self.check(nvml, str(tmp_path / "absent"))
        assert said.verdict == LIMITED
        assert "the kernel log is unreadable, because" in said.after[0].reason
        assert "told by the driver" in said.after[0].reason
        assert "unreadable, because" in said.kernel_log

    def test_nor_where_the_driver_tells_none_either(self, nvml: NvmlDouble, tmp_path: Path) -> None:
        for index in (0, 1):
            nvml.gpu(index).fail(3, "nvmlDeviceRegisterEvents")
        said = self.check(nvml, str(tmp_path / "absent"))
        assert "the driver tells none either: unsupported" in said.after[0].reason

    def test_a_driver_that_never_registers_does_not_hold_it_up(self, nvml: NvmlDouble, log: KernelLogFile) -> None:
        nvml.hang(function="nvmlEventSetCreate")
        assert self.check(nvml, str(log.path)).verdict == CLEAN

    def test_a_log_that_does_not_go_back_to_boot_says_so(self, nvml: NvmlDouble, log: KernelLogFile) -> None:
        log.path.write_text("")
        log.newest = 500
        log.say("Some later word")
        said = self.check(nvml, str(log.path))
        assert said.verdict == CLEAN
        assert any("not to boot" in note for note in said.notes)

    def test_a_gpu_that_fell_off_is_found_by_its_uuid_in_the_log(self, nvml: NvmlDouble, log: KernelLogFile) -> None:
        nvml.gpu(1).describe(bus=" ")
        log.say(
            f"NVRM: GPU at PCI:0000:1b:00: {nvml.gpu(1).uuid}", "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."
        )
        said = self.check(nvml, str(log.path))
        assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
        assert "XID 79: the GPU has fallen off the bus" in said.after[1].reason

    def test_a_gpu_that_answers_nothing_is_found_by_what_the_baseline_knows(
        self, nvml: NvmlDouble, log: KernelLogFile
    ) -> None:
        op_baseline_record(self.machine(nvml, str(log.path)), {})
        nvml.gpu(1).fail(15, "nvmlDeviceGetHandleByIndex_v2")
        log.say(xid(79, "GPU has fallen off the bus.", "0000:1b:00"))
        said = self.check(nvml, str(log.path))
        assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
        assert "XID 79" in said.after[1].reason
        assert said.host_findings == []

    def test_one_that_is_not_listed_any_more_fails_the_host(self, nvml: NvmlDouble, log: KernelLogFile) -> None:
        log.say(xid(79, "GPU has fallen off the bus.", "0000:b1:00"))
        said = self.check(nvml, str(log.path))
        assert (said.verdict, [one.verdict for one in said.after]) == (UNHEALTHY, [CLEAN, CLEAN])
        assert "0000:b1:00.0" in said.host_findings[0]["reason"]

    @pytest.mark.parametrize("told", [True, False])
    def test_an_event_of_the_driver_counts_once_with_or_without_its_line(
        self, nvml: NvmlDouble, log: KernelLogFile, monkeypatch: pytest.MonkeyPatch, told: bool
    ) -> None:
        begin = Gathering.begin

        def then(self: Gathering) -> None:
            begin(self)
            nvml.raise_xid(0, 62)
            if told:
                log.say(xid(62, "halted"))

        monkeypatch.setattr(Gathering, "begin", then)
        said = self.check(nvml, str(log.path))
        assert [one.verdict for one in said.after] == [UNHEALTHY, CLEAN]
        (row,) = said.xids
        assert (row["source"], row["count"]) == ("kernel log" if told else "driver event", 1)


class TestReset:
    """A kill of a real process, and what the kernel's log says while it happens."""

    @pytest.fixture
    def bench(self, tmp_path: Path, log: KernelLogFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        monkeypatch.setattr(clearance, "STABLE_S", 0.2)
        monkeypatch.setattr(clearance, "SETTLED_S", 0.2)
        (tmp_path / "host").mkdir()
        host = Bench(tmp_path / "host")
        host.machine.kernel_log = str(log.path)
        log.say("NVRM: GPU at PCI:0000:1a:00: GPU-0000")
        yield host
        host.close()

    def reset(self, bench: Bench, name: str = "r1") -> Receipt:
        options = {"id": name, "grace_s": 5.0, "deadline_s": 6.0, "cuda_test": False}
        Cycle(bench.machine, os.path.join(bench.root, "run"), options).run()
        return receipt.load(name)

    def test_what_the_kill_left_is_its_own_and_what_another_did_is_not(
        self, bench: Bench, log: KernelLogFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        holder = bench.start("plain")
        signalling = Gathering.signalling

        def then(self: Gathering) -> None:
            log.say(xid(13, by(holder.pid)))
            signalling(self)
            log.say(xid(45, by(holder.pid)), xid(45, by(holder.pid)), xid(31, by(os.getpid())))

        monkeypatch.setattr(Gathering, "signalling", then)
        said = self.reset(bench)
        assert said.verdict == CLEAN
        assert [(row["xid"], row["phase"], row["ours"], row["level"], row["count"]) for row in said.xids] == [
            (13, DURING, False, "warn", 1), (45, KILL, True, "info", 2), (31, KILL, False, "warn", 1),
        ]  # fmt: skip
        assert "warning: XID 31" in said.after[0].reason
        assert "warning: XID 13" in said.after[0].reason
        assert "XID 45" not in said.after[0].reason
        assert any(
            f"XID 45 on GPU 0, 2 times: process {holder.pid} was ended by this reset" in note for note in said.notes
        )
        monkeypatch.setattr(Gathering, "signalling", signalling)
        later = verify(bench.machine, accept_limited=False, keep=False)
        assert [row["why"] for row in later.xids if row["xid"] == 45] == ["an earlier reset caused it"]
        assert "XID 45" not in later.after[0].reason
        assert "XID 31" in later.after[0].reason
