"""Programs that a reset spares: what keeps the host alive is named, and left to whoever runs it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from backend.agent.reset.ops import op_plan
from backend.wire import CLEAN, NOT_CLEAN
from tests.resetting import Bench, quick_bench
from tests.test_reset_cycle import reset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests import holding


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with quick_bench(tmp_path / "host", monkeypatch) as host:
        yield host


def _protected(bench: Bench, name: str) -> holding.Holder:
    program = os.path.join(bench.root, "run", name)
    shutil.copy("/bin/bash", program)
    script = 'for i in 1 2 3 4 5 6 7 8 9; do exec {fd}<>"$0"; done; echo "{\\"pid\\": $$, \\"pids\\": [$$]}"; read -r'
    return bench.spawn([program, "-c", script, os.path.join(bench.root, "nvidia0")])


def test_spares_a_protected_program_and_names_it(bench: Bench) -> None:
    process = _protected(bench, "nvidia-persistenced")
    assert (
        "nvidia-persistenced is a GPU service"
        in {one.pid: one.reason for one in op_plan(bench.machine, {}).spared}[process.pid]
    )
    status, said = reset(bench)
    assert (status, said.verdict) == (0, CLEAN)
    assert process.alive()


@pytest.mark.parametrize(
    ("name", "means"),
    [("nvidia-cuda-mps-server", "echo quit | nvidia-cuda-mps-control"), ("nv-hostengine", "systemctl status")],
)
def test_a_protected_program_with_a_context_is_left_to_the_operator(bench: Bench, name: str, means: str) -> None:
    """As an MPS server on an H200, which keeps 74 MiB after its last client: another reset would spare it again."""
    process = _protected(bench, name)
    with open(os.path.join(bench.root, "claims", f"0.{process.pid}"), "w", encoding="ascii") as claim:
        json.dump({"pid": process.pid, "used_bytes": 74 << 20, "release_s": 0, "blocks": False}, claim)
        claim.flush()
        fcntl.flock(claim, fcntl.LOCK_EX)
        status, said = reset(bench)
    assert (status, said.verdict) == (1, NOT_CLEAN)
    assert "has a compute context" in said.after[0].reason
    assert said.after[0].action.startswith("decide, and stop it by its own means") and means in said.after[0].action
    assert process.alive() and not said.killed
