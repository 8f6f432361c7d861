"""The capture hook, driven with forward passes as SGLang gives them, and the reader of what it leaves."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch in the test environment")

from backend.extraction.capture.config import Config  # noqa: E402
from backend.extraction.capture.hook import Capture  # noqa: E402
from backend.extraction.capture.writing import HEADER_BYTES  # noqa: E402
from backend.extraction.staging import Staging  # noqa: E402
from tests.capturing import HIDDEN, POINTS, RUN, WIDTH, Rows, Server, Stack, check, failure, failure_of, pass_of  # noqa: E402
from tests.waiting import until  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROW_BYTES = 8 + 4 * (WIDTH + HIDDEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging"


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that have warmed up, and end them."""
    servers = []

    def start(**settings: Any) -> Server:
        server = Server(folder, **settings)
        servers.append(server)
        server.warm_up()
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def reader(folder: Path) -> Staging:
    return Staging(str(folder), RUN, "s1")


@pytest.mark.parametrize("split", [False, True], ids=["packed", "list of points"])
def test_a_pass_is_cut_into_its_requests(serve: Callable[..., Server], reader: Staging, split: bool) -> None:
    server, rids = serve(), [reader.rid(i, 0, n) for i, n in enumerate((5, 1, 12))]
    last = server.run(*(Rows(rid, int(rid.rpartition("-")[2])) for rid in rids), padding=3, split=split)
    assert last.shape == (21, HIDDEN), "the server gets the last hidden states, as if there were no hook"
    for rid in rids:
        check(reader, rid)
    until(lambda: server.hook.counters.rows == 18)
    assert server.hook.counters.passes == 1


def test_chunks_are_put_together(serve: Callable[..., Server], reader: Staging) -> None:
    server, first, second = serve(), reader.rid(1, 0, 300), reader.rid(2, 0, 150)
    server.run(Rows(first, 128))
    server.run(Rows("HEALTH_CHECK_9", 2), Rows(first, 128, 128))
    assert reader.look().whole == []
    server.run(Rows(first, 44, 256), Rows("someone-else-8", 8), Rows(second, 70))
    check(reader, first)
    server.run(Rows(second, 80, 70))
    check(reader, second)
    assert server.hook.counters.foreign == 3  # the warm-up is one of them


def test_a_pass_larger_than_all_slots_is_split(serve: Callable[..., Server], reader: Staging) -> None:
    server = serve(slot_bytes=5 * ROW_BYTES)
    rids = [reader.rid(i, 0, n) for i, n in enumerate((1, 4, 33, 7, 2))]
    server.run(*(Rows(rid, int(rid.rpartition("-")[2])) for rid in rids), padding=2)
    for rid in rids:
        check(reader, rid)


def test_decoding_and_padding_leave_nothing(serve: Callable[..., Server], reader: Staging) -> None:
    server, rid, other = serve(), reader.rid(1, 0, 6), reader.rid(2, 0, 3)
    server.run(Rows(rid, 6))
    check(reader, rid)
    reader.open(rid).discard()
    server.run(Rows(rid, 1, 6), extend=False)
    server.run(Rows(rid, 1, 6), Rows(other, 3))  # a mixed pass: one decodes, one is prefilled
    check(reader, other)
    assert server.hook.counters.failed == 0 and reader.look().whole == [other]


def test_rows_from_a_prefix_cache_fail_the_request(serve: Callable[..., Server], reader: Staging) -> None:
    server, rid, other = serve(), reader.rid(1, 0, 200), reader.rid(2, 0, 20)
    server.run(Rows(rid, 60, 100), Rows(other, 20))
    assert "prefix cache held its first 100 rows" in failure(reader, rid)
    check(reader, other)
    server.run(Rows(rid, 40, 160))
    assert reader.look().failed == [], "it is said once"
    server.run(Rows(reader.rid(1, 1, 200), 200))
    check(reader, reader.rid(1, 1, 200))


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        ([(0, 10), (12, 8)], "rows 12 to 20 came where 10 to 20 were due"),
        ([(0, 21)], "rows 0 to 21 came where 0 to 20 were due"),
    ],
)
def test_missing_and_surplus_rows(
    serve: Callable[..., Server], reader: Staging, passes: list[tuple[int, int]], reason: str
) -> None:
    server, rid = serve(), reader.rid(1, 0, 20)
    for prefix, rows in passes:
        server.run(Rows(rid, rows, prefix))
    assert failure(reader, rid) == reason


def test_a_rid_without_a_length_fails(serve: Callable[..., Server], reader: Staging) -> None:
    serve().run(Rows(f"{RUN}-s1-nine", 9))
    assert "the number of its tokens" in failure(reader, f"{RUN}-s1-nine")


def test_the_first_pass_only_begins_the_capture(folder: Path, reader: Staging) -> None:
    server, rid = Server(folder), reader.rid(0, 0, 4)
    try:
        server.run(Rows(rid, 4))
        assert "send it again" in failure(reader, rid)
        assert server.stack.layers_to_capture == POINTS == server.hook.counters.effective_layers
    finally:
        server.close()


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (Stack([1, 2]), "the server itself captures the layers [1, 2] already"),
        (Stack(list(POINTS)), "the server itself captures the layers [2, 5] already"),
        (Stack([], [None] * 5), "points [2, 5] must lie within 1 to 4: the model has 5 layers"),
    ],
)
def test_layers_that_cannot_be_captured(folder: Path, reader: Staging, stack: Stack, reason: str) -> None:
    server, rid, before = Server(folder), reader.rid(0, 0, 4), list(stack.layers_to_capture)
    server.stack = stack
    try:
        server.warm_up()
        assert reason in server.hook.counters.error, "the server's start can show it"
        assert isinstance(server.run(Rows(rid, 4)), tuple) == bool(before), "the server gets what it expects"
        assert reason in failure(reader, rid)
        assert stack.layers_to_capture == before
    finally:
        server.close()


def test_a_pass_of_another_form_fails_its_requests(serve: Callable[..., Server], reader: Staging) -> None:
    server, rids = serve(), [reader.rid(i, 0, 4) for i in range(4)]
    batch, aux, last = pass_of(Rows(rids[0], 4))
    server.hook(server.stack, (batch,), (last, aux[:, :HIDDEN]))
    assert failure(reader, rids[0]) == "the server captured 1 points where 2 were asked for"
    batch, aux, last = pass_of(Rows(rids[1], 4))
    server.hook(server.stack, (batch,), (last[:3], aux))
    assert "3 rows for requests of 4" in failure(reader, rids[1])
    server.run(Rows(rids[2], 4))
    check(reader, rids[2])
    batch, aux, last = pass_of(Rows(rids[3], 4))
    server.hook(server.stack, (batch,), (last.half(), aux.half()))
    assert "the form of a row changed" in failure(reader, rids[3])


def test_the_logits_adapter_reads_what_the_processor_returns(folder: Path, reader: Staging) -> None:
    raw = {"run": RUN, "folder": str(folder), "points": POINTS, "adapter": "logits"}
    hook, processor = Capture(Config.of(raw), 0, True), SimpleNamespace()
    try:
        batch, aux, last = pass_of(Rows(reader.rid(0, 0, 6), 6), padding=2)
        assert hook(Stack(POINTS), (batch,), (last, aux)) is None
        output = SimpleNamespace(hidden_states=aux, last_hidden_states=last)
        assert hook(processor, (batch.input_ids, last, None, batch, aux), output) is None
        check(reader, reader.rid(0, 0, 6))
        batch, aux, last = pass_of(Rows(reader.rid(1, 0, 6), 6))
        hook(processor, (batch,), SimpleNamespace(hidden_states=last, last_hidden_states=None))
        assert "--enable-return-aux-hidden-states" in failure(reader, reader.rid(1, 0, 6))
    finally:
        hook.close()


def test_an_exception_fails_the_samples_and_not_the_server(
    serve: Callable[..., Server], reader: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, rids = serve(), [reader.rid(i, 0, 5) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr("backend.extraction.capture.sink.Sink._copy", lambda *_: 1 // 0)
        assert server.run(Rows(rids[0], 5)).shape == (5, HIDDEN)
    assert "ZeroDivisionError" in failure(reader, rids[0])
    with monkeypatch.context() as patch:
        patch.setattr(Capture, "_take", lambda *_: 1 // 0)
        server.run(Rows(rids[1], 5))
    assert "ZeroDivisionError" in failure(reader, rids[1])
    output = torch.zeros(1, HIDDEN)
    assert server.hook(server.stack, (), (output, None)) is output, "arguments that make no sense"
    server.run(Rows(rids[2], 5))
    check(reader, rids[2])


def test_a_folder_that_is_gone_fails_nothing_else(serve: Callable[..., Server], reader: Staging, folder: Path) -> None:
    server = serve()
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)
    assert server.run(Rows(reader.rid(0, 0, 5), 5)).shape == (5, HIDDEN)
    assert "No such file" in server.hook.counters.error
    folder.mkdir()
    server.run(Rows(reader.rid(1, 0, 5), 5))
    check(reader, reader.rid(1, 0, 5))


def test_a_full_staging_waits_for_the_reader(serve: Callable[..., Server], reader: Staging) -> None:
    server = serve(bound_bytes=2 * (HEADER_BYTES + 10 * ROW_BYTES), slot_bytes=10 * ROW_BYTES)
    rids = [reader.rid(i, 0, 10) for i in range(6)]
    thread = threading.Thread(target=server.run, args=[Rows(rid, 10) for rid in rids])
    thread.start()
    until(lambda: set(reader.look().whole) == set(rids[:2]))
    until(lambda: waits(thread))
    assert len(reader.look().whole) == 2
    for rid in rids:
        check(reader, rid)
        reader.open(rid).discard()
    thread.join(10)
    counters = server.hook.counters
    assert not thread.is_alive() and (counters.whole, counters.failed, counters.over_bound) == (6, 0, 0)
    assert counters.high_water_bytes == 2 * (HEADER_BYTES + 10 * ROW_BYTES) and counters.wait_s > 0


def waits(thread: threading.Thread) -> bool:
    """Say whether a thread sleeps in the hook's wait for room."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name in ("reserve", "look")


def test_a_reader_that_never_comes_fails_the_request(serve: Callable[..., Server], reader: Staging) -> None:
    server = serve(bound_bytes=HEADER_BYTES + 10 * ROW_BYTES, patience_s=0.2)
    server.run(Rows(reader.rid(0, 0, 10), 10), Rows(reader.rid(1, 0, 10), 10), Rows(reader.rid(2, 0, 11), 11))
    assert failure_of(reader, reader.rid(1, 0, 10)) == "the staging was full for 0.2 s: nobody reads it"
    assert (
        "its 11 tokens need" in failure_of(reader, reader.rid(2, 0, 11))
        and "(bound_bytes)" in server.hook.counters.error
    )
    check(reader, reader.rid(0, 0, 10))


def test_unfinished_requests_alone_never_stop_the_server(serve: Callable[..., Server], reader: Staging) -> None:
    server = serve(bound_bytes=2 * (HEADER_BYTES + 10 * ROW_BYTES))
    rids = [reader.rid(i, 0, 10) for i in range(3)]
    server.run(*(Rows(rid, 4) for rid in rids))
    assert server.hook.counters.over_bound == 1
    server.run(*(Rows(rid, 6, 4) for rid in rids))
    for rid in rids:
        check(reader, rid)


def test_what_the_reader_gives_up_is_let_go(serve: Callable[..., Server], reader: Staging, folder: Path) -> None:
    server, rid = serve(), reader.rid(0, 0, 10)
    server.run(Rows(rid, 4))
    reader.forget(rid)
    server.run(Rows(rid, 6, 4))
    until(lambda: server.hook.counters.abandoned == 1)
    assert server.hook.counters.staged_bytes == 0
    assert reader.look() == ([], []) and not [name for name in os.listdir(folder) if "part" in name]


def test_a_cancelled_request_is_let_go_in_time(serve: Callable[..., Server], reader: Staging, folder: Path) -> None:
    server, rid = serve(stale_s=0.1), reader.rid(0, 0, 10)
    server.run(Rows(rid, 4))
    assert failure(reader, rid) == "no further rows came for 0.1 s"
    assert not [name for name in os.listdir(folder) if "part" in name]
    assert server.hook.counters.staged_bytes == 0


def test_the_states_are_those_of_the_pass_though_its_buffers_are_filled_again(
    serve: Callable[..., Server], reader: Staging
) -> None:
    """SGLang's eager runner keeps input_ids in one buffer, which the next pass fills."""
    server, rid = serve(slot_bytes=5 * ROW_BYTES), reader.rid(1, 0, 20)
    batch, aux, last = pass_of(Rows(rid, 20))
    server.hook(server.stack, (batch.input_ids, None, batch), (last, aux))
    for tensor in (batch.input_ids, aux, last):
        tensor.zero_()
    check(reader, rid)


def test_many_clients_and_random_chunks(serve: Callable[..., Server], reader: Staging) -> None:
    """Cut 60 prompts at random into passes, with a reader beside; every row must be where it belongs."""
    server = serve(slot_bytes=16 * ROW_BYTES, bound_bytes=20 * HEADER_BYTES, writers=3)
    source, seen = np.random.default_rng(8), set()
    left = {reader.rid(i, 0, int(n)): 0 for i, n in enumerate(source.integers(1, 90, 60))}

    def read() -> None:
        end = time.monotonic() + 60
        while len(seen) < 60 and time.monotonic() < end:
            for rid in reader.look().whole:
                check(reader, rid)
                reader.open(rid).discard()
                seen.add(rid)

    thread = threading.Thread(target=read)
    thread.start()
    while left:
        rows = []
        for rid in list(left)[: int(source.integers(1, 6))]:
            take = min(int(rid.rpartition("-")[2]) - left[rid], int(source.integers(1, 50)))
            rows.append(Rows(rid, take, left[rid]))
            left[rid] += take
            if left[rid] == int(rid.rpartition("-")[2]):
                del left[rid]
        server.run(*rows, padding=int(source.integers(0, 3)), split=bool(source.integers(0, 2)))
    thread.join(60)
    counters = server.hook.counters
    assert len(seen) == 60 and (counters.whole, counters.failed) == (60, 0), counters.error
    assert counters.high_water_bytes <= 20 * HEADER_BYTES or counters.over_bound
