"""The record on disk: a ladder of steps, bounded, whole after every crash, read a page at a time."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.agent.flight import ops
from backend.agent.flight.coarse import summary
from backend.agent.flight.events import EventLog, read_events
from backend.agent.flight.level import Level
from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import Record
from backend.wire import Refused
from backend.wire.flight import FAILED, FlightEvent, Row
from tests.flights import START, fetched, rows_of
from tests.runstore import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH_S = 2 * 600 + 47


@pytest.fixture(scope="module")
def flight() -> list[Row]:
    """Make twenty minutes of a few columns; what a whole GPU comes to is for the benchmark."""
    rng = random.Random(5)
    return [
        (START + n + 0.1, {"gpu0.power_w": rng.randrange(6000) / 10, "run.r.log_bytes": 50 * n, "host.load1": None,
                           "gpu0.fan_percent": "unsupported", "gpu0.clock_reasons": rng.choice((0, 4, 8))})
        for n in range(LENGTH_S)
    ]  # fmt: skip


@pytest.fixture
def folder() -> Path:
    return Path(flight_dir())


def write(rows: list[Row], most_bytes: int = 1 << 30) -> None:
    record = Record(flight_dir(), most_bytes)
    for at, values in rows:
        record.append(at, values)
    record.close()


def plain(rows: list[Row]) -> list[Row]:
    return [(at, {name: value for name, value in values.items() if value is not None}) for at, values in rows]


def test_every_second_comes_back_and_the_coarse_rows_are_made_of_them(flight: list[Row]) -> None:
    write(flight)
    assert rows_of(fetched(1)) == plain(flight)
    for step_s in (10, 60):
        found = rows_of(fetched(step_s))
        assert [at for at, _ in found] == [*range(START, int(flight[-1][0]) // step_s * step_s, step_s)]
        for at, values in found[:: len(found) // 7]:
            inside = [row for second, row in flight if at <= second < at + step_s]
            assert values == {name: value for name, value in summary(inside).items() if value is not None}


def test_a_span_comes_as_the_blocks_that_touch_it(flight: list[Row]) -> None:
    write(flight)
    blocks = fetched(1, start=START + 130, end=START + 200)
    assert [(block.head.first, block.head.last) for block in blocks] == [
        (pytest.approx(START + 60 * n, abs=0.2), pytest.approx(START + 60 * n + 59, abs=0.2)) for n in (2, 3)
    ]
    assert fetched(1, end=START - 5) == []
    assert fetched(1, start=START + LENGTH_S + 5) == []


def test_a_recorder_that_is_killed_again_and_again_goes_on_as_if_it_had_not_been(flight: list[Row]) -> None:
    record = Record(flight_dir())
    for number, (second, values) in enumerate(flight):
        record.append(second, values)
        if number in (0, 58, 59, 60, 61, 307, 599, 658, 1201):
            record = Record(flight_dir())  # the old one is not closed, as after a SIGKILL
    assert rows_of(fetched(1)) == plain(flight)
    found = [(step, rows_of(fetched(step))) for step in (10, 60)]
    shutil.rmtree(flight_dir())
    write(flight)
    assert found == [(step, rows_of(fetched(step))) for step in (10, 60)]


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_torn_ends_are_left_out_and_written_over(flight: list[Row], folder: Path, cut: int) -> None:
    write(flight[:150])
    segment = next((folder / "1").glob("*.seg"))
    whole = fetched(1)
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:cut])
    tail = folder / "1" / "tail"
    os.truncate(tail, tail.stat().st_size - 3)
    assert rows_of(fetched(1)) == rows_of(whole)[:-1]
    write(flight[150:300])
    assert rows_of(fetched(1)) == plain(flight[:149] + flight[150:300])


def test_a_damaged_block_costs_no_other(flight: list[Row], folder: Path) -> None:
    write(flight[:240])
    segment = next((folder / "1").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 8] ^= 0xFF  # in the body of the first block
    segment.write_bytes(data)
    assert rows_of(fetched(1)) == plain(flight[60:240])
    data[4] ^= 0xFF  # its length too: it points somewhere else
    segment.write_bytes(data)
    assert rows_of(fetched(1)) == plain(flight[60:240])


def test_a_tail_that_became_a_block_is_not_read_twice(flight: list[Row], folder: Path) -> None:
    write(flight[:60])
    tail = (folder / "1" / "tail").read_bytes()
    write(flight[60:70])
    (folder / "1" / "tail").write_bytes(tail)  # a crash between the block and the new tail
    assert rows_of(fetched(1)) == plain(flight[:60])
    write(flight[60:70])
    assert rows_of(fetched(1)) == plain(flight[:70])


def test_a_clock_that_is_set_back_loses_nothing(flight: list[Row]) -> None:
    back = [(at - 600, values) for at, values in flight[700:760]]
    write([*flight[:700], *back])
    assert sorted(rows_of(fetched(1)), key=lambda row: row[0]) == sorted(
        plain([*flight[:700], *back]), key=lambda row: row[0]
    )


def test_two_rows_within_a_tenth_of_a_second_are_two_moments(flight: list[Row]) -> None:
    """As when a GPU is found: what is known of it is told at once, right after the row of that second."""
    (at, values), (_, more) = flight[:2]
    write([(at, values), (at + 0.02, more)])
    assert [row for row in rows_of(fetched(1))] == plain([(at, values), (round(at + 0.1, 1), more)])


def test_the_oldest_goes_first_and_the_coarse_steps_reach_further_back(folder: Path) -> None:
    long_flight: list[Row] = [(START + n + 0.1, {"gpu0.power_w": n * 7919 % 6000 / 10}) for n in range(3 * 3600)]
    write(long_flight, most_bytes=18_000)
    sizes = {step: sum(path.stat().st_size for path in (folder / str(step)).glob("*.seg")) for step in (1, 10, 60)}
    firsts = {level["step_s"]: level["first"] for level in ops.op_info(machine(), {})["levels"]}
    for step, share in ((1, 0.7), (10, 0.2), (60, 0.1)):
        assert sizes[step] < 18_000 * share + 15_000  # the segment that is being written is never dropped
    assert firsts[1] > START + 3600 and firsts[60] == START
    assert fetched(1)[-1].head.last == pytest.approx(START + 3 * 3600 - 1, abs=0.2)


@pytest.mark.slow
def test_a_large_block_is_halved_until_it_fits_a_line() -> None:
    level = Level(flight_dir(), 1, 60)
    rng = random.Random(3)
    wide: list[Row] = [(START + n + 0.1, {f"c{k}": rng.randrange(1 << 20) for k in range(2000)}) for n in range(60)]
    for at, values in [*wide, (START + 60.0, {"x": 1})]:
        level.append(at, values)
    level.close()
    blocks = fetched(1)
    assert len(blocks) > 2
    assert [at for at, _ in rows_of(blocks)] == [*(at for at, _ in wide), START + 60.0]


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, which fails a write as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_rows_and_nothing_else(flight: list[Row]) -> None:
    record = Record(flight_dir())
    for at, values in flight[:100]:
        record.append(at, values)
    with full_disk(2000):
        for at, values in flight[100:200]:
            record.append(at, values)
    for at, values in flight[200:300]:
        record.append(at, values)
    record.close()
    found, wanted = rows_of(fetched(1)), dict(plain(flight))
    assert all(wanted[at] == values for at, values in found)
    assert found[-100:] == plain(flight[200:300])
    texts = [event.text for event in read_events(flight_dir(), 0, 1e12)["events"]]
    assert any("cannot be written" in text for text in texts) and any("rows were lost" in text for text in texts)


def test_events_come_a_page_at_a_time_and_the_older_file_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.agent.flight.events.MOST_BYTES", 1 << 20)
    log = EventLog(str(folder))
    for number in range(3000):
        log.append(FlightEvent(START + number, "run", "info", f"{number} " + "\x1b[31m…" * 100))
    assert (folder / "events.before.jsonl").stat().st_size < (1 << 20) + 4000
    texts, skip = [], 0
    while skip is not None:
        page = ops.op_events(machine(), {"start": START + 2500, "end": START + 2999, "skip": skip})
        texts += [event.text for event in page["events"]]
        skip = page["next"]
    assert [text.split()[0] for text in texts] == [str(number) for number in range(2500, 3000)]
    assert "\x1b" not in texts[0]


def test_a_torn_event_costs_no_other(folder: Path) -> None:
    log = EventLog(str(folder))
    log.append(FlightEvent(1.0, "run", "info", "one"))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"at": 2.0, "ki')
    log.append(FlightEvent(3.0, "gpu", "bad", "three", gpu=3))
    assert read_events(str(folder), 0, 9)["events"] == [
        FlightEvent(1.0, "run", "info", "one"), FlightEvent(3.0, "gpu", "bad", "three", gpu=3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "args", [{"step_s": 2}, {"step_s": 1, "start": "now"}, {"step_s": 1, "after": 7}, {"step_s": 1, "end": True}]
)
def test_questions_that_make_no_sense_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(Refused, match="must be"):
        ops.op_blocks(machine(), args)


def test_a_coarse_row_tells_failure_from_absence() -> None:
    rows = [
        {"w": 10.0, "gpu0.clock_reasons": 4, "gone": FAILED, "half": FAILED, "none": None},
        {"w": 30.0, "gpu0.clock_reasons": 8, "gone": None, "half": 5},
    ]
    assert summary(rows) == {
        "w": 20.0, "w:min": 10.0, "w:max": 30.0, "gpu0.clock_reasons": 12, "gone": FAILED, "half": 5, "none": None,
    }  # fmt: skip
