"""A record as the console reads it: cells of the timeline, the row of a second, the window and its cursor, files."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.flight.place import flight_dir
from backend.agent.flight.record import Record
from backend.fleet.flightfiles import column_names, rows_between, write_csv, write_jsonl, write_parquet
from backend.fleet.flights import EVER
from backend.fleet.recording import Cell, Recording
from backend.wire import Refused
from backend.wire.flight import FAILED, FlightEvent, encode_block
from tests.flights import RUN, START, fetched, flights, seconds
from tui.widgets.timeline_view import View

if TYPE_CHECKING:
    from pathlib import Path

    from backend.wire.flight import Row

LOAD = "gpu0.utilisation_percent"


def written(rows: list[Row]) -> None:
    record = Record(flight_dir())
    for at, values in rows:
        record.append(at, values)
    record.close()


def recording(step_s: int = 1) -> Recording:
    found = Recording()
    found.take(step_s, flights().blocks("h", step_s).result(), 0.0, EVER)
    return found


def cells(found: Recording, step_s: int, start: float, cell_s: float, count: int, name: str = LOAD) -> list[Cell]:
    return found.cells(name, found.layout(step_s, start, cell_s, count), count)


def test_cells_are_the_rows_that_lie_in_them() -> None:
    rows = list(seconds(400, gpus=1))
    written(rows)
    for start, cell_s, count in ((START - 30, 30, 20), (START + 7, 1, 50), (START + 100, 45, 4)):
        for number, cell in enumerate(cells(recording(), 1, start, cell_s, count)):
            begin = start + number * cell_s
            inside: list[Any] = [values[LOAD] for at, values in rows if begin <= at + 0.05 < begin + cell_s]
            if not inside:
                assert cell == Cell()
                continue
            assert cell.mean == pytest.approx(sum(inside) / len(inside))
            assert (cell.low, cell.high, cell.rows) == (min(inside), max(inside), len(inside))


def test_coarse_rows_keep_the_peak_and_fill_every_cell_that_they_cover() -> None:
    rows: list[Row] = [(float(START + n), {LOAD: 100 if n == 65 else 10}) for n in range(250)]
    written(rows)
    coarse = recording(60)
    ends = [(cell.low, cell.high) for cell in cells(coarse, 60, START, 60, 4)]
    assert ends == [(10, 10), (10, 100), (10, 10), (10, 10)]
    fine = cells(coarse, 60, START + 60, 10, 6)
    assert [cell.mean for cell in fine] == [pytest.approx(11.5)] * 6, "a minute is drawn over its six cells"


def test_a_failed_reading_and_a_gap_are_told_apart() -> None:
    rows: list[Row] = [(START + n + 0.0, {LOAD: FAILED if n < 10 else 50, "x": 1}) for n in range(20)]
    written(rows)
    found = cells(recording(), 1, START - 10, 10, 4)
    assert found == [Cell(), Cell(failed=True), Cell(50, 50, 50, False, 10), Cell()]


def test_the_row_of_a_second_is_of_the_finest_step_that_has_it() -> None:
    written(list(seconds(200, gpus=1)))
    found = recording(60)
    coarse = found.at(START + 70)
    assert coarse is not None and (coarse.step_s, coarse.at) == (60, START + 60)
    assert found.at(START - 5) is None and found.at(START + 400) is None
    found.take(1, fetched(1, start=START + 60, end=START + 80), START + 60, START + 80)
    exact = found.at(START + 70)
    assert exact is not None and exact.step_s == 1 and exact.at == pytest.approx(START + 70, abs=0.06)
    assert RUN in exact.run_ids()
    assert exact.number(f"run.{RUN}.samples_total") == 37312
    assert not found.knows(1, START, START + 50) and found.knows(1, START + 62, START + 79)


def test_a_tail_that_grew_replaces_what_it_was() -> None:
    rows = list(seconds(100, gpus=1))
    written(rows[:80])
    found = recording()
    written(rows[80:])
    before = found.revision
    found.take(1, fetched(1, start=found.latest), found.latest, EVER)
    assert found.revision > before and found.latest == rows[-1][0]
    assert sum(cell.rows for cell in cells(found, 1, START, 10, 10)) == 100


def test_a_long_look_back_keeps_what_is_near_and_forgets_that_it_knew_the_rest() -> None:
    found = Recording()
    blocks = [encode_block(1, n, [(START + 60.0 * n, {"x": 1})]) for n in range(700)]
    from backend.wire.flight import Block

    found.take(1, [Block(data) for data in blocks[:400]], START, START + 60 * 400)
    found.take(1, [Block(data) for data in blocks[400:]], START + 60 * 400, START + 60 * 700)
    assert not found.knows(1, START, START + 60)
    assert found.knows(1, START + 60 * 500, START + 60 * 690)


def test_the_cursor_stays_in_sight_and_in_what_is_known() -> None:
    view = View(count=50)
    view.knows(START, START + 30 * 3600)
    assert view.following and view.cursor == START + 30 * 3600
    view.fit(view.first, view.last)
    assert view.cell_s == 2700 and view.start <= START and view.end > view.last
    for _ in range(40):
        view.zoom(-1)
        assert view.start <= view.cursor < view.end
    assert view.cell_s == 1 and view.following
    view.move(-200)
    assert not view.following and view.cursor == view.last - 200 and view.start <= view.cursor < view.end
    view.go(0)
    assert view.cursor == START
    view.go(1e12)
    assert view.following and view.cursor == view.last
    for _ in range(60):
        view.zoom(1)
    assert view.start <= view.cursor < view.end
    view.resize(7)
    assert view.start <= view.cursor < view.end
    view.knows(START, START + 30 * 3600 + 40)
    assert view.cursor == START + 30 * 3600 + 40


def test_a_zoom_keeps_the_cursor_where_it_is_on_the_screen() -> None:
    view = View(count=50)
    view.knows(START, START + 10_000)
    view.fit(view.first, view.last)
    view.go(START + 4321)
    column = view.column
    view.zoom(-1)
    view.zoom(-1)
    assert view.column == column


EVENT = FlightEvent(START + 3.5, "gpu", "bad", "GPU 0: not answering", gpu=0)


def test_json_lines_are_nested_with_the_events_between_the_rows() -> None:
    written(list(seconds(6, gpus=2)))
    file = io.StringIO()
    assert write_jsonl(file, rows_between(fetched(1), START + 2, START + 4.9), [EVENT]) == 3
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert ["event" in line for line in lines] == [False, False, True, False]
    assert lines[2]["event"]["text"] == "GPU 0: not answering"
    assert lines[0]["gpu"]["1"]["fan_percent"] == "unsupported"
    assert lines[0]["run"][RUN]["samples_total"] == 37312 and lines[0]["host"]["memory_total_bytes"] == 2 << 40


def test_tables_have_a_column_a_name_and_say_what_failed(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    rows: list[Row] = [(START + n + 0.5, {"gpu0.power_w": FAILED if n == 1 else 400.5 + n, "x": n}) for n in range(5)]
    written([*rows, (START + 9.5, {"late": 1})])
    blocks = fetched(1)
    names = column_names(blocks)
    file = io.StringIO()
    write_csv(file, rows_between(blocks, 0, EVER), names)
    table = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [line["gpu0.power_w"] for line in table] == ["400.5", "failed", "402.5", "403.5", "404.5", ""]
    assert [line["late"] for line in table] == ["", "", "", "", "", "1"]
    assert write_parquet(tmp_path / "f.parquet", rows_between(blocks, 0, EVER), names, each=4) == 6
    read = pq.read_table(tmp_path / "f.parquet").to_pydict()
    assert read["gpu0.power_w"] == [400.5, None, 402.5, 403.5, 404.5, None]
    assert read["failed"] == [[], ["gpu0.power_w"], [], [], [], []]
    assert read["at"][-1] == START + 9.5


def test_a_host_that_never_ends_is_left() -> None:
    from backend.fleet import flights as module

    async def request(host: str, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        return {"blocks": ["no base64"], "next": ["x", 0]}

    asked = module.Flights(request, flights()._submit)
    with pytest.raises(Refused, match="never said"):
        asked.blocks("h", 1).result()
