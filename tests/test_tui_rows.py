"""What the console shows, as rows: pure functions, so no terminal is needed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from rich.cells import cell_len

from backend.config import Thresholds
from backend.fleet import LinkState, LinkStatus, ResetState
from backend.wire import (
    GIB,
    MIB,
    NOT_CLEAN,
    NOT_READ,
    NOT_SUPPORTED,
    Gate,
    GpuSample,
    Holder,
    Inventory,
    Process,
    Reading,
    ResetEvent,
    failed,
)
from tests.fakefleet import FakeFleet, config, make_plan, make_progress, make_receipt, make_run
from tui import format
from tui.widgets import host_rows
from tui.widgets.chrome_rows import event_rows, focus_row, foot_row, head_row
from tui.widgets.detail_rows import gpu_rows
from tui.widgets.host_rows import choose_form, make_form, panel_rows
from tui.widgets.launch_rows import gate_rows, passed
from tui.widgets.reset_rows import gpu_list, plan_rows, running_rows, verdict_rows
from tui.widgets.rows import bar, fill, fit, pad, row_width, spark, spread, wrap
from tui.widgets.run_rows import progress_rows, rail_row, stage_states
from tui.widgets.shard_rows import listing_rows, sort_entries, tensor_rows

LIMITS = Thresholds()


def text(rows) -> str:
    """Join rows into what is read."""
    return "\n".join("".join(part for _, part in row) for row in rows)


def styles(rows, word: str) -> set[str]:
    """Return the styles of the runs that hold a word."""
    return {style for row in rows for style, part in row if word in part}


@pytest.fixture
def fleet() -> FakeFleet:
    made = FakeFleet(config(1))
    for _ in range(130):
        made.tick()
    return made


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


# --- runs -------------------------------------------------------------------------------------------------------


def band(host, run, width: int = 78):
    return progress_rows((host, run), width, LIMITS, time.time())


def test_the_band_shows_how_far_and_when_it_ends(host) -> None:
    run = make_run("extract-1", "extract", progress=make_progress())
    shown = text(band(host, run))
    for part in ("RUNNING", "43.2% of the tokens", "4,320 / 10,000 samples", "1.5 samples/s", "2.4k tok/s", "in 1 h 08 min",
                 "399 GiB written", "0.14 GB/s", "2.10 TiB disk left, lasts"):  # fmt: skip
        assert part in shown
    assert {row_width(row) for row in band(host, run)} == {78}


def test_a_run_that_stands_still_is_marked(host) -> None:
    progress = make_progress(advanced_at=time.time() - 380, tokens_per_s=0.0)
    rows = band(host, make_run("e", "extract", progress=progress))
    assert "STALLED 6 min" in text(rows)
    assert "no ETA: nothing moves" in text(rows)


def test_a_disk_that_will_fill_says_when(host) -> None:
    progress = make_progress(disk_free_bytes=20 * GIB)
    shown = text(band(host, make_run("e", "extract", progress=progress), 119))
    assert "20.0 GiB disk left, too little for the rest, full in 3 min" in shown


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"exit_code": 0}, "DONE"), ({"exit_code": 3}, "FAILED, EXIT 3"), ({"exit_code": -9}, "KILLED BY SIGNAL 9")],
)
def test_an_ended_run_says_how(host, changes, word: str) -> None:
    run = make_run("e", "extract", "exited", ended_at=time.time() - 60, **changes)
    assert word in text(band(host, run))


def test_no_run_says_what_to_do() -> None:
    assert "L launches" in text(progress_rows(None, 78, LIMITS, 0.0))


def test_the_rail_follows_the_newest_run_of_each_stage(fleet, host) -> None:
    host.runs = {
        "a": make_run("a", "prepare", "exited", exit_code=0),
        "b": make_run("b", "serve", "exited", exit_code=1, started_at=1.0),
        "c": make_run("c", "serve", started_at=2.0),
        "d": make_run("d", "train", "lost"),
    }
    states = dict(stage_states(fleet.config, fleet.hosts.values()))
    assert states == {
        "prepare": "done",
        "serve": "running",
        "extract": "waiting",
        "audit": "waiting",
        "train": "failed",
    }
    row = rail_row(list(states.items()), 119)
    assert "prepare done ── ● serve running" in text([row])
    assert row_width(rail_row(list(states.items()), 50)) == 50


# --- reset ------------------------------------------------------------------------------------------------------


def test_the_plan_names_everything_that_matters() -> None:
    plan = make_plan()
    plan.ghosts = [{"pid": 99, "gpu": 3, "used_bytes": 1}]
    plan.unseen = ["/proc/77/fd: permission denied"]
    shown = text(plan_rows(plan, 90))
    for part in ("KILLS 2 processes", "41210  root", "373 GiB", "5 h 12 min", "0, 2, 4, 6", "TERM, 15 s, KILL", "holds 4 GPUs",
                 "LOSES", "5 h 12 min of run serve-0412", "GHOSTS", "pid 99 on GPU 3", "COULD NOT BE READ",
                 "/proc/77/fd", "SPARES 1", "a daemon of the driver", "baseline recorded"):  # fmt: skip
        assert part in shown
    assert shown.index("LOSES") < shown.index("KILLS")
    assert max(row_width(row) for row in plan_rows(plan, 60)) <= 60


def test_gpu_numbers_are_joined() -> None:
    assert gpu_list([0, 1, 2, 3, 6]) == "0-3, 6"
    assert gpu_list([]) == "-"


def test_a_plan_without_victims_says_so() -> None:
    assert "NOTHING TO KILL" in text(plan_rows(make_plan(0), 60))


def test_phases_have_durations_and_the_open_one_runs_on(fleet) -> None:
    fleet.start_reset("gpu-01", make_plan())
    assert "not reported yet" in text(running_rows(fleet.hosts["gpu-01"].reset, 0.1, 60))
    fleet.reset_step("gpu-01", 0.0, "phase", "looking")
    fleet.reset_step("gpu-01", 0.4, "phase", "stopping")
    fleet.reset_step("gpu-01", 0.5, "signal", "SIGTERM to 41210")
    state = fleet.hosts["gpu-01"].reset
    state.events += [ResetEvent(0.6, "memory", "", {"gpu": 3, "used_bytes": mib * MIB}) for mib in (900, 612)]
    rows = running_rows(state, 2.4, 60)
    assert text(rows[:1]).split() == ["✓", "looking", "0.4", "s"]
    assert text(rows[1:2]).split() == ["●", "stopping", "2.0", "s"]
    assert "SIGTERM to 41210" in text(rows)
    assert "612" in text(rows)
    assert "900" not in text(rows)


def test_signals_are_told_by_kind_and_only_odd_errors_stand_out() -> None:
    sent = [ResetEvent(0.1, "signal", f"{name} to {pid}", {"pid": pid, "signal": name, "errno": code})
            for name, pid, code in (("SIGTERM", 7, 0), ("SIGCONT", 7, 3), ("SIGTERM", 8, 0), ("SIGTERM", 9, 1))]  # fmt: skip
    gone = [ResetEvent(0.3, "gone", f"process {pid} is gone", {"pid": pid}) for pid in (7, 8)]
    state = ResetState(events=[ResetEvent(0.0, "phase", "stopping"), *sent, *gone, ResetEvent(0.4, "verdict", "CLEAN")])
    state.running = True
    shown = text(running_rows(state, 50.0, 60))
    assert "SIGTERM 2: 7 8" in shown
    assert "gone 2: 7 8" in shown
    assert "SIGTERM to 9" in shown
    assert "SIGCONT" not in shown
    assert "50 s" not in shown


def test_a_clean_verdict_is_eight_zeros() -> None:
    rows = verdict_rows(make_receipt("h"), 70)
    assert "CLEAN" in text(rows)
    assert text(rows).count("╭─╮") == 8
    assert "killed 2, in 6.5 s" in text(rows)
    assert "receipts/reset-1.json" in text(rows)


def test_a_verdict_that_is_not_clean_says_why_and_how_to_see_it() -> None:
    receipt = make_receipt("h", NOT_CLEAN, reason="612 MiB left", action="wait", command="nvidia-smi -i 3",
                           used_bytes=Reading(616 * MIB))  # fmt: skip
    receipt.survivors = [Process(41213, 1, user="root", command="python3", reason="in state D")]
    shown = text(verdict_rows(receipt, 60))
    for part in (
        "NOT CLEAN",
        "GPU 3",
        "612 MiB left",
        "do: wait",
        "see it by hand: nvidia-smi -i 3",
        "STILL THERE 1",
        "41213",
    ):
        assert part in shown
    many = verdict_rows(
        replace(receipt, after=[replace(gpu, used_bytes=Reading(99 * GIB)) for gpu in receipt.after]), 60
    )
    assert max(row_width(row) for row in many) <= 60


def test_an_unread_gpu_is_a_question_mark_in_the_verdict() -> None:
    receipt = make_receipt("h", "UNKNOWN", used_bytes=failed("gone"), reason="could not be read")
    assert "╶─╮" in text(verdict_rows(receipt, 70))
    receipt.after[3].baseline_bytes = None
    assert "no baseline is recorded" in text(verdict_rows(receipt, 70))


# --- launch and shards ------------------------------------------------------------------------------------------


def test_a_gate_that_could_not_be_read_is_shut() -> None:
    gates = [Gate("disk", True, "fine"), Gate("shm", None, "not readable", "look")]
    assert not passed(gates)
    assert passed(gates[:1])
    shown = text(gate_rows(gates, 60))
    assert shown.index("unknown") < shown.index(" ok ")
    assert "do: look" in shown


def test_shards_are_in_natural_order_with_folders_first() -> None:
    names = [("data_10.ckpt", "shard"), ("data_9.ckpt", "shard"), ("zz", "folder"), ("Data_1.ckpt", "shard")]
    entries = sort_entries([{"name": name, "kind": kind, "bytes": 1} for name, kind in names])
    assert [entry["name"] for entry in entries] == ["zz", "Data_1.ckpt", "data_9.ckpt", "data_10.ckpt"]
    assert "the list is cut" in text(listing_rows({"truncated": True}, entries, 40))


def test_damage_of_a_shard_is_told_in_words() -> None:
    shard = {
        "path": "/d/data_1.ckpt", "format": "torch zip", "bytes": 100, "tensors": 3, "truncated": True,
        "entries": [{"key": "hidden_state", "shape": [1, 5, 8], "dtype": "bfloat16", "bytes": 80, "whole": False},
                    {"key": "count", "shape": [], "dtype": "int64", "bytes": None}],
        "notes": [{"code": "short", "level": "error", "text": "the file ends 20 bytes early"}],
        "values": [{"key": "step", "text": "7"}],
    }  # fmt: skip
    rows = tensor_rows(shard, 48)
    for part in ("short: the file ends 20 bytes early", "hidden_state", "1×5×8", "bfloat16", "80 B", "scalar", "step = 7",
                 "the first 2 of 3 tensors"):  # fmt: skip
        assert part in text(rows)
    assert styles(rows, "20 bytes early") == {"bad"}
    assert "no tensor can be read" in text(tensor_rows({"path": "x", "entries": []}, 48))
