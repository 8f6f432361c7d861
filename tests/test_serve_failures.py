"""Why a server did not start: one sentence out of a log, and nothing out of a noisy healthy one."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.extraction.serving.failures import find_failure

LOGS = Path(__file__).with_name("cases") / "sglang_logs"
HEAD = "[2026-12-01 10:00:01 TP0] "
CRASH = HEAD + "Scheduler hit an exception: Traceback (most recent call last):"


def lines(name: str) -> list[str]:
    return (LOGS / name).read_text().split("\n")


def test_a_noisy_healthy_start_is_no_failure_at_any_moment() -> None:
    whole = lines("noisy_ready.log")
    for end in range(len(whole) + 1):
        assert find_failure(whole[:end]) is None, whole[end - 1]


def test_in_an_appended_log_the_last_start_counts() -> None:
    whole = lines("appended.log")
    last = find_failure(whole)
    assert last is not None and (last.kind, last.port) == ("port", 31000)
    assert "('127.0.0.1', 31000)" in last.line
    middle = find_failure(whole[:9])
    assert middle is not None and (middle.kind, middle.port) == ("port", 19222)
    assert find_failure(whole[:3]) is None


@pytest.mark.parametrize(
    ("kind", "words", "log"),
    [
        ("memory", "GPU 2 ran out of memory", [CRASH, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
         "1.00 GiB. GPU 2 has a total capacity of 139.81 GiB of which 0.50 GiB is free."]),
        ("memory", "no memory is left for the cache", [CRASH, "RuntimeError: Not enough memory. Please try to increase "
         "--mem-fraction-static."]),
        ("port", "port 30000 is taken", ["OSError: Port 30000 is already in use"]),
        ("port", "port 30000 is taken", [HEAD + "ERROR: [Errno 98] error while attempting to bind on address "
         "('0.0.0.0', 30000): address already in use"]),
        ("model", "folder is missing or not whole", ["OSError: /m does not appear to have a file named config.json."]),
        ("model", "--trust-remote-code", ["ValueError: The repository /m contains custom code which must be executed. "
         "Please pass the argument `trust_remote_code=True` to allow custom code to be run."]),
        ("model", "damaged", [CRASH, "safetensors_rust.SafetensorError: Error while deserializing header"]),
        ("model", "cannot be downloaded", ["OSError: We couldn't connect to 'https://huggingface.co'"]),
        ("flag", "does not know --forward-hookz", ["usage: launch_server.py [-h]",
         "launch_server.py: error: unrecognized arguments: --forward-hookz"]),
        ("flag", "argument --tp-size: invalid int value", ["x.py: error: argument --tp-size: invalid int value: 'a'"]),
        ("architecture", "cannot capture layers", [CRASH, "AttributeError: 'BertModel' object has no attribute "
         "'set_eagle3_layers_to_capture'"]),
        ("architecture", "does not know the model's architecture", [CRASH, "ValueError: Model architectures "
         "['NewForCausalLM'] are not supported for now."]),
        ("capture", "refuses the capture", ["ValueError: --return-aux-hidden-state-layer-ids must not repeat a layer"]),
        ("parallel", "cannot be divided", [CRASH, "AssertionError: 30 is not divisible by 8"]),
        ("compiler", "could not be compiled", [CRASH, "RuntimeError: Could not find nvcc and cuda_home='/usr'"]),
        ("compiler", "could not be compiled", ["/tmp/x.cu:1: fatal error: fl/a.cuh: No such file or directory"]),
        ("driver", "driver cannot be used", [CRASH, "RuntimeError: Found no NVIDIA driver on your system."]),
        ("driver", "driver cannot be used", ["RuntimeError: CUDA error: system not yet initialized"]),
        ("gpu", "XID", [CRASH, "RuntimeError: CUDA error: uncorrectable ECC error encountered"]),
        ("shared memory", "/dev/shm is too small", ["RuntimeError: NCCL error: Error while creating shared memory "
         "segment /dev/shm/nccl-3 (size 9637888): No space left on device"]),
        ("disk", "disk is full", [CRASH, "OSError: [Errno 28] No space left on device: '/root/.cache/x'"]),
        ("nccl", "NCCL failed", [CRASH, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage"]),
        ("module", "lacks the module sgl_kernel", ["Traceback (most recent call last):", '  File "a.py", line 1',
         "ModuleNotFoundError: No module named 'sgl_kernel'"]),
        ("hook", "hook did not load", [CRASH, "ValueError: eightzeros capture: points must be rising layer numbers"]),
        ("exception", "KeyError: 'rope'", [CRASH, "KeyError: 'rope'"]),
    ],
)  # fmt: skip
def test_what_each_log_says(kind: str, words: str, log: list[str]) -> None:
    failure = find_failure([HEAD + "Load weight begin.", *log, HEAD + "Received sigquit from a child process."])
    assert failure is not None and failure.kind == kind, failure
    assert words in failure.sentence and failure.line in "\n".join(log)


def test_the_cause_goes_before_what_follows_from_it() -> None:
    follows = [
        "[2026-12-01 10:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    ]
    memory = [CRASH, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    failure = find_failure(follows + memory)
    assert failure is not None and failure.kind == "memory"
    alone = find_failure(follows)
    assert alone is not None and alone.kind == "nccl"


def test_a_time_of_day_is_no_port() -> None:
    failure = find_failure(["[2026-11-30 10:05:00] OSError: [Errno 98] Address already in use"])
    assert failure is not None and failure.port == 0 and failure.sentence == "a port is taken"
