"""Slots that CUDA pins: a stand-in for the runtime's two calls, since what is judged is what we ask of it and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch in the test environment")

from backend.extraction.capture import hook, sink  # noqa: E402
from backend.extraction.staging import Staging  # noqa: E402
from tests.capturing import RUN, Rows, Server, check, failure  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

ALREADY_REGISTERED = 712


class Runtime:
    """The CUDA runtime as far as pinning goes: ranges by address, and the error that the next kernel reports."""

    def __init__(self) -> None:
        self.ranges: set[int] = set()
        self.refuses = False
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses or address in self.ranges:
            self.last_error = ALREADY_REGISTERED
            return ALREADY_REGISTERED
        self.ranges.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.ranges.remove(address)
        return 0

    def kernel(self, *_: Any, **__: Any) -> None:
        """Launch one, as any operation of the server does."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(sink, "_cuda", SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(sink.torch, "zeros", runtime.kernel)
    return runtime


def pin(server: Server) -> None:
    """Warm up, which makes the slots, and pin them as where the states lie on a GPU."""
    server.warm_up()
    server.warm_up()
    assert server.hook._sink is not None
    slots = torch.frombuffer(server.hook._sink._writer.memory, dtype=torch.uint8)
    server.hook._sink._pin(slots, torch.device("cpu"))


def test_the_next_hook_finds_no_range_still_pinned(tmp_path: Path, runtime: Runtime) -> None:
    server = Server(tmp_path / "staging")
    pin(server)
    assert len(runtime.ranges) == 1
    server.close()
    assert not runtime.ranges


def test_slots_that_cannot_be_pinned_leave_no_error_behind_for_the_server(tmp_path: Path, runtime: Runtime) -> None:
    runtime.refuses = True
    server, reader = Server(tmp_path / "staging"), Staging(str(tmp_path / "staging"), RUN, "s1")
    pin(server)
    runtime.kernel()  # the server's own: raises where the refusal is still there
    assert "could not be pinned (CUDA error 712)" in server.hook.counters.error
    server.run(Rows(rid := reader.rid(1, 0, 5), 5))
    check(reader, rid)
    server.close()


def test_slots_that_cannot_be_made_are_tried_once_and_every_request_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refuse(*_: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("no room for 512 MiB")

    monkeypatch.setattr(hook, "Sink", refuse)
    server, reader = Server(tmp_path / "staging"), Staging(str(tmp_path / "staging"), RUN, "s1")
    server.warm_up()
    server.warm_up()
    for number in range(2):
        server.run(Rows(rid := reader.rid(number, 0, 5), 5))
        assert "no room for 512 MiB" in failure(reader, rid)
    assert len(tries) == 1
    server.close()
