"""What a GPU's memory remembers: errors, remapped rows, retired pages, and what the driver asks for."""

from __future__ import annotations

from typing import Iterator

from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.rules.case import Case

ACTIONS = {
    1: ("a GPU reset", "eightzeros reset --gpu-reset --gpu {address}", FAIL),
    2: ("a reboot of the host", "reboot the host", FAIL),
    3: ("draining its peer-to-peer traffic", "stop every job that uses its peers, then verify again", WARN),
    4: ("a drain, then a GPU reset", "stop every job on it, then eightzeros reset --gpu-reset --gpu {address}", FAIL),
    5: ("recovery of IMEX", "restart the nvidia-imex service", WARN),
    6: ("a bus reset", "reboot the host", FAIL),
    7: ("a system reboot", "reboot the host", FAIL),
}
"""nvmlDeviceGpuRecoveryAction; a number that is not known here is never taken for healthy."""

CORRECTED_MOST = 1000
SRAM_CORRECTED_MOST, DRAM_CORRECTED_MOST = 10_000, 20_000_000
"""Over the GPU's life, as AzNHC has them."""

REMAPPED_MOST = 512
RETIRED_MOST, RETIRED_DOUBLE_MOST = 63, 15
"""DCGM's limits."""

REPLACE = "have the GPU replaced"


def recovery(case: Case) -> Iterator[Finding]:
    """What the driver itself asks for."""
    number = case.value("recovery_action")
    if number:
        unknown = ("action %d, which this version does not know" % number, "reboot the host", FAIL)
        what, how, level = ACTIONS.get(int(number), unknown)
        command = "nvidia-smi -q -i %s" % case.address
        yield Finding("the driver asks for %s" % what, how.format(address=case.address), command, level)


def memory_errors(case: Case) -> Iterator[Finding]:
    """Errors that ECC could not mend, and those that it did."""
    shown = case.smi("ECC")
    grown, total = case.grown("ecc_uncorrected"), case.value("ecc_uncorrected")
    if grown and grown.during:
        yield Finding("%d uncorrectable memory errors during the reset" % grown.by, case.reset, shown)
    elif total:
        since = "%d of them since the baseline" % grown.by if grown else "none during the reset"
        text = "%d uncorrectable memory errors since the driver was loaded" % total
        text += ", %s" % since if grown or case.before else ""
        yield Finding(text, "see which Xid came with them: dmesg | grep Xid", shown, WARN)
    corrected = case.grown("ecc_corrected")
    if corrected and corrected.during and corrected.by > CORRECTED_MOST:
        text = "%d memory errors were corrected during the reset" % corrected.by
        yield Finding(text, "watch whether they go on", shown, WARN)
    for name, what, most in (("sram", "cache", SRAM_CORRECTED_MOST), ("dram", "memory", DRAM_CORRECTED_MOST)):
        count = case.value("ecc_corrected_%s_lifetime" % name)
        if count is not None and count > most:
            text = "%d %s errors were corrected over its life, more than %d" % (count, what, most)
            yield Finding(text, "plan its replacement", shown, WARN)
    if case.value("sram_threshold_exceeded"):
        yield Finding("its cache has had more uncorrectable errors than it may", REPLACE, shown)
    if case.value("memory_unrepairable"):
        yield Finding("its memory has an error that cannot be repaired", REPLACE, shown)


def remapped_rows(case: Case) -> Iterator[Finding]:
    """Rows that spare ones replace (Ampere and later)."""
    shown = case.smi("ROW_REMAPPER")
    if case.value("remapped_failed"):
        yield Finding("a row of its memory could not be remapped", REPLACE, shown)
    if case.value("remapped_pending"):
        yield Finding("a row of its memory waits to be remapped", case.reset, shown)
    rows, grown = case.value("remapped_uncorrected"), case.grown("remapped_uncorrected")
    if rows is not None and rows >= REMAPPED_MOST:
        text = "%d rows of its memory were remapped for uncorrectable errors, of %d at most" % (rows, REMAPPED_MOST)
        yield Finding(text, REPLACE, shown)
    elif grown:
        text = "%d more rows of its memory were remapped %s, %d in all" % (grown.by, grown.said, rows or 0)
        yield Finding(text, "watch whether there are more", shown, WARN)


def retired_pages(case: Case) -> Iterator[Finding]:
    """Pages that are not used any more (before Ampere)."""
    shown = case.smi("PAGE_RETIREMENT")
    double, single = case.value("retired_double_bit"), case.value("retired_single_bit")
    if case.value("retired_pending"):
        yield Finding("a page of its memory waits to be retired", "reboot the host, or %s" % case.reset, shown)
    total = (double or 0) + (single or 0)
    if total >= RETIRED_MOST:
        yield Finding("%d pages of its memory are retired, of %d at most" % (total, RETIRED_MOST), REPLACE, shown)
    elif double is not None and double > RETIRED_DOUBLE_MOST:
        text = "%d pages of its memory were retired for double-bit errors" % double
        yield Finding(text, "plan its replacement", shown, WARN)
