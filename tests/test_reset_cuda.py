"""The CUDA test of a reset, on a library with faults: what it finds, what it costs, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ours, procfs
from backend.agent.reset import clearance, cudatest, cycle, exercise, receipt
from backend.agent.reset.cudachild import STEPS
from backend.agent.reset.cudatest import Outcome, Subject, run
from backend.agent.reset.cycle import Cycle, verify
from backend.wire import CLEAN, MIB, NOT_CLEAN, UNHEALTHY, GpuFacts, Receipt
from tests.cuda.double import CudaDouble
from tests.pythons import python38
from tests.resetting import Bench, machine
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(clearance, "STABLE_S", 0.2)
    monkeypatch.setattr(clearance, "SETTLED_S", 0.4)
    monkeypatch.setattr(cycle, "VERIFY_S", 0.4)
    folder = tmp_path / "host"
    folder.mkdir()
    host = Bench(folder)
    yield host
    host.close()


@pytest.fixture
def cuda(bench: Bench) -> CudaDouble:
    double = CudaDouble(bench.root)
    bench.machine = machine(bench.root)
    return double


def both(bench: Bench, limit_s: float = 20.0) -> list[Outcome]:
    """Test both GPUs of a bench."""
    return run(
        bench.machine, [Subject(GpuFacts(i, f"GPU-{i:04d}", "Test GPU", minor=900 + i)) for i in (0, 1)], limit_s
    )


def reset(bench: Bench, **options: Any) -> Receipt:
    """Run one cycle and return its receipt."""
    options = {"id": "r1", "grace_s": 5.0, "deadline_s": 6.0, **options}
    Cycle(bench.machine, os.path.join(bench.root, "run"), options).run()
    return receipt.load("r1")


def test_a_healthy_gpu_passes_every_step(bench: Bench, cuda: CudaDouble) -> None:
    for outcome in both(bench):
        assert (outcome.outcome, outcome.reason) == (cudatest.PASSED, "")
        assert set(outcome.steps) == set(STEPS)
        assert outcome.total_s >= sum(outcome.steps.values()) > 0


@pytest.mark.parametrize(("code", "name"), [
    (2, "CUDA_ERROR_OUT_OF_MEMORY"), (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"), (100, "CUDA_ERROR_NO_DEVICE"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"), (999, "CUDA_ERROR_UNKNOWN"), (4242, ""),
])  # fmt: skip
def test_an_error_is_named_with_its_step_and_what_to_do(
    bench: Bench, cuda: CudaDouble, code: int, name: str
) -> None:  # fmt: skip
    function, step = {2: ("cuMemAlloc_v2", "allocate"), 46: ("cuCtxCreate_v2", "context"), 100: ("cuInit", "init"),
                      719: ("cuCtxSynchronize", "set")}.get(code, ("cuLaunchKernel", "kernel"))  # fmt: skip
    cuda.fault(function, code, "GPU-0001")
    good, bad = both(bench)
    assert good.outcome == cudatest.PASSED
    assert (bad.outcome, bad.step, bad.code, bad.name) == (cudatest.FAILED, step, code, name)
    (found,) = bad.findings()
    assert str(code) in found.reason
    assert name in found.reason
    assert step in found.reason
    assert found.action
    assert "GPU-0001" in found.command


@pytest.mark.parametrize(("function", "step"), [("cuMemcpyDtoH_v2", "read back"), ("cuLaunchKernel", "kernel")])
def test_a_wrong_word_is_found_and_shown(bench: Bench, cuda: CudaDouble, function: str, step: str) -> None:
    cuda.fault(function, "wrong", "GPU-0000")
    bad, good = both(bench)
    assert (bad.outcome, bad.step, bad.code) == (cudatest.FAILED, step, 0)
    assert "1 of 16384 words read back are wrong: at byte" in bad.reason
    assert good.outcome == cudatest.PASSED


def test_a_crash_is_put_down_to_its_step(bench: Bench, cuda: CudaDouble) -> None:
    cuda.fault("cuModuleLoadData", "crash", "GPU-0000")
    bad, good = both(bench)
    assert (bad.outcome, bad.reason) == (cudatest.FAILED, "its process ended in step `compile`: SIGSEGV")
    assert good.outcome == cudatest.PASSED


def test_gpus_that_hang_for_good_cost_one_limit_together_and_no_child_stays(bench: Bench, cuda: CudaDouble) -> None:
    cuda.fault("cuCtxSynchronize", "hang")
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.extend(both(bench, limit_s=1.5)))
    thread.start()
    started = until(lambda: len(living := children()) == 2 and living)
    until(lambda: {child for child, _ in ours.ours()} >= started)
    thread.join()
    for outcome in found:
        assert (outcome.outcome, outcome.step, outcome.stuck) == (cudatest.TIMED_OUT, "set", "")
        assert outcome.total_s < 1.5 + cudatest.DEATH_S
        assert "did not end within" in outcome.findings()[0].reason
    assert not children()


def children() -> set[int]:
    """Return the processes of this test's CUDA tests."""
    return {
        pid for pid in procfs.pids()
        if (stat := procfs.stat(pid)) and stat.ppid == os.getpid() and "cudatest" in procfs.command(pid, 4000)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "function"),
    [(34, "cuInit"), (209, "cuModuleLoadData"), (218, "cuModuleLoadData"), (221, "cuModuleLoadData"), (800, "cuInit")],
)
def test_what_says_nothing_of_its_health_is_no_failure(
    bench: Bench, cuda: CudaDouble, code: int, function: str
) -> None:  # fmt: skip
    cuda.fault(function, code)
    for outcome in both(bench):
        assert outcome.outcome == cudatest.NOT_RUN
        assert str(code) in outcome.reason
        assert not outcome.findings()


def test_a_host_without_the_library_says_so_and_keeps_its_verdict(bench: Bench, cuda: CudaDouble) -> None:
    with open(cuda.path, "wb"):
        pass  # found, and no library
    said = reset(bench)
    assert said.verdict == CLEAN
    assert [one["outcome"] for one in said.cuda_tests] == [cudatest.NOT_RUN] * 2
    assert any("GPU 0, 1: no kernel was run" in note for note in said.notes)


def test_a_machine_without_cuda_says_so(bench: Bench) -> None:
    said = reset(bench)
    assert (said.verdict, said.cuda_tests) == (CLEAN, [])
    assert any("no kernel was run on the GPUs: this machine has no CUDA library" in note for note in said.notes)


def test_a_reset_ends_with_the_test_of_every_gpu(bench: Bench, cuda: CudaDouble) -> None:
    holder, began = bench.start(), time.monotonic()
    said = reset(bench)
    assert (said.verdict, [one.pid for one in said.killed]) == (CLEAN, [holder.pid])
    assert [one["outcome"] for one in said.cuda_tests] == [cudatest.PASSED] * 2
    assert any("GPU 0, 1: the CUDA test passed" in note for note in said.notes)
    assert said.durations["cuda_test"] > 0
    with open(os.path.join(bench.root, "run", receipt.JOURNAL), encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    assert any("the CUDA test passed" in event["text"] for event in events)
    assert began <= events[0]["data"]["monotonic_s"] <= time.monotonic()
    assert abs(events[0]["data"]["wall_s"] - said.started_at) < 60


def test_a_gpu_that_fails_the_test_is_unhealthy_and_says_why(bench: Bench, cuda: CudaDouble) -> None:
    cuda.fault("cuLaunchKernel", 719, "GPU-0001")
    said = reset(bench)
    assert [one.verdict for one in said.after] == [CLEAN, UNHEALTHY]
    assert "cuLaunchKernel (CUDA_ERROR_LAUNCH_FAILED, error 719)" in said.after[1].reason
    assert "--gpu-reset --gpu GPU-0001" in said.after[1].action
    assert said.verdict == UNHEALTHY


def test_41_what_the_test_leaves_behind_is_not_clean(
    bench: Bench, cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(exercise, "AGAIN_S", 0.5)
    bystander = bench.start("bystander")
    cuda.fault("cuCtxDestroy_v2", "residue", "GPU-0001")
    said = reset(bench)
    assert [one.verdict for one in said.after] == [CLEAN, NOT_CLEAN]
    assert said.after[1].reason.startswith("left by the CUDA test: 22 MiB in use")
    assert said.after[1].used_bytes.number() == 22 * MIB
    assert bystander.alive()
    assert not said.signals


def test_no_test_runs_while_a_gpu_is_held(bench: Bench, cuda: CudaDouble) -> None:
    bench.start("doubtful")
    said = reset(bench, deadline_s=0.5)
    assert (said.verdict, said.cuda_tests) == (NOT_CLEAN, [])
    assert any("no kernel was run on the GPUs: not every GPU is free" in note for note in said.notes)


def test_a_gpu_that_is_split_is_not_tested_as_a_whole(bench: Bench, cuda: CudaDouble) -> None:
    bench.set(readings={"0": {"mig": 1}})
    said = reset(bench)
    assert [one["outcome"] for one in said.cuda_tests] == [cudatest.NOT_RUN, cudatest.PASSED]
    assert "MIG" in said.cuda_tests[0]["reason"]


def test_a_verification_tests_only_when_asked_to(bench: Bench, cuda: CudaDouble) -> None:
    cuda.fault("cuInit", 999, "GPU-0000")
    without = verify(bench.machine, accept_limited=False, keep=False)
    assert (without.verdict, without.cuda_tests) == (CLEAN, [])
    asked = verify(bench.machine, accept_limited=False, keep=False, cuda_test=True)
    assert asked.verdict == UNHEALTHY
    assert "CUDA_ERROR_UNKNOWN" in asked.after[0].reason


def test_a_host_may_be_left_untested(bench: Bench, cuda: CudaDouble) -> None:
    said = reset(bench, cuda_test=False)
    assert (said.verdict, said.cuda_tests) == (CLEAN, [])
    assert any("cuda_test is off" in note for note in said.notes)


def test_the_child_runs_on_python_3_8(bench: Bench, cuda: CudaDouble) -> None:
    bench.machine.relaunch[0] = python38()
    assert [one.outcome for one in both(bench)] == [cudatest.PASSED] * 2


def test_a_child_dies_with_the_reset_that_started_it(bench: Bench, cuda: CudaDouble) -> None:
    cuda.fault("cuInit", "hang")
    starter = os.fork()
    if starter == 0:
        try:
            both(bench, limit_s=60.0)
        finally:
            os._exit(0)
    found = until(lambda: {pid for pid, _ in ours.ours() if _parent(pid) == starter})
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    until(lambda: not any(_runs(pid) for pid in found))


def _parent(pid: int) -> int:
    stat = procfs.stat(pid)
    return stat.ppid if stat else 0


def _runs(pid: int) -> bool:
    stat = procfs.stat(pid)
    return stat is not None and not stat.dead
