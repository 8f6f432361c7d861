"""What the console shows, as rows: pure functions, so no terminal is needed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from rich.cells import cell_len

from backend.config import Thresholds
from backend.fleet import LinkState, LinkStatus
from backend.wire import (
    GIB,
    MIB,
    NOT_READ,
    NOT_SUPPORTED,
    GpuSample,
    Holder,
    Inventory,
    Reading,
    failed,
)
from tests.fakefleet import FakeFleet, config, make_receipt
from tests.rowtext import busy_fleet, styles, text
from tui import format
from tui.widgets import host_rows
from tui.widgets.chrome_rows import event_rows, focus_row, foot_row, head_row
from tui.widgets.detail_rows import gpu_rows
from tui.widgets.host_rows import choose_form, make_form, panel_rows
from tui.widgets.rows import bar, fill, fit, pad, row_width, spark, spread, wrap

LIMITS = Thresholds()


@pytest.fixture
def fleet() -> FakeFleet:
    return busy_fleet()


@pytest.fixture
def host(fleet: FakeFleet):
    return fleet.hosts["gpu-01"]


def panel(host, width: int = 80, kind: str = host_rows.LINES, cursor: int | None = None):
    return panel_rows(host, make_form(kind, width), LIMITS, time.monotonic(), cursor)


# --- numbers and parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "written"),
    [(0, "0 B"), (812, "812 B"), (924 * GIB, "924 GiB"), (int(4.58 * 1024 * GIB), "4.58 TiB"), (512 * MIB, "512 MiB"),
     (1023 * MIB, "1.00 GiB")],
)  # fmt: skip
def test_sizes_have_units(count: int, written: str) -> None:
    assert format.size(count) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(4.2, "4.2 s"), (42, "42 s"), (720, "12 min"), (11520, "3 h 12 min"), (187200, "2 d 4 h"), (-3, "0.0 s")],
)
def test_durations(seconds: float, written: str) -> None:
    assert format.duration(seconds) == written


def test_a_reading_that_is_no_value_is_never_a_number() -> None:
    assert format.reading(failed("broken")) == "fail"
    assert format.reading(NOT_SUPPORTED) == "n/a"
    assert format.reading(NOT_READ) == "?"
    assert format.memory(failed("broken"), Reading(140 * GIB)) == "fail/140 GiB"
    assert format.memory(Reading(4 * MIB), Reading(140 * GIB)) == "4 MiB/140 GiB"
    assert format.memory(Reading(1), failed("x")) == "1 MiB"


def test_moment_names_the_day_when_it_is_another() -> None:
    now = time.mktime((2026, 12, 1, 15, 0, 0, 0, 0, -1))
    assert format.moment(now + 3600, now) == "16:00"
    assert format.moment(now + 86400, now) == "Wed 15:00"


def test_wide_characters_are_measured_in_cells() -> None:
    assert fit("設定ファイル", 7) == "設定フ…"
    assert cell_len(fit("設定ファイル", 6)) == 6
    assert row_width(pad([("text", "日本"), ("dim", "語です")], 6)) == 6


def test_spread_gives_way_at_the_left() -> None:
    row = spread([("text", "a long left part")], [("dim", "right")], 14)
    assert row_width(row) == 14
    assert text([row]).endswith("right")


def test_fill_takes_whole_runs() -> None:
    assert fill([("text", "abc"), ("dim", "defgh"), ("dim", "x")], 6) == [("text", "abc")]
    assert fill([("text", "abcdef")], 4) == [("text", "abc…")]


def test_wrap_cuts_words_that_are_too_long() -> None:
    assert wrap("see " + "x" * 12 + " end", 8) == ["see", "xxxxxxxx", "xxxx end"]
    assert wrap("", 8) == [""]


def test_an_unknown_bar_is_not_an_empty_bar() -> None:
    assert text([bar(None, 6)]) == "┄┄┄┄┄┄"
    assert text([bar(0.0, 6)]) == "──────"
    assert text([bar(0.001, 6)]) == "╸─────"
    assert text([bar(1.5, 6)]) == "━━━━━━"


def test_a_gap_in_the_samples_is_a_gap_in_the_line() -> None:
    assert spark([0.0, None, 100.0], 3, 2, 3) == "▁ ▇"
    assert spark([], 4, 0) == "    "


def test_the_line_moves_only_when_a_cell_is_complete() -> None:
    values = [float(n % 100) for n in range(100)]
    lines = [spark(values[: end + 1], 10, end, 40)[:-1] for end in (60, 61, 62)]
    assert lines[0] == lines[1] == lines[2]


# --- a host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [host_rows.LINES, host_rows.DENSE, host_rows.ROOMY])
@pytest.mark.parametrize("width", [60, 79, 119, 199])
@pytest.mark.parametrize("gpus", [1, 8, 16])
def test_every_row_is_exactly_as_wide_as_asked(kind: str, width: int, gpus: int) -> None:
    fleet = FakeFleet(config(1), gpus=gpus)
    fleet.tick()
    host = fleet.hosts["gpu-01"]
    form = make_form(kind, width)
    rows = panel_rows(host, form, LIMITS, time.monotonic(), 0)
    assert {row_width(row) for row in rows} == {width}
    assert len(rows) == form.height(gpus)
    assert all("…" not in part[-2:] for _, part in rows[1][:3])


def test_eight_gpus_fit_into_eighty_columns(host) -> None:
    shown = text(panel(host, 79))
    for part in ("OK", "GiB", "%", "°C", "/700W", "MHz", "41217 sgl"):
        assert part in shown
    assert len(shown.splitlines()) == 9


def test_a_lost_gpu_says_so_and_shows_no_number(host) -> None:
    gpus = list(host.telemetry.gpus)
    gpus[2] = GpuSample(2, problem="GPU is lost: NVML_ERROR_GPU_IS_LOST")
    host.telemetry = replace(host.telemetry, gpus=gpus)
    rows = panel(host)
    assert "LOST" in text([rows[3]])
    assert "GPU is lost" in text([rows[3]])
    assert "GiB" not in text([rows[3]])
    assert "0%" not in text([rows[3]])
    assert styles([rows[3]], "LOST") == {"bad"}


def test_a_hung_gpu_says_so(host) -> None:
    host.telemetry.gpus[1] = GpuSample(1, problem="not answering for 5 s")
    assert "HUNG" in text([panel(host)[2]])
    assert "not answering" in text(panel(host, 199, host_rows.ROOMY))


def test_failed_and_unsupported_readings_show_as_words(host) -> None:
    readings = host.telemetry.gpus[0].readings
    readings["utilisation_percent"] = failed("NVML_ERROR_UNKNOWN")
    readings["power_w"] = NOT_SUPPORTED
    readings["memory_used_bytes"] = failed("NVML_ERROR_UNKNOWN")
    row = panel(host)[1]
    assert "UNREAD" in text([row])
    assert "fail" in text([row])
    assert "n/a/700W" in text([row])
    assert "┄" in text([row])
    assert " 0%" not in text([row])


def test_a_stale_host_fades_and_tells_the_age(host) -> None:
    host.link = LinkStatus(LinkState.STALE, "no telemetry for 4 s")
    host.received_at = time.monotonic() - 7
    rows = panel(host, 119)
    assert "STALE" in text([rows[0]])
    assert "values are 7 s old" in text([rows[0]])
    assert styles(rows[1:2], "GiB") == {"dim"}


def test_a_reading_that_is_old_fades_on_a_live_host(host) -> None:
    host.telemetry.gpus[0].readings["temperature_c"] = Reading(61, age_s=9.0)
    assert styles([panel(host)[1]], "61°C") == {"dim"}
    assert "9 s old" not in text([panel(host)[1]])
    host.telemetry.gpus[0].readings["temperature_c"] = Reading(61, age_s=20.0)
    assert "20 s old" in text(gpu_rows(host, 0, 100, LIMITS))


def test_a_lost_host_says_why_and_when_it_is_tried_again(host) -> None:
    host.link = LinkStatus(LinkState.LOST, "no answer for 10 s", retry_in_s=8.0)
    shown = text(panel(host, 119))
    assert "LOST  no answer for 10 s  again in 8 s" in shown


def test_a_host_without_gpus_says_why(host) -> None:
    host.inventory = Inventory(problem="driver/library version mismatch")
    assert "driver/library version mismatch" in text(panel(host))
    host.inventory = None
    assert "no answer from the driver yet" in text(panel(host))


def test_virtual_and_the_last_verdict_stand_in_the_host_line(fleet, host) -> None:
    host.hello = replace(host.hello, virtual=True)
    assert "not verified yet" in text(panel(host))
    fleet.end_reset("gpu-01", make_receipt("gpu-01"))
    line = text([panel(host, 119)[0]])
    assert "VIRTUAL" in line
    assert "CLEAN 0 0 0 0 0 0 0 0  just now" in line


def test_control_sequences_of_a_holder_do_not_reach_the_terminal(host) -> None:
    host.telemetry.gpus[0].holders = [Holder(7, "eve", "\x1b[2Jpython\x07 \x9b31m")]
    rows = panel(host, 199)
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in text(rows).replace("\n", ""))


def test_the_largest_holder_is_named_and_the_others_are_counted(host) -> None:
    host.telemetry.gpus[0].holders = [
        Holder(1, "a", "small", used_bytes=Reading(MIB)),
        Holder(2, "b", "/usr/bin/large --x", used_bytes=Reading(GIB)),
        Holder(3, "c", "gone", alive=False),
    ]
    assert "2 large" in text([panel(host, 119)[1]])
    assert "+2" in text([panel(host, 119)[1]])


def test_what_an_interpreter_runs_is_named() -> None:
    assert host_rows.program(["/usr/bin/python3", "-u", "-m", "sglang.launch_server", "--tp"]) == "sglang.launch_server"
    assert host_rows.program(["python3.11", "-u", "/srv/train.py", "x"]) == "train.py"
    assert host_rows.program(["python3", "-c"]) == "python3"
    assert host_rows.program(["/usr/bin/nvtop"]) == "nvtop"
    assert host_rows.program([""]) == ""


def test_the_roomiest_layout_that_fits_is_chosen() -> None:
    assert choose_form(79, 15, [8]).kind == host_rows.LINES
    assert choose_form(199, 40, [8]).kind == host_rows.ROOMY
    assert choose_form(199, 41, [8] * 8).kind == host_rows.DENSE
    assert choose_form(199, 5, [8] * 8).kind == host_rows.DENSE


def test_a_place_in_a_tile_belongs_to_its_gpu() -> None:
    form = make_form(host_rows.DENSE, 199)
    assert form.gpu_at(3, 0) is None
    assert form.gpu_at(1, 1) == 0
    assert form.gpu_at(1 + form.pane + form.gap, 4) == 1
    assert make_form(host_rows.LINES, 80).gpu_at(40, 8) == 7


# --- around the hosts -------------------------------------------------------------------------------------------


def test_the_head_counts_what_is_well_and_what_is_not(host) -> None:
    host.telemetry.gpus[2] = GpuSample(2, problem="GPU is lost")
    head = text([head_row([host], LIMITS, 119, 0.0, False)])
    assert "1 of 1 host live · 7 of 8 GPUs OK · 1 LOST" in head
    host.link = LinkStatus(LinkState.LOST, "gone")
    assert "0 of 1 host live · 0 of 8 GPUs OK · 8 not seen" in text([head_row([host], LIMITS, 119, 0.0, False)])
    assert "PAUSED" in text([head_row([host], LIMITS, 119, 0.0, True)])


def test_the_focus_line_says_what_a_badge_means(host) -> None:
    assert "41210 root" in text([focus_row(host, 0, LIMITS, 119)])
    host.telemetry.gpus[0].readings["ecc_uncorrected"] = Reading(2)
    assert "ECC  2 uncorrected ECC errors" in text([focus_row(host, 0, LIMITS, 119)])


def test_the_keys_are_named_whole_or_not_at_all() -> None:
    assert text([foot_row(30)]).rstrip().split()[-1] in {"pause", "open"}
    assert "q quit" in text([foot_row(90, host="gpu-01")])


def test_events_name_the_host_where_there_are_several(fleet) -> None:
    fleet.event("gpu-01", "bad", "lost [red]now[/red]")
    rows = event_rows(fleet.hosts["gpu-01"].events, True)
    assert "gpu-01  lost [red]now[/red]" in text(rows)
    assert styles(rows, "lost") == {"bad"}


def test_every_reading_and_every_failure_is_on_the_detail(host) -> None:
    host.telemetry.gpus[0].readings["temperature_c"] = failed("NVML_ERROR_TIMEOUT after 1 s")
    shown = text(gpu_rows(host, 0, 100, LIMITS))
    assert "temperature: NVML_ERROR_TIMEOUT after 1 s" in shown
    for word in ("PCIe width", "thermal margin", "x16", "power cap", "615 MiB", "41210"):
        assert word in shown
    assert "n/a" in shown
