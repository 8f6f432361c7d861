"""Reading what the GPU driver writes to the kernel log: XIDs, lost GPUs, NVSwitch errors, and whom they name.

A line counts only where the driver's own words begin it: a program's name inside may be any text, even that of
another XID. The forms are those that the open kernel modules print (krcReportXid and its like).
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Tuple

from backend.agent.kernelgpus import Address, address
from backend.agent.xid import catalogue
from backend.agent.xid.catalogue import FAIL, INFO, WARN, Meaning
from backend.wire import printable

XID, SXID, ADVICE = "XID", "SXid", "advice"

NAME_BYTES = 15
"""The longest name that the kernel keeps of a process."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)((?: GPU-C?I:\d+)*)\): (\d+), (.*)\Z", re.S)
_PID = re.compile(r"pid=(?:'(\d+|<unknown>)'|(\d+|<unknown>)), (.*)\Z", re.S)
_CHANNEL = re.compile(r"Ch [0-9a-fA-F]{8}\b")
_CAUSE = re.compile(r" caused by previous Xid (\d+)\Z")
_NVLINK = re.compile(r"(\w+)\s+(Fatal|Non-?fatal)\s+.*?\bi(\d)\b", re.I)
_ACTION = re.compile(r"recovery action changed from .*? to 0x([0-9a-fA-F]+) \(([^)]*)\)", re.I)
_UUID = re.compile(r"NVRM: GPU at PCI:([0-9a-fA-F:.]+): (GPU-[0-9a-fA-F-]+)\s*\Z")
_OFF = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus")
_OFF_BEGUN = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)(?:\s|\Z)")
_OFF_SAID = re.compile(r"fallen off the bus", re.I)
_NEEDS_RESET = re.compile(r"NVRM: .*?\bGPU at PCI:([0-9a-fA-F:.]+).*\blikely needs to be reset", re.S)
_SWITCH = re.compile(r"(nvidia-nvswitch\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (.*)\Z", re.S)
_OFF_RECORDS = 2
"""How many records after its first may still belong to the three lines that tell of a GPU which is lost."""


class Said(NamedTuple):
    """One thing that the driver said of one device.

    `kind` is XID (a GPU that is lost without a number is a 79), SXID (an NVSwitch's, named by `device`) or ADVICE.
    `pid` is of the initial pid namespace; None where the line names nobody. `whole` is False where a part could not be
    read: then nothing about it may be taken lightly. `caused_by` is the XID that this one only follows. `fatal` is
    what its own line says, None where it says neither. `action` is what an XID 154 ends at, -1 where
    unreadable, and `asked` that in the driver's words.
    """

    kind: str
    number: int
    bus: Optional[Address]
    text: str
    pid: Optional[int] = None
    name: str = ""
    whole: bool = True
    caused_by: int = 0
    fatal: Optional[bool] = None
    injected: bool = False
    action: Optional[int] = None
    asked: str = ""
    device: str = ""

    @property
    def weighs_as(self) -> int:
        """Return the XID whose severity this one has."""
        return self.caused_by or self.number

    @property
    def meaning(self) -> Meaning:
        """Say what it means, and how bad its own line makes it."""
        if self.kind == SXID:
            return catalogue.NVSWITCH_FATAL if self.fatal else catalogue.NVSWITCH_OTHER
        if self.kind == ADVICE:
            return catalogue.NEEDS_RESET
        if not self.number:
            return catalogue.UNREADABLE
        known = catalogue.meaning(self.number)
        level = catalogue.meaning(self.weighs_as).level
        if self.weighs_as in catalogue.NVLINK5 and not self.caused_by:
            level = FAIL if self.fatal else WARN
        if self.number == catalogue.RECOVERY_ACTION:
            level = INFO if self.action == 0 else FAIL
        return known._replace(level=level)

    @property
    def what(self) -> str:
        """Name it and say what it means, in a line."""
        if self.kind == ADVICE:
            return self.meaning.text
        head = "%s %s" % (self.kind, self.number or "?")
        tail = ", caused by XID %d (%s)" % (self.caused_by, catalogue.meaning(self.caused_by).text)
        said = "%s: %s%s" % (head, self.meaning.text, tail if self.caused_by else "")
        if self.asked:
            said += ": %s" % printable(self.asked, 60)
        if self.kind == XID and self.fatal is not None:
            said += ", fatal" if self.fatal else ", not fatal"
        return said + (" (injected by a test)" if self.injected else "")


class Lines:
    """Reads records in order. `uuids` is what the log itself says of each GPU, for one that is lost since."""

    def __init__(self) -> None:
        self.uuids: Dict[Address, str] = {}
        self._off_bus: Optional[Address] = None
        self._off_left = 0

    def take(self, text: str) -> Optional[Said]:
        """Take one record of the kernel. Returns what it says of a device, None where that is nothing."""
        if text.startswith("NVRM: Xid "):
            return _xid(text)
        if text.startswith("nvidia-nvswitch"):
            return _sxid(text)
        if not text.startswith("NVRM: "):
            return None
        named = _UUID.match(text)
        bus = address(named.group(1)) if named else None
        if named and bus is not None:
            self.uuids[bus] = named.group(2)
            return None
        asked = _NEEDS_RESET.match(text)
        if asked:
            return Said(ADVICE, 0, address(asked.group(1)), text)
        return self._off(text)

    def _off(self, text: str) -> Optional[Said]:
        """Find a GPU that is lost though no number says so: in one line, or over three lines or records."""
        one, begun = _OFF.match(text), _OFF_BEGUN.match(text)
        if one:
            return Said(XID, catalogue.OFF_THE_BUS, address(one.group(1)), text)
        if begun:
            self._off_bus, self._off_left = address(begun.group(1)), _OFF_RECORDS + 1
        if self._off_bus is None:
            return None
        bus, self._off_left = self._off_bus, self._off_left - 1
        said = _OFF_SAID.search(text)
        if said or not self._off_left:
            self._off_bus = None
        return Said(XID, catalogue.OFF_THE_BUS, bus, text) if said else None


def _xid(text: str) -> Said:
    found = _XID.match(text)
    if not found:
        return Said(XID, 0, None, text, whole=False)
    bus, number, rest = address(found.group(1)), int(found.group(3)), found.group(4)
    pid, name, rest, whole = _who(rest)
    cause = _CAUSE.search(rest)
    said = Said(XID, number, bus, text, pid, name, whole and bus is not None, int(cause.group(1)) if cause else 0)
    if number in catalogue.NVLINK5:
        link = _NVLINK.match(rest)
        if link:
            said = said._replace(fatal=link.group(2).lower() == "fatal", injected=link.group(3) != "0")
    if number == catalogue.RECOVERY_ACTION:
        action = _ACTION.search(rest)
        said = (
            said._replace(action=int(action.group(1), 16), asked=action.group(2))
            if action
            else said._replace(action=-1)
        )
    return said


def _who(rest: str) -> Tuple[Optional[int], str, str, bool]:
    """Split off whom a line names: pid, name, what follows, and whether all of it could be read."""
    if not rest.startswith("pid="):
        return None, "", rest, True
    found = _PID.match(rest)
    if not found:
        return None, "", rest, False
    said = found.group(1) or found.group(2)
    pid, rest = (None if said == "<unknown>" else int(said)), found.group(3)
    if not rest.startswith("name="):
        return pid, "", rest, True
    cuts = _cuts(rest[len("name=") :])
    if not cuts:
        return pid, "", rest, False
    name, rest = next((cut for cut in cuts if _CHANNEL.match(cut[1])), cuts[-1])
    return pid, "" if name == "<unknown>" else name, rest, True


def _cuts(text: str) -> List[Tuple[str, str]]:
    """Return every way to end a process's name at a comma. The name may hold commas and spaces itself."""
    parts = text.split(", ")
    ways = ((", ".join(parts[:count]), ", ".join(parts[count:])) for count in range(1, len(parts)))
    return [(name, rest) for name, rest in ways if len(name.encode("utf-8", "replace")) <= NAME_BYTES]


def _sxid(text: str) -> Optional[Said]:
    found = _SWITCH.match(text)
    if not found or found.group(4).startswith("Data {"):
        return None  # the numbers that belong to the line before
    fatal = {"fatal": True, "non-fatal": False}.get(found.group(4).partition(",")[0].strip().lower())
    return Said(SXID, int(found.group(3)), address(found.group(2)), text, fatal=fatal, device=found.group(1))
