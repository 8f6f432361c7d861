"""The timeline on a recorded flight, driven like the operator drives it."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest

from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import Record
from backend.wire import Refused
from backend.wire.flight import FAILED, FlightEvent
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.fakefleet import FakeFleet, config, make_run
from tests.flights import RUN, seconds
from tui.screens.timeline import TimelineScreen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.driving import Driven

LENGTH_S = 600


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Record ten minutes that ended a moment ago, with a GPU that failed and an extraction that died."""
    folder = tmp_path_factory.mktemp("flight")
    start = float(int(time.time()) - LENGTH_S - 2)
    record = Record(str(folder))
    for number, (at, values) in enumerate(seconds(LENGTH_S, start=start)):
        if 300 <= number < 420:
            values = {name: FAILED if name.startswith("gpu5.") else value for name, value in values.items()}
        record.append(at, values)
    for at, level, text in ((5, "info", "it began"), (300, "bad", "GPU 5: not answering"), (590, "bad", "it died")):
        record.event(FlightEvent(start + at, "run", level, text, run=RUN))
    record.close()
    return folder, start


@pytest.fixture
def begin(recorded: tuple[Path, float]) -> float:
    shutil.copytree(recorded[0], flight_dir(), dirs_exist_ok=True)
    return recorded[1]


@pytest.fixture
def fleet(begin: float) -> FakeFleet:
    fleet = FakeFleet(config())
    host = fleet.hosts["gpu-01"]
    host.runs[RUN] = make_run(RUN, "extract", "exited", exit_code=1, started_at=begin, ended_at=begin + 590)
    host.caught_up = True
    fleet.logs[RUN] = "".join(f"line at {byte:>9}".ljust(49) + "\n" for byte in range(0, 60_000, 50))
    return fleet


async def opened(driven: Driven) -> TimelineScreen:
    await driven.press("T")
    await driven.shows(TimelineScreen)
    screen = driven.app.screen
    assert isinstance(screen, TimelineScreen)
    await driven.until(lambda: screen.feed.loaded and "GPU 7" in driven.text)
    return screen


async def test_every_lane_is_in_sight_at_every_size(fleet: FakeFleet) -> None:
    async with console(SMALL, fleet=fleet) as driven:
        await opened(driven)
        for width, height in (SMALL, MIDDLE, LARGE):
            await driven.pilot.resize_terminal(width, height)
            await driven.sees("GPU 0", "GPU 7", "rate", "disk", "events", "extract", "it died", "FOLLOWING")
            assert {len(line) for line in driven.text.splitlines()} == {width}
            assert ("/dev/shm" in driven.text) is (height >= 34)


async def test_the_cursor_scrubs_to_a_failed_reading_and_back(fleet: FakeFleet, begin: float) -> None:
    async with console(MIDDLE, fleet=fleet) as driven:
        screen = await opened(driven)
        await driven.press("up")
        assert screen.view.cursor == pytest.approx(begin + 590)
        await driven.press("up")
        await driven.sees("HELD")
        assert screen.view.cursor == pytest.approx(begin + 300)
        await driven.until(lambda: screen.feed.recording.knows(1, screen.view.cursor - 5, screen.view.cursor + 5))
        await driven.until(lambda: next(x for x in driven.text.splitlines() if "GPU 5" in x).count("fail") == 4)
        assert "×" in next(line for line in driven.text.splitlines() if "GPU 5" in line)
        column = screen.view.column
        await driven.press("left", "left", "right")
        assert screen.view.column == column - 1
        await driven.press("f")
        await driven.sees("FOLLOWING")


async def test_the_log_line_of_the_second_is_found(fleet: FakeFleet, begin: float) -> None:
    async with console(MIDDLE, fleet=fleet) as driven:
        screen = await opened(driven)
        screen.view.go(begin + 500)
        screen._moved()
        await driven.until(lambda: screen.log_second)
        moment = screen.feed.recording.at(begin + 500)
        assert moment is not None
        size = int(moment.number(f"run.{RUN}.log_bytes") or 0)
        shown = int(screen.log_second.split()[-1])
        assert shown <= size < shown + 100, "the last whole line that was there in this second"
        await driven.press("tab")
        await driven.sees(f"line at {shown:>9}", f"line at {shown + 100:>9}")


@pytest.mark.slow
async def test_zoom_reads_finer_rows_where_it_looks(fleet: FakeFleet, begin: float) -> None:
    async with console(SMALL, fleet=fleet) as driven:
        screen = await opened(driven)
        screen.view.go(begin + 200)
        await driven.press("+", "+", "+", "+", "+", "+", "+", "+")
        assert screen.view.cell_s == 1
        await driven.until(lambda: screen.feed.recording.knows(1, screen.view.start, screen.view.end))
        assert screen.feed.recording.best_step(1, screen.view.start, screen.view.end) == 1
        await driven.press("0")
        assert screen.view.start <= begin and screen.view.end >= begin + LENGTH_S
        await driven.press("u")
        await driven.press("m", "m")
        await driven.sees("heat")


@pytest.mark.slow
async def test_it_plays_and_stops_at_the_newest_second(fleet: FakeFleet, begin: float) -> None:
    async with console(SMALL, fleet=fleet) as driven:
        screen = await opened(driven)
        await driven.press("g", "p", "p", "p")
        assert screen.speed == 600
        await driven.until(lambda: screen.view.cursor > begin + 200)
        await driven.until(lambda: screen.view.following and not screen.speed)


@pytest.mark.slow
async def test_new_seconds_come_by_themselves(fleet: FakeFleet, begin: float) -> None:
    async with console(SMALL, fleet=fleet) as driven:
        screen = await opened(driven)
        record = Record(flight_dir())
        record.append(begin + LENGTH_S + 1, {"gpu0.power_w": 77.0})
        record.event(FlightEvent(begin + LENGTH_S + 1, "run", "bad", "something new"))
        record.close()
        await driven.until(lambda: screen.view.cursor == begin + LENGTH_S + 1)
        await driven.sees("something new")


async def test_a_host_that_refuses_says_why_and_is_asked_again(fleet: FakeFleet) -> None:
    async def refuse(host: str, op: str, args: object, timeout_s: float) -> object:
        raise Refused("failed", "the record is on fire")

    asked, fleet.flights._request = fleet.flights._request, refuse
    async with console(SMALL, fleet=fleet) as driven:
        await driven.press("T")
        await driven.sees("the record is on fire")
        fleet.flights._request = asked
        await driven.sees("GPU 7", "FOLLOWING")
        await driven.press("escape")
        await driven.sees("eightzeros")
