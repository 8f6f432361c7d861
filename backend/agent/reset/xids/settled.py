"""What was settled before this check: by a recorded baseline, and by earlier resets' receipts, in this boot."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from backend.agent import procfs
from backend.agent.files import read_json
from backend.agent.kernelgpus import Address, address
from backend.agent.paths import state_dir
from backend.agent.reset.gpureset.faults import newest_records
from backend.agent.reset.xids.sighting import Sighting

RECEIPTS_MOST = 50
"""The newest receipts that are looked through for what earlier resets caused."""

Range = Tuple[str, int, Any, int, int]
"""A receipt's row: address, XID, pid, first and last record."""


class Settled(NamedTuple):
    """`baseline_seq` is the log's newest record when the baseline was recorded, -1 without one of this boot;
    `of_resets` what earlier resets caused; `mended` the newest record before a GPU's last successful GPU reset, by its
    address; `withheld` are GPUs that were not given to this container, and `ours` those
    that the baseline knows."""

    baseline_seq: int = -1
    of_resets: Tuple[Range, ...] = ()
    withheld: Tuple[Address, ...] = ()
    ours: Tuple[Address, ...] = ()
    mended: Tuple[Tuple[Address, int], ...] = ()

    def by_reset(self, one: Sighting, bus: str) -> bool:
        """Say whether an earlier reset caused it."""
        who = (bus, one.said.number, one.said.pid)
        return any((at, number, pid) == who and low <= one.seq <= high for at, number, pid, low, high in self.of_resets)

    def by_gpu_reset(self, one: Sighting) -> bool:
        """Say whether its GPU was reset by the driver since."""
        return any(bus == one.said.bus and 0 <= one.seq <= newest for bus, newest in self.mended)


def settled(stored: Dict[str, Any], withheld: List[str]) -> Settled:
    """Read what is settled. `stored` is the baseline, `withheld` what the device table does not give."""
    same_boot = bool(stored.get("boot_id")) and stored["boot_id"] == procfs.boot_id()
    known = (address(entry.get("bus_id") or "") for entry in stored["gpus"].values())
    kept = (address(bus) for bus in withheld)
    return Settled(
        int(stored.get("kernel_log_seq", -1)) if same_boot else -1, tuple(_of_resets()),
        tuple(bus for bus in kept if bus), tuple(bus for bus in known if bus), tuple(_mended()),
    )  # fmt: skip


def _of_resets() -> List[Range]:
    folder, boot, found = state_dir("receipts"), procfs.boot_id(), []
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".json")]
    for path in sorted(paths, key=_changed_at)[-RECEIPTS_MOST:]:
        try:
            data = read_json(path)
        except (OSError, ValueError):
            continue  # `receipts list` says that it is unreadable
        if isinstance(data, dict) and boot and data.get("boot_id") == boot:
            rows = [row for row in data.get("xids") or [] if isinstance(row, dict) and row.get("ours")]
            found += [(row["bus"], row["xid"], row["pid"], *row["seq"]) for row in rows if row["seq"][0] >= 0]
    return found


def _mended() -> Iterator[Tuple[Address, int]]:
    for bus, newest in newest_records().items():
        where = address(bus)
        if where is not None:
            yield where, newest


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
