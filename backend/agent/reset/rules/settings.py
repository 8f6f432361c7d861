"""Settings that a job may have left behind, and the GPU's own store of them."""

from __future__ import annotations

from typing import Iterator

from backend.agent.reset.finding import WARN, Finding
from backend.agent.reset.rules.case import Case

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
PROHIBITED = 2


def persistence(case: Case) -> Iterator[Finding]:
    """Persistence mode that the reset changed, or that is off without being known as off."""
    now, was = case.value("persistence"), case.before.get("persistence")
    changed = was is not None and was.number() is not None and now is not None and was.number() != now
    shown = case.query("persistence_mode")
    if changed:
        text = "its persistence mode was turned %s during the reset" % ("on" if now else "off")
        yield Finding(text, "see whether nvidia-persistenced runs: systemctl status nvidia-persistenced", shown, WARN)
    elif now == 0 and case.recorded("persistence") != 0:
        text = "persistence mode is off: each first use initialises the GPU, and its counters begin anew"
        yield Finding(text, "sudo systemctl start nvidia-persistenced", shown, WARN)


def modes(case: Case) -> Iterator[Finding]:
    """ECC, MIG and compute mode: another than before, or about to change."""
    for name, said, column in (("ecc_mode", "ECC", "ecc.mode"), ("mig", "MIG", "mig.mode")):
        now, pending = case.value(name), case.value("mig_pending" if name == "mig" else "ecc_mode_pending")
        was = case.was(name)
        shown = case.query("%s.current,%s.pending" % (column, column))
        if now is not None and was is not None and now != was:
            text = "%s is %s and was %s" % (said, "on" if now else "off", "on" if was else "off")
            yield Finding(text, "set it back, or record the baseline again", shown, WARN)
        if now is not None and pending is not None and now != pending:
            text = "%s is %s and will be %s after a GPU reset" % (
                said,
                "on" if now else "off",
                "on" if pending else "off",
            )
            yield Finding(text, case.reset, shown, WARN)
    mode, was = case.value("compute_mode"), case.was("compute_mode")
    back = "sudo nvidia-smi -c 0 -i %s" % case.address
    if mode == PROHIBITED:
        yield Finding("its compute mode lets nobody use it", back, case.query("compute_mode"))
    elif mode and mode != was:
        text = "its compute mode is %s, left by somebody" % COMPUTE_MODES.get(int(mode), "%d" % mode)
        yield Finding(text, back, case.query("compute_mode"), WARN)


def inforom(case: Case) -> Iterator[Finding]:
    """The GPU's store of its own configuration and error records."""
    if case.value("inforom_valid") == 0:
        yield Finding("its infoROM is corrupted", "have the GPU serviced", "nvidia-smi -q -i %s" % case.address)
