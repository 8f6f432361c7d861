"""How a GPU is connected: PCIe, NVLink, and the fabric of NVSwitches."""

from __future__ import annotations

from typing import Iterator

from backend.agent.reset.finding import FAIL, WARN, Finding
from backend.agent.reset.rules.case import Case

REPLAYS_WARN = 1.0
REPLAYS_FAIL, REPLAYS_FAIL_GEN5 = 2 * 0.96, 2 * 1.92
"""Replays a minute and lane: twice what DCGM allows at Gen 4 and Gen 5. Slower links are held to Gen 4's."""

SHORTEST_S = 60.0
"""A rate a minute is of a minute at least: two replays in a reset of five seconds are no rate."""

CRC_FAIL_PER_S = 100.0
FABRIC_COMPLETED, FABRIC_UNHEALTHY, FABRIC_LIMITED = 3, 2, 3
RESEAT = "stop its jobs, reboot the host; if it stays so, have the slot, riser and GPU looked at"


def pcie_width(case: Case) -> Iterator[Finding]:
    """Lanes, against the baseline and what the GPU could have."""
    now, most, was = case.value("pcie_width"), case.value("pcie_width_max"), case.was("pcie_width")
    shown = case.query("pcie.link.width.current,pcie.link.width.max")
    if now is None:
        return
    if was is not None and now < was:
        yield Finding("its PCIe link has %d lanes and had %d" % (now, was), RESEAT, shown)
    elif most is not None and now < most:
        text = "its PCIe link has %d lanes of %d" % (now, most)
        text += ", as at the baseline" if case.recorded("pcie_width") == now else ""
        yield Finding(text, "look at the slot and riser", shown, WARN)


def pcie_replays(case: Case) -> Iterator[Finding]:
    """Packets that had to be sent again."""
    grown = case.grown("pcie_replays")
    if grown is None:
        return
    lanes, fast = case.value("pcie_width") or 16, (case.value("pcie_gen_max") or 0) >= 5
    rate = grown.by / (max(SHORTEST_S, grown.over_s) / 60.0) / lanes
    text = "%d PCIe replays %s, %.1f a minute and lane" % (grown.by, grown.said, rate)
    shown = "nvidia-smi -q -i %s | grep -i replay" % case.address
    if rate > (REPLAYS_FAIL_GEN5 if fast else REPLAYS_FAIL):
        yield Finding(text, RESEAT, shown)
    elif rate > REPLAYS_WARN:
        yield Finding(text, "watch whether there are more", shown, WARN)


def nvlinks(case: Case) -> Iterator[Finding]:
    """Links that are down which were up, and errors on them."""
    now, was = case.value("nvlink_active"), case.was("nvlink_active")
    if now is not None and was is not None:
        lost = int(was) & ~int(now)
        down = [str(link) for link in range(lost.bit_length()) if lost >> link & 1]
        if down:
            text = "NVLink %s is down and was up" % ", ".join(down)
            yield Finding(text, "reset all GPUs that are linked, or reboot the host",
                          "nvidia-smi nvlink --status -i %s" % case.address)  # fmt: skip
    shown = "nvidia-smi nvlink -e -i %s" % case.address
    crc = case.grown("nvlink_crc_flit_errors", "nvlink_crc_data_errors")
    if crc:
        rate = crc.by / max(1.0, crc.over_s)
        level = FAIL if rate >= CRC_FAIL_PER_S else WARN
        text = "%d NVLink CRC errors %s" % (crc.by, crc.said)
        yield Finding(text, "watch whether there are more" if level == WARN else RESEAT, shown, level)
    for name, what in (("nvlink_replays", "replays"), ("nvlink_recoveries", "recoveries")):
        grown = case.grown(name)
        if grown:
            text = "%d NVLink %s %s" % (grown.by, what, grown.said)
            yield Finding(text, "reset all GPUs that are linked" if grown.during else "watch whether there are more",
                          shown, FAIL if grown.during else WARN)  # fmt: skip


def fabric(case: Case) -> Iterator[Finding]:
    """Whether the fabric manager has brought the GPU into its fabric."""
    state, status, health = (case.value("fabric_" + name) for name in ("state", "status", "health"))
    shown = "nvidia-smi -q -i %s | grep -A 12 Fabric" % case.address
    manager = "sudo systemctl restart nvidia-fabricmanager, while nobody uses the GPUs"
    if state is not None and state != FABRIC_COMPLETED:
        said = {1: "was not started", 2: "is not finished"}.get(int(state), "is in state %d" % state)
        yield Finding("its registration with the NVLink fabric %s" % said, manager, shown)
    elif status:
        yield Finding("its registration with the NVLink fabric failed (NVML %d)" % status, manager, shown)
    elif health == FABRIC_UNHEALTHY:
        yield Finding("the NVLink fabric calls it unhealthy", manager, shown)
    elif health == FABRIC_LIMITED:
        yield Finding("the NVLink fabric gives it limited capacity", "see the fabric manager's log", shown, WARN)
