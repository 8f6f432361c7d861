"""Random trees of processes: every holder ends, and nobody who is spared gets a signal.

Each tree comes from its seed, which stands in the name of the batch that fails. EIGHTZEROS_TREES sets how many are
grown (50; a thousand for a release), several on one host for each reset.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from backend.wire import CLEAN
from tests.modes import NOBODY, Ward, reset, ward

if TYPE_CHECKING:
    from pathlib import Path

    from tests.holding import Holder

pytestmark = pytest.mark.slow
TREES = int(os.environ.get("EIGHTZEROS_TREES", "50"))
AT_ONCE = 10
HOLDERS = ("plain", "mapped", "heir", "orphan", "with-child", "ignore-term", "swallow-term", "stopped", "subreaped",
           "unreaped", "zombie-leader", "fork-at-term")  # fmt: skip
NAMES = ("", "sglang::scheduler_TP0", "x", "VLLM::EngineCor", "bash", "nvidia-smi")
APART = ("subreaped", "unreaped")
"""The modes whose second process is a parent that holds nothing: a witness."""


def grow(host: Ward, seed: int) -> Holder:
    """Start one tree's holder, and perhaps a bystander of it."""
    luck = random.Random(seed)
    mode, name = luck.choice(HOLDERS), luck.choice(NAMES)
    options = {"gpus": luck.choice(("0", "1", "0,1")), "comm": name, "title": name, "used_mib": luck.randint(30, 9000)}
    if luck.random() < 0.3:
        kind = luck.choice(("bystander", "monitor"))
        uid = luck.choice((0, NOBODY)) if kind == "bystander" and os.geteuid() == 0 else 0
        host.watch(host.start(kind, uid=uid, comm=luck.choice(NAMES)))
    holder = host.start(mode, **options)
    if mode in APART:
        host.watch(holder, 1)
    return holder


@pytest.mark.parametrize("first", range(1, TREES + 1, AT_ONCE))
def test_every_holder_of_a_random_tree_ends_and_no_bystander_is_touched(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(first, min(first + AT_ONCE, TREES + 1))
    print("seeds", *seeds)
    with ward(tmp_path / "host", monkeypatch) as host:
        trees = {seed: grow(host, seed) for seed in seeds}
        status, said = reset(host, grace_s=0.4)
        assert (status, said.verdict) == (0, CLEAN), ([one.reason for one in said.after], said.notes)
        assert [seed for seed, holder in trees.items() if holder.alive()] == []
        witnesses = {(one, number) for one, number in host.witnesses}
        assert [pid for holder in trees.values() for number, pid in enumerate(holder.pids)
                if holder.alive(number) and (holder, number) not in witnesses] == []  # fmt: skip
