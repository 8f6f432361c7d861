"""Runs, resets, launches and shards as rows."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from backend.config import Thresholds
from backend.fleet import ResetState
from backend.wire import (
    GIB,
    MIB,
    NOT_CLEAN,
    Gate,
    Process,
    Progress,
    Reading,
    ResetEvent,
    failed,
)
from tests.fakefleet import FakeFleet, make_plan, make_progress, make_receipt, make_run
from tests.rowtext import busy_fleet, styles, text
from tui.shardtree import ShardTree
from tui.widgets.histogram import histogram_rows
from tui.widgets.launch_rows import gate_rows, passed
from tui.widgets.plan_rows import gpu_list, plan_rows
from tui.widgets.reset_rows import running_rows, verdict_rows
from tui.widgets.rows import row_width
from tui.widgets.run_rows import progress_rows, rail_row, stage_states
from tui.widgets.shard_rows import shard_rows, tree_row

LIMITS = Thresholds()


@pytest.fixture
def fleet() -> FakeFleet:
    return busy_fleet()


@pytest.fixture
def host(fleet: FakeFleet):
    return fleet.hosts["gpu-01"]


# --- runs -------------------------------------------------------------------------------------------------------


def band(host, run, width: int = 78):
    return progress_rows((host, run), width, LIMITS, time.time())


def test_the_band_shows_how_far_and_when_it_ends(host) -> None:
    run = make_run("extract-1", "extract", progress=make_progress())
    shown = text(band(host, run))
    for part in ("RUNNING", "43.2% of the tokens", "4,320 / 10,000 samples", "1.5 samples/s", "2.4k tok/s",
                 "in 1 h 08 min",
                 "399 GiB written", "0.14 GB/s", "2.10 TiB disk left, lasts"):  # fmt: skip
        assert part in shown
    assert {row_width(row) for row in band(host, run)} == {78}


def test_a_server_is_ready_and_shows_its_staging(host) -> None:
    progress = Progress(time.time(), "ready", message="http://127.0.0.1:30000: points 3 31 59 on 8 ranks",
                        staging_bytes=GIB, staging_high_bytes=3 * GIB, staging_bound_bytes=8 * GIB)  # fmt: skip
    rows = band(host, make_run("serve-1", "serve", progress=progress))
    for part in ("READY", "points 3 31 59 on 8 ranks", "staging 1 GiB of 8 GiB, at most 3 GiB"):
        assert part in text(rows)
    assert "samples" not in text(rows) and {row_width(row) for row in rows} == {78}


def test_a_training_shows_its_step_its_loss_and_when_it_ends(host) -> None:
    now = time.time()
    progress = Progress(at=now, state="running", steps_done=400, steps_total=1000, steps_per_s=0.5, loss=1.8125,
                        accuracy=0.625, learning_rate=1e-4, tokens_per_s=21_000.0, advanced_at=now,
                        shard="draft-step400")  # fmt: skip
    run = make_run("train-1", "train", progress=progress)
    rows = text(band(host, run, 110)).split("\n")
    assert "40.0% of the steps" in rows[1]
    assert "step 400 / 1,000   loss 1.812  acc 62.5 %  lr 0.0001" in rows[2] and "in 20 min" in rows[2]
    assert "newest checkpoint draft-step400" in rows[3]
    spoiled = replace(run, progress=replace(progress, loss=None, message="the loss is nan since step 390"))
    rows = text(band(host, spoiled)).split("\n")
    assert "loss" not in rows[2] and rows[3].startswith("the loss is nan since step 390")


def test_a_run_without_a_total_has_no_eta(host) -> None:
    progress = replace(make_progress(), samples_total=0, tokens_total=0, bytes_total=0)
    shown = text(band(host, make_run("adopt-1", "adopt", progress=progress)))
    assert "4,320 samples" in shown and "no total, no ETA" in shown


def test_a_run_that_stands_still_is_marked(host) -> None:
    progress = make_progress(advanced_at=time.time() - 380, tokens_per_s=0.0)
    rows = band(host, make_run("e", "extract", progress=progress))
    assert "STALLED 6 min" in text(rows)
    assert "no ETA: nothing moves" in text(rows)


def test_a_disk_that_will_fill_says_when(host) -> None:
    progress = make_progress(disk_free_bytes=20 * GIB)
    shown = text(band(host, make_run("e", "extract", progress=progress), 119))
    assert "20 GiB disk left, too little for the rest, full in 3 min" in shown


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
    for part in ("KILLS 2 processes", "41210      root", "373 GiB", "5 h 12 min", "0, 2, 4, 6", "TERM, 15 s, KILL",
                 "holds 4 GPUs",
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
    assert "612 MiB of 900 MiB" in text(rows)


def test_signals_are_told_by_kind_and_only_odd_errors_stand_out() -> None:
    sent = [ResetEvent(0.1, "signal", f"{name} to {pid}", {"pid": pid, "signal": name, "errno": code})
            for name, pid, code in (("SIGTERM", 7, 0), ("SIGCONT", 7, 3), ("SIGTERM", 8, 0), ("SIGTERM", 9, 1))
            ]  # fmt: skip
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


def test_a_growing_folder_stays_in_natural_order_with_its_sums() -> None:
    tree = ShardTree("/d")
    page = [{"name": name, "kind": kind, "bytes": 1} for name, kind in (("zz", "folder"), ("data_9.ckpt", "shard"))]
    tree.take("", {"entries": page, "total": 3, "next": 2})
    assert "1+" in text([tree_row(tree, tree.lines[0], 40)]).replace(" ", "").replace("B", "")
    tree.take("", {"entries": [{"name": "data_10.ckpt", "kind": "shard", "bytes": 5}], "total": 3, "next": None})
    late = [{"name": "Data_1.ckpt", "kind": "shard", "bytes": 2}, {"name": "data_9.ckpt", "kind": "shard", "bytes": 4}]
    assert tree.grow("", {"entries": late}) and not tree.grow("", {"entries": late})
    names = [tree.entry(line)["name"] for line in tree.lines]
    assert names == ["", "zz", "Data_1.ckpt", "data_9.ckpt", "data_10.ckpt"]
    assert tree.sums("") == (3, 11, True)
    assert tree.find("data_10.ckpt") == 4 and tree.find("none") is None
    tree.grow("", {"entries": [{"name": ".data_11.ckpt.tmp", "kind": "other", "bytes": 1}]})
    assert tree.find(".data_11.ckpt.tmp") is not None
    tree.grow("", {"entries": [{"name": "data_11.ckpt", "kind": "shard", "bytes": 1}]})
    assert tree.find(".data_11.ckpt.tmp") is None and tree.find("data_11.ckpt") == 5, "it has its name now"


def test_an_outlier_is_never_lost_in_a_histogram() -> None:
    rows = histogram_rows([1_000_000, 0, 0, 1], ("-1", "9"), 40, 4)
    assert len(rows) == 6 and "1,000,000" in text(rows[:1])
    bars = text(rows[3:4]).split("│")[1]
    assert bars.startswith("█") and bars.rstrip().endswith("▁") and " " in bars.strip("█▁")
    assert text(rows[5:]).split()[0] == "-1" and text(rows[5:]).split()[-1] == "9"
    assert histogram_rows([], ("", ""), 40, 4) == []


def test_damage_of_a_shard_is_told_in_words() -> None:
    shard = {
        "path": "/d/data_1.ckpt", "format": "torch zip", "bytes": 100, "tensors": 3, "truncated": True,
        "entries": [{"key": "hidden_state", "shape": [1, 5, 8], "dtype": "bfloat16", "bytes": 80, "whole": False},
                    {"key": "count", "shape": [], "dtype": "int64", "bytes": None}],
        "notes": [{"code": "short", "level": "error", "text": "the file ends 20 bytes early"}],
        "values": [{"key": "step", "text": "7"}],
    }  # fmt: skip
    rows, _ = shard_rows(shard, 60)
    for part in ("short: the file ends 20 bytes early", "hidden_state", "1×5×8", "bf16", "80 B", "scalar", "CUT",
                 "step = 7", "DAMAGED",
                 "the first 2 of 3 tensors"):  # fmt: skip
        assert part in text(rows)
    assert styles(rows, "20 bytes early") == {"bad"}
    assert "no tensor can be read" in text(shard_rows({"path": "x", "entries": []}, 48)[0])
