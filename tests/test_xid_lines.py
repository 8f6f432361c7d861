"""What the GPU driver writes to the kernel log: which lines are XIDs, of which GPU, by whom, and how bad."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.kernelgpus import address, written
from backend.agent.xid import catalogue, kernellog
from backend.agent.xid.catalogue import FAIL, INFO, WARN, meaning
from backend.agent.xid.kernellog import KernelLog
from backend.agent.xid.lines import ADVICE, SXID, XID, Lines, Said
from tests.kernellogs import USER, record

if TYPE_CHECKING:
    from pathlib import Path

AT = "NVRM: Xid (PCI:0000:3d:00): "


def read(*texts: str) -> list[Said]:
    lines = Lines()
    return [said for said in map(lines.take, texts) if said]


def one(text: str) -> Said:
    (said,) = read(text)
    return said


class TestWhoAndWhere:
    """Number, GPU, pid and name, whatever the name holds."""

    @pytest.mark.parametrize(("text", "number", "bus", "pid", "name"), [
        (AT + "79, GPU has fallen off the bus.", 79, "0000:3d:00.0", None, ""),
        (AT + "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79, "0000:3d:00.0", None, ""),
        (AT + "79, pid=1122, GPU has fallen off the bus.", 79, "0000:3d:00.0", 1122, ""),
        (AT + "31, pid=218813, name=pt_main_thread, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS",
         31, "0000:3d:00.0", 218813, "pt_main_thread"),
        (AT + "43, pid='218813', name=sglang::schedul, Ch 00000008", 43, "0000:3d:00.0", 218813, "sglang::schedul"),
        (AT + "109, pid=7, name=a, b): 79, x, Ch 00000010, errorString CTX SWITCH TIMEOUT, Info 0x1c003",
         109, "0000:3d:00.0", 7, "a, b): 79, x"),
        (AT + "45, pid=7, name=sh, Ch 00000008, more", 45, "0000:3d:00.0", 7, "sh"),
        (AT + "43, pid=7, name=`reboot`, pid=9, Ch 00000008", 43, "0000:3d:00.0", 7, "`reboot`, pid=9"),
        (AT + "43, pid=7, name=x): 48, pid=1, Ch 00000008", 43, "0000:3d:00.0", 7, "x): 48, pid=1"),
        (AT + "94, pid=7, name=python3, Contained: SM (0x3). RST: No, D-RST: No", 94, "0000:3d:00.0", 7, "python3"),
        (AT + "13, pid=7, name=two\nlines, Graphics Exception", 13, "0000:3d:00.0", 7, "two\nlines"),
        (AT + "119, pid=7, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
         119, "0000:3d:00.0", 7, "nvidia-smi"),
        ("NVRM: Xid (0000:06:00): 14, Channel 00000007", 14, "0000:06:00.0", None, ""),
        ("NVRM: Xid (PCI:0000:c2:00 GPU-I:02 GPU-CI:01): 43, pid=7, name=x, Ch 00000008", 43, "0000:c2:00.0", 7, "x"),
        ("NVRM: Xid (PCI:10000:01:00): 43, pid=7, name=x, Ch 00000008", 43, "10000:01:00.0", 7, "x"),
    ])  # fmt: skip
    def test_an_xid_is_read_whole(self, text: str, number: int, bus: str, pid: int | None, name: str) -> None:
        said = one(text)
        assert said.bus is not None
        assert (said.kind, said.number, written(said.bus), said.pid, said.name) == (XID, number, bus, pid, name)
        assert said.whole

    @pytest.mark.parametrize("text", [
        AT + "4", AT + "43, pid=21", AT + "43, pid='21", AT + "43, pid=21, name=pyth", AT, "NVRM: Xid (PCI:0000:3d",
        AT + "43, pid=x, name=y, Ch 00000008", "NVRM: Xid (PCI:3d): 43, Ch 00000008",
    ])  # fmt: skip
    def test_a_line_that_was_cut_is_told_as_one_and_forgiven_nothing(self, text: str) -> None:
        assert not one(text).whole
        assert one(text).meaning.level == WARN

    @pytest.mark.parametrize("text", [
        "app: NVRM: Xid (PCI:0000:3d:00): 48, pid=1, name=x, quoted", "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).", "nvidia 0000:b1:00.0: enabling device (0000 -> 0002)",
        "nouveau 0000:08:00.0: a line", "note: a GPU has fallen off the bus", "NVRM: GPU Board Serial Number: 0000",
        "NVRM: A GPU crash dump has been created.", " NVRM: Xid (PCI:0000:3d:00): 48, indented",
        "nvidia-nvswitch1: SXid (PCI:0000:a7:00.0): 20034, Data {0x40510001, 0x10200030}", "",
    ])  # fmt: skip
    def test_what_only_looks_like_one_is_none(self, text: str) -> None:
        assert read(text) == []

    def test_domains_are_never_folded(self) -> None:
        buses = ["0000:01:00", "0008:01:00", "0009:01:00", "0018:01:00.0", "00000019:01:00.0"]
        assert len({address(bus) for bus in buses}) == len(buses)
        assert address("00000000:1A:00.0") == address("0000:1a:00")
        assert address("virtual:0") is None


class TestLostGpus:
    """A GPU that is gone although no number is printed, and its UUID out of the log."""

    THREE = ("NVRM: The NVIDIA GPU 0000:b1:00.0", "NVRM: (PCI ID: 10de:2bb5) installed in this system has",
             "NVRM: fallen off the bus and is not responding to commands.")  # fmt: skip

    @pytest.mark.parametrize("texts", [
        ("\n".join(THREE),), THREE, ("NVRM: GPU 0000:b1:00.0: GPU has fallen off the bus.",),
    ])  # fmt: skip
    def test_all_ways_to_say_it_are_an_xid_79(self, texts: tuple[str, ...]) -> None:
        (said,) = read(*texts)
        assert (said.number, said.bus, said.pid, said.whole) == (79, (0, 0xB1, 0, 0), None, True)
        assert said.meaning.level == FAIL

    def test_another_line_in_between_blames_nobody(self) -> None:
        assert read(self.THREE[0], "NVRM: x", "NVRM: y", self.THREE[2]) == []
        assert read(self.THREE[2]) == []

    def test_the_log_itself_says_which_uuid_it_had(self) -> None:
        lines = Lines()
        assert lines.take("NVRM: GPU at PCI:0000:1b:00: GPU-03030303-0000-4000-8000-000000000007") is None
        assert lines.uuids == {(0, 0x1B, 0, 0): "GPU-03030303-0000-4000-8000-000000000007"}

    def test_the_advice_to_reset_counts_without_a_number(self) -> None:
        said = one("NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:5d:00 (printing 1 of every 30).  "
                   "The GPU likely needs to be reset.")  # fmt: skip
        assert (said.kind, said.bus, said.meaning.level) == (ADVICE, (0, 0x5D, 0, 0), FAIL)


class TestSeverity:
    """How bad: by the number, by what the line itself says, by what it follows from."""

    @pytest.mark.parametrize(("level", "numbers"), [
        (FAIL, (46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 167, 168, 169,
                171, 172, 173, 175)),
        (WARN, (8, 11, 13, 31, 32, 39, 43, 45, 57, 63, 68, 69, 78, 92, 94, 121, 125, 126, 135, 142, 159, 165, 174,
                176)),
        (INFO, (37, 38, 44, 66, 67, 93, 106, 107, 108, 137, 141, 152, 153, 157, 160, 161, 162, 163, 164)),
    ])  # fmt: skip
    def test_each_number_has_its_level_a_meaning_and_something_to_do(
        self, level: str, numbers: tuple[int, ...]
    ) -> None:
        for number in numbers:
            known = meaning(number)
            assert (number, known.level) == (number, level)
            assert known.text
            assert known.advice.format(address="GPU-x")
            assert "unknown" not in known.text

    @pytest.mark.parametrize("number", [9, 14, 166, 170, 999])
    def test_a_number_that_nobody_explains_is_a_warning_and_called_unknown(self, number: int) -> None:
        assert (meaning(number).level, meaning(number).text) == (WARN, "unknown XID")

    @pytest.mark.parametrize(("text", "level", "words"), [
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 03 (0x02146dc6 0x00000000)", FAIL, ", fatal"),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x0405a0c2)", WARN, ", not fatal"),
        ("149, NETIR Fatal XC0 i0 Link -1 (0x000fe40a)", FAIL, ", fatal"),
        ("145, RLW_CTRL Fatal XC1 i1 Link 04 (0x00000004)", FAIL, "(injected by a test)"),
        ("144, something that says neither", WARN, "NVLink error"),
    ])  # fmt: skip
    def test_nvlink_is_a_fault_only_where_its_line_says_fatal(self, text: str, level: str, words: str) -> None:
        assert one(AT + text).meaning.level == level
        assert words in one(AT + text).what

    @pytest.mark.parametrize(("text", "action", "level"), [
        ("154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", 4, FAIL),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", 0, INFO),
        ("154, GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", 9, FAIL),
        ("154, pid=7, name=x, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", 1, FAIL),
        ("154, in words that nobody has seen", -1, FAIL),
    ])  # fmt: skip
    def test_a_recovery_action_is_what_the_line_ends_at(self, text: str, action: int, level: str) -> None:
        assert (one(AT + text).action, one(AT + text).meaning.level) == (action, level)

    @pytest.mark.parametrize(("cause", "level"), [(48, FAIL), (149, FAIL), (31, WARN), (137, INFO)])
    def test_one_that_follows_from_another_is_as_bad_as_that(self, cause: int, level: str) -> None:
        said = one(f"{AT}45, pid=7, name=python3, Ch 00000011 caused by previous Xid {cause}")
        assert (said.number, said.caused_by, said.weighs_as, said.meaning.level) == (45, cause, cause, level)
        assert f"caused by XID {cause}" in said.what

    def test_a_name_cannot_say_what_it_follows_from(self) -> None:
        said = one(AT + "45, pid=7, name=Xid 44, Ch 00000011")
        assert (said.weighs_as, said.caused_by) == (45, 0)

    @pytest.mark.parametrize(("tail", "fatal", "level"), [
        ("20034, Fatal, Link 28 LTSSM Fault Up", True, FAIL),
        ("12028, Non-fatal, Link 31 egress non-posted PRIV error (First)", False, WARN),
        ("10001, in other words", None, WARN),
    ])  # fmt: skip
    def test_an_nvswitch_is_named_and_weighed_by_its_own_word(self, tail: str, fatal: bool | None, level: str) -> None:
        said = one("nvidia-nvswitch1: SXid (PCI:0000:a7:00.0): " + tail)
        assert (said.kind, said.device, said.fatal, said.meaning.level) == (SXID, "nvidia-nvswitch1", fatal, level)

    def test_what_a_kill_may_leave_is_nothing_that_fails_by_itself_but_the_switch_timeout(self) -> None:
        assert {meaning(number).level for number in catalogue.OWN_KILL} == {WARN}
        assert catalogue.SWITCH_TIMEOUT not in catalogue.OWN_KILL


class TestTheKernelLog:
    """Records as /dev/kmsg has them; a log that cannot be read is never taken for one that says nothing."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        return tmp_path / "kmsg"

    def test_only_what_the_kernel_wrote_of_its_gpus_is_told_once_and_in_order(self, log: Path) -> None:
        log.write_text(record(5, "Linux version 6.18") + record(6, AT + "45, x", at_s=901.5)
                       + record(7, AT + "48, forged", USER) + record(8, "usb: x")
                       + record(9, AT + "31, y"))  # fmt: skip
        kernel = KernelLog(str(log))
        assert [(one.seq, one.at_s, one.text) for one in kernel.read_all()] == [
            (6, 901.5, AT + "45, x"), (9, 1.0, AT + "31, y"),
        ]  # fmt: skip
        assert (kernel.problem, kernel.newest_seq, kernel.since_s, kernel.from_boot) == ("", 9, 1.0, False)
        assert kernel.read() == []
        with log.open("a") as file:
            file.write(record(10, AT + "79, z"))
        assert [one.seq for one in kernel.read()] == [10]
        kernel.close()

    def test_escaped_bytes_come_back(self, log: Path) -> None:
        log.write_text(record(0, r"NVRM: The NVIDIA GPU 0000:b1:00.0\x0aNVRM: fallen off the bus \x5cx \xc3\xa4"))
        kernel = KernelLog(str(log))
        (found,) = kernel.read_all()
        assert found.text == "NVRM: The NVIDIA GPU 0000:b1:00.0\nNVRM: fallen off the bus \\x ä"
        assert kernel.from_boot
        kernel.close()

    def test_a_flood_is_read_in_bounded_bites(self, log: Path) -> None:
        log.write_text("".join(record(seq, AT + "31, x") for seq in range(30_000)))
        kernel = KernelLog(str(log))
        first = kernel.read(100)
        assert 0 < len(first) < 2000
        assert kernel.behind
        assert len(first + kernel.read_all()) == 30_000
        assert not kernel.behind
        kernel.close()

    def test_one_that_outruns_its_reader_says_so(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernellog, "WHOLE_S", 0.0)
        log.write_text("".join(record(seq, AT + "31, x") for seq in range(30_000)))
        kernel = KernelLog(str(log))
        kernel.read_all()
        assert "only in part" in kernel.problem
        kernel.close()

    def test_one_that_is_empty_or_missing_is_unreadable(self, log: Path) -> None:
        missing = KernelLog(str(log))
        assert "unreadable, because there is no" in missing.problem
        log.touch()
        empty = KernelLog(str(log))
        assert empty.read_all() == []
        assert "unreadable, because" in empty.problem
        assert missing.read_all() == []

    def test_something_else_in_the_kernels_place_is_unreadable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernellog, "DEVICE", "/dev/null")
        assert "something else in its place" in KernelLog("/dev/null").problem

    def test_without_the_right_to_read_it_says_whose_it_is(self, log: Path) -> None:
        if os.geteuid():
            pytest.skip("needs root to become somebody else")
        log.write_text(record(1, "x"))
        log.chmod(0o600)
        os.seteuid(65534)
        try:
            kernel = KernelLog(str(log))
        finally:
            os.seteuid(0)
        assert "unreadable, because" in kernel.problem
        assert "CAP_SYSLOG" in kernel.problem
        assert kernel.read_all() == []

    def test_records_that_went_before_they_were_read_are_counted(
        self, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log.write_text(record(3, AT + "31, x"))
        kernel = KernelLog(str(log))
        answers = iter([BrokenPipeError(32, "Broken pipe"), record(9, AT + "45, y").encode(), BlockingIOError()])

        def said(fd: int, count: int) -> Any:
            answer = next(answers)
            if isinstance(answer, bytes):
                return answer
            raise answer

        monkeypatch.setattr(kernellog.os, "read", said)
        assert [one.seq for one in kernel.read_all()] == [9]
        assert (kernel.lost, kernel.problem) == (1, "")
        monkeypatch.undo()
        kernel.close()

    def test_the_log_of_this_host_is_read_or_says_why_not(self) -> None:
        kernel = KernelLog()
        kernel.read_all()
        assert kernel.newest_seq >= 0 or "unreadable, because" in kernel.problem
        kernel.close()
