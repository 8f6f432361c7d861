"""One reset among witnesses, for the tests of the failure modes: whoever is spared proves that no signal reached it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from backend.agent.reset import clearance, cycle, receipt
from backend.agent.reset.cycle import Cycle
from tests.resetting import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from backend.wire import Receipt
    from tests.holding import Holder

NOBODY = 65534


class Ward(Bench):
    """A host of two GPUs with a bystander that looks like a server, and a monitor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.witnesses = [(self.start("bystander", title="python3 sglang.launch_server"), 0),
                          (self.start("monitor", gpus="0,1"), 0)]  # fmt: skip

    def watch(self, holder: Holder, number: int = 0) -> Holder:
        """Count one of a holder's processes, which blocks its signals, among the witnesses."""
        self.witnesses.append((holder, number))
        return holder

    def check(self, said: Receipt | None = None) -> None:
        """Fail where a witness was touched, or a receipt names one as signalled."""
        for holder, number in self.witnesses:
            assert holder.untouched(number), f"process {holder.pids[number]} was touched"
            if said is not None:
                assert holder.pids[number] not in {one["pid"] for one in said.signals}


@contextmanager
def ward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    """Give a host on which a GPU counts as free after a third of a second."""
    monkeypatch.setattr(clearance, "STABLE_S", 0.3)
    monkeypatch.setattr(clearance, "SETTLED_S", 0.4)
    monkeypatch.setattr(cycle, "VERIFY_S", 0.4)
    folder.mkdir()
    host = Ward(folder)
    try:
        yield host
        host.check()
    finally:
        host.close()


def reset(host: Ward, **options: Any) -> tuple[int, Receipt]:
    """Run one cycle, check the witnesses, and return its exit status and receipt."""
    options = {"id": "r1", "grace_s": 2.0, "deadline_s": 4.0, **options}
    status = Cycle(host.machine, os.path.join(host.root, "run"), options).run()
    said = receipt.load(options["id"])
    host.check(said)
    return status, said
