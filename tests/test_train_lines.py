"""What is read out of what trainers print: kept outputs of theirs, cut anywhere, and lines that are not theirs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from backend.agent.train import metrics
from backend.agent.train.lines import Bar, Reader
from backend.agent.train.metrics import MetricsFile, Update
from backend.agent.train.pace import STUCK_STEPS, Pace
from backend.wire import Progress

LOGS = Path(__file__).parent / "cases" / "trainer_logs"


def lines(name: str) -> list[str]:
    return re.split("[\r\n]", (LOGS / name).read_bytes().decode())


def read(lines_of: list[str]) -> tuple[Reader, list[Update]]:
    reader, found = Reader(), []
    for line in lines_of:
        found += reader.take(line)
    return reader, found + reader.end()


def merged(found: list[Update]) -> dict[tuple[str, int], dict[str, Any]]:
    result: dict[tuple[str, int], dict[str, Any]] = {}
    for kind, step, values in found:
        result.setdefault((kind, step), {}).update(values)
    return result


def test_the_older_specforge_with_bars_positions_nan_and_a_line_cut_short() -> None:
    reader, found = read(lines("specforge_legacy.log"))
    steps = merged(found)
    assert list(steps) == [("eval", 600), ("train", 610), ("train", 620), ("train", 640), ("train", 630)]
    assert steps["eval", 600] == {
        "accuracy/0": 0.73, "accuracy/1": 0.64, "accuracy/2": 0.58, "acceptance/0": 0.64, "acceptance/1": 0.6,
        "acceptance/2": 0.54, "loss/0": 1.2, "loss/1": 1.6, "loss/2": 2.1,
    }  # fmt: skip
    assert steps["train", 610] == {"loss": 8.75, "accuracy": 0.0, "learning_rate": 1.0000000000000002e-06,
                                   "samples_per_s": 4.5}  # fmt: skip
    assert steps["train", 620] == {"loss": "nan", "accuracy": 0.0, "grad_norm": "inf", "learning_rate": 2e-06}
    assert steps["train", 640] == {"loss": 2.25, "accuracy/0": 0.62, "accuracy/1": 0.51, "accuracy/2": 0.43,
                                   "accuracy": 0.62}  # fmt: skip
    # The bar of the generator is none of a training, and the third of this one is cut short.
    assert reader.bar == Bar(0, 150, 2400, {"loss": 0.0, "accuracy": 0.0})


def test_specforge() -> None:
    _, found = read(lines("specforge_0.2.log"))
    assert [(one.kind, one.step) for one in found] == [("train", step) for step in (2, 4, 6, 8, 10, 12)]
    last = found[-1].values
    assert (last["loss"], last["accuracy"], last["learning_rate"]) == (0.8134521842002869, 0.0, 0.0)
    assert (last["loss/2"], last["acceptance/0"]) == (0.3323575556278229, 0.01829289272427559)
    assert (last["samples_per_s"], last["step_s"]) == (0.6593721103763336, 1.5165943239990156)
    assert found[0].values["accuracy"] == found[0].values["accuracy/0"], "of the first token, not the mean of all"


def test_an_evaluation_of_specforge() -> None:
    said = "step 9: {'eval/avg_loss': 1.5, 'eval/avg_acc': 0.5, 'eval/per_position_acc': [0.5, 0.25], 'loss': 2.0}"
    _, found = read([said])
    assert found == [
        Update("train", 9, {"loss": 2.0}),
        Update("eval", 9, {"loss": 1.5, "accuracy": 0.5, "accuracy/0": 0.5, "accuracy/1": 0.25}),
    ]


def test_speculators_breaks_every_step_over_twenty_lines() -> None:
    reader, found = read(lines("speculators_0.9_80_columns.log"))
    assert [(one.kind, one.step) for one in found] == [
        *[("train", step) for step in range(1, 13)], ("eval", 12), ("train", 13), ("eval", 13),
    ]  # fmt: skip
    assert found[0].values == {
        "loss": 38.863, "accuracy": 0.0, "learning_rate": 0.001, "tokens_per_s": 987.904, "epoch": 0.0,
        **{f"loss/{at}": loss for at, loss in enumerate((13.192, 13.081, 12.59))},
        **{f"{name}/{at}": 0.0 for name in ("accuracy", "accuracy_given") for at in range(3)},
    }  # fmt: skip
    assert (found[12].values["loss"], found[12].values["accuracy/0"]) == (38.053, 0.002)
    assert (reader.epochs, reader.epoch_steps) == (2, 6)


def test_a_step_of_speculators_is_known_at_its_last_line() -> None:
    reader = Reader()
    kept = lines("speculators_0.9_80_columns.log")
    end = next(at for at, line in enumerate(kept) if "global_step=0" in line)
    found = [update for line in kept[: end + 1] for update in reader.take(line)]
    assert [one.step for one in found] == [1]


@pytest.mark.parametrize("rank", ["[rank0]: ", "[default0]:", "[0]:"])
def test_what_a_launcher_puts_before_a_line(rank: str) -> None:
    assert read([rank + "step 3: {'loss': 1.0}"])[1] == [Update("train", 3, {"loss": 1.0})]


@pytest.mark.parametrize("line", [
    "step 3: {'loss': 1.0", "step 3: {}", "step 3: {'loss': tensor(1.)}", "step x: {'loss': 1.0}",
    "a step 3: {'loss': 1}",
    "Eval - Step 5 [6/1], position 0,  Acc: 0.", "Eval - Step 5 [6/1], position 0,  Acc: nothing",
    "Training Epoch 0:   6%|x| 155/0 [07:45]", "Epoch 1: warming up", "loss=1.0, acc=2",
])  # fmt: skip
def test_a_line_that_says_nothing(line: str) -> None:
    reader, found = read([line])
    assert reader.bar is None
    assert found == [] or line.endswith("Acc: 0."), "a number that is cut after its point is still this number"


def test_no_line_is_too_odd() -> None:
    chance = random.Random(4)
    pieces = [line for path in LOGS.iterdir() for line in lines(path.name)]
    reader = Reader()
    for _ in range(20_000):
        line = chance.choice(pieces)
        at, end = sorted(chance.randrange(len(line) + 1) for _ in range(2))
        odd = line[at:end] + chance.choice(("", "\x00", "é", "{", "nan", "=", "[" * 50)) + chance.choice(pieces)[:end]
        for update in reader.take(odd):
            assert update.kind in ("train", "eval") and update.step >= 0
            json.dumps(update.values, allow_nan=False)


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_holds_what_was_said_and_survives_a_torn_line(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path))
    file.add(5.0, [Update("train", 1, {"loss": 2.0}), Update("train", 1, {"accuracy": 0.5})])
    with (tmp_path / metrics.METRICS).open("a") as torn:
        torn.write('{"kind": "train", "st\n')
    file.add(6.0, [Update("train", 3, {"loss": "nan"}), Update("eval", 3, {"loss": 1.5})])
    file.add(7.0, [Update("train", 2, {"loss": 1.0})])  # it went back to a checkpoint
    found = metrics.read(str(tmp_path))
    assert found["train"] == [
        {"at": 5.0, "step": 1, "values": {"loss": 2.0, "accuracy": 0.5}},
        {"at": 7.0, "step": 2, "values": {"loss": 1.0}},
        {"at": 6.0, "step": 3, "values": {"loss": "nan"}},
    ]
    assert (found["eval"][0]["values"], found["points"]) == ({"loss": 1.5}, {"train": 3, "eval": 1})
    assert metrics.read(str(tmp_path / "none"))["train"] == []


def test_a_long_training_is_thinned_to_an_answer_of_the_wire(tmp_path: Path) -> None:
    values: dict[str, float | str] = {f"{name}/{at}": 0.123456789 for name in ("loss", "accuracy") for at in range(7)}
    updates = [Update("train", step, {**values, "loss": float(step)}) for step in range(1, 5001)]
    updates[2499] = Update("train", 2500, {"loss": "inf"})
    MetricsFile(str(tmp_path)).add(1.0, updates)
    found = metrics.read(str(tmp_path))
    points = found["train"]
    assert (len(points), points[-1]["step"], found["points"]["train"]) == (metrics.MOST_POINTS, 5000, 5000)
    assert points[0]["values"]["loss"] == pytest.approx((1 + 8) / 2, abs=0.6)
    assert [point["values"]["loss"] for point in points].count("inf") == 1, "one bad step is not averaged away"
    assert len(json.dumps(found)) < 256 * 1024


def test_a_full_disk_is_told_and_forgotten_once_there_is_room(tmp_path: Path) -> None:
    (tmp_path / metrics.METRICS).symlink_to("/dev/full")
    file = MetricsFile(str(tmp_path))
    file.add(1.0, [Update("train", 1, {})])
    assert file.problem == "its metrics cannot be kept: No space left on device"
    (tmp_path / metrics.METRICS).unlink()
    file.add(2.0, [Update("train", 2, {"loss": 1.0})])
    assert (file.problem, len(metrics.read(str(tmp_path))["train"])) == ("", 1)


# --- the pace --------------------------------------------------------------------------------------------------------


def progress(pace: Pace, reader: Reader | None = None) -> Progress:
    return pace.progress("running", reader or Reader(), [])


def test_rate_and_end_by_steps() -> None:
    pace = Pace({"max_steps": 100})
    for step in range(10, 60, 10):
        pace.take(1000.0 + 2 * step, [Update("train", step, {"loss": 3.0, "accuracy": 0.25, "learning_rate": 1e-4})])
    found = progress(pace)
    assert (found.steps_done, found.steps_total, found.steps_per_s, found.eta_s()) == (50, 100, 0.5, 100.0)
    assert (found.loss, found.accuracy, found.learning_rate, found.advanced_at) == (3.0, 0.25, 1e-4, 1100.0)


def test_the_total_of_specforge_follows_from_its_samples() -> None:
    pace = Pace({"epochs": 2, "samples": 400, "tokens": 40_000})
    pace.take(1.0, [Update("train", 10, {"samples_per_s": 8.0, "step_s": 0.5})])
    found = progress(pace)
    assert (found.steps_total, found.steps_per_s, found.tokens_per_s) == (200, 2.0, 800.0)
    assert progress(Pace({"samples": 400})).steps_total == 0, "nobody says how many epochs"


def test_what_is_wrong_with_the_numbers_is_said() -> None:
    pace = Pace({})
    pace.take(1.0, [Update("train", 20, {"loss": "nan", "accuracy": 0.0, "grad_norm": "inf"})])
    pace.take(2.0, [Update("train", 21, {"loss": "nan", "grad_norm": 1.0})])
    assert progress(pace).message == "the loss is nan since step 20"
    assert progress(pace).loss is None
    pace.take(3.0, [Update("train", 22, {"loss": 2.0})])
    assert progress(pace).message == ""
    stuck = Pace({})
    for step in range(1, STUCK_STEPS + 2):
        assert stuck.warnings() == []
        stuck.take_bar(float(step), Bar(0, step, 900, {"loss": 0.0, "accuracy": 0.0}))
    assert progress(stuck).message.startswith("loss and accuracy are 0 since step 1: is the loss mask empty")
    stuck.take(99.0, [Update("train", 60, {"loss": 1.0, "accuracy": 0.0})])
    assert stuck.warnings() == []


def test_a_training_that_goes_back_to_a_checkpoint() -> None:
    pace = Pace({})
    for at, step in ((1.0, 90), (2.0, 91), (3.0, 50), (4.0, 52)):
        pace.take(at, [Update("train", step, {"loss": 1.0})])
    assert (progress(pace).steps_done, progress(pace).steps_per_s) == (52, 2.0)
