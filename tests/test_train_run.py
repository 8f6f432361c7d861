"""A training as a run of the host: started, read while it goes, stopped, failed; and the checkpoints that it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import ops, runtree
from backend.agent.ops import Context
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.agent.train.checkpoints import QUIET_S, checkpoints
from backend.config import ConfigError, Stage, parse
from backend.stages import build_spec, requirements
from backend.wire import Progress, Run, plain
from tests.exporting import write_safetensors
from tests.pythons import python38
from tests.runstore import a_store, ended, machine
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = str(Path(__file__).resolve().parent.parent)
TRAINER = """
import os, signal, sys, time
out, gate = sys.argv[1:3]
def end(*_):
    print("saving before the end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("loading", flush=True)
for step in range(1, 5):
    print("step %d: {'loss': %.2f, 'acc_0': 0.%d, 'lr': 1e-05}" % (step, 5.0 - step, step), flush=True)
while not os.path.exists(gate):
    time.sleep(0.02)
word = open(gate).read()
if word == "fail":
    raise SystemExit("RuntimeError: out of memory")
if word == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def here() -> Machine:
    return machine(sys.executable, "-m", "backend.agent.main")


@pytest.fixture
def store(here: Machine, tmp_path: Path) -> Iterator[RunStore]:
    for _ in a_store(tmp_path / "runs"):
        yield RunStore(here, str(tmp_path / "runs"))


def train(here: Machine, store: RunStore, folder: Path, **keys: Any) -> Run:
    """Start a training whose trainer is the script above."""
    (folder / "trainer.py").write_text(TRAINER)
    command = [sys.executable, str(folder / "trainer.py"), str(folder / "out"), str(folder / "gate")]
    stage = Stage(kind="train", command=command, data=str(folder), out=str(folder / "out"), needs=[],
                  env={"PYTHONPATH": ROOT}, **keys)  # fmt: skip
    return ask(here, store, "runs.start", spec=plain(build_spec("train", stage, "train-1")), requirements={})


def ask(here: Machine, store: RunStore, op: str, **args: Any) -> Any:
    return ops.TABLE[op].call(Context(here, store), args)


def at_step(store: RunStore, step: int) -> Progress:
    def there() -> Progress | None:
        run = store.get("train-1")
        assert run is not None
        assert run.state in ("running", "starting"), run
        return run.progress if run.progress is not None and run.progress.steps_done == step else None

    return until(there)


def test_it_is_read_while_it_goes(here: Machine, store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "data_config.json").write_text(json.dumps({"samples": 10, "tokens": 1000}))
    run = train(here, store, tmp_path)
    assert "{agent}" not in run.argv
    progress = at_step(store, 4)
    assert (progress.state, progress.loss, progress.accuracy, progress.learning_rate) == ("running", 1.0, 0.4, 1e-5)
    found = ask(here, store, "train.metrics", id="train-1")
    assert [(point["step"], point["values"]["loss"]) for point in found["train"]] == [
        (1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0),
    ]  # fmt: skip
    (tmp_path / "gate").write_text("go")
    over = ended(store, "train-1")
    assert (over.state, over.exit_code) == ("exited", 0)
    assert over.progress is not None
    assert over.progress.state == "done"
    assert store.log("train-1", 0, 1000)["text"].startswith("loading\nstep 1: {'loss': 4.00"), "as the trainer wrote it"


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("fail", 1, "RuntimeError: out of memory"),
        ("crash", -signal.SIGSEGV, "step 4:"),
    ],
)
def test_it_ends_as_the_trainer_does(
    here: Machine, store: RunStore, tmp_path: Path, word: str, code: int, said: str
) -> None:
    train(here, store, tmp_path)
    at_step(store, 4)
    (tmp_path / "gate").write_text(word)
    over = ended(store, "train-1")
    assert over.exit_code == code
    assert over.progress is not None
    assert over.progress.state == "failed"
    assert said in over.progress.message


def test_a_stop_lets_it_save(here: Machine, store: RunStore, tmp_path: Path) -> None:
    train(here, store, tmp_path)
    at_step(store, 4)
    store.stop("train-1", 20.0)
    over = ended(store, "train-1")
    assert (over.exit_code, over.reason) == (0, "stopped on request")
    assert store.log("train-1", 0, 1000)["text"].count("saving before the end") == 1


def test_a_signal_for_the_watcher_alone_reaches_the_trainer(here: Machine, store: RunStore, tmp_path: Path) -> None:
    run = train(here, store, tmp_path)
    at_step(store, 4)
    assert runtree.signal_process(run.pid, run.pid_start, signal.SIGTERM)
    assert ended(store, "train-1").exit_code == 0
    assert "saving before the end" in store.log("train-1", 0, 1000)["text"]


def test_a_trainer_that_is_not_there(here: Machine, store: RunStore, tmp_path: Path) -> None:
    stage = Stage(kind="train", command=["/no/such/trainer"], data="/d", env={"PYTHONPATH": ROOT})
    ask(here, store, "runs.start", spec=plain(build_spec("train", stage, "train-1")), requirements={})
    over = ended(store, "train-1")
    assert over.exit_code == 127
    assert over.progress is not None
    assert over.progress.message == "/no/such/trainer: No such file or directory"


def test_the_watcher_runs_on_python_3_8(tmp_path: Path) -> None:
    order = json.dumps({"out": str(tmp_path), "data": str(tmp_path)})
    program = "from backend.agent.main import main; import sys; sys.exit(main(sys.argv[1:]))"
    say = "echo \"step 7: {'loss': nan}\" > $EIGHTZEROS_RUN_DIR/log"
    words = [python38(), "-c", program, "train", order, "sh", "-c", say]
    env = {**os.environ, "EIGHTZEROS_RUN_DIR": str(tmp_path), "PYTHONPATH": ROOT}
    assert subprocess.run(words, env=env, check=False, timeout=60).returncode == 0
    progress = json.loads((tmp_path / "progress.json").read_bytes())
    assert (progress["steps_done"], progress["loss"], progress["message"]) == (7, None, "the loss is nan since step 7")


# --- checkpoints -----------------------------------------------------------------------------------------------------


def weights(path: Path, values: int = 64) -> Path:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, {"w": ("F32", np.ones(values, np.float32))})
    return path


def old(path: Path, age_s: float = 3600.0) -> None:
    for file in [*path.iterdir(), path]:
        os.utime(file, (time.time() - age_s, time.time() - age_s))


def test_checkpoints_are_listed_the_newest_first(tmp_path: Path) -> None:
    for step in (500, 1000):
        weights(tmp_path / f"run-step{step}" / "model.safetensors")
        old(tmp_path / f"run-step{step}", 3600.0 - step)
    weights(tmp_path / "7" / "model.safetensors")
    (tmp_path / "7" / "training_state.json").write_text('{"epoch": 7, "local_step": 0, "global_step": 1234}')
    (tmp_path / "run-latest").symlink_to("run-step1000")
    (tmp_path / "logs").mkdir()
    found = checkpoints(str(tmp_path))
    assert [(one["name"], one["step"], one["epoch"], one["state"]) for one in found] == [
        ("7", 1234, 7, "whole"), ("run-step1000", 1000, None, "whole"), ("run-step500", 500, None, "whole"),
    ]  # fmt: skip
    assert found[1]["bytes"] == (tmp_path / "run-step1000" / "model.safetensors").stat().st_size
    assert checkpoints(str(tmp_path / "none")) == []


def test_a_torn_checkpoint_says_why(tmp_path: Path) -> None:
    cut = weights(tmp_path / "1" / "model.safetensors")
    cut.write_bytes(cut.read_bytes()[:-1])
    weights(tmp_path / "2" / "model.safetensors")
    (tmp_path / "2" / "optimizer.pt").write_bytes(b"")
    weights(tmp_path / "3" / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (tmp_path / "3" / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(tmp_path / "4" / "training_state.pt.tmp")
    for name in "1234":
        old(tmp_path / name)
    found = {one["name"]: one for one in checkpoints(str(tmp_path))}
    assert {one["state"] for one in found.values()} == {"torn"}
    assert "model.safetensors: " in found["1"]["why"]
    assert found["2"]["why"].startswith("optimizer.pt: ")
    assert found["3"]["why"] == "model-00002-of-00002.safetensors is missing"
    assert found["4"]["why"] == "training_state.pt.tmp was never renamed to its name"
    just = time.time() - 3600 + QUIET_S / 2
    assert {one["state"] for one in checkpoints(str(tmp_path), just)} == {"writing"}


# --- the stage -------------------------------------------------------------------------------------------------------

TOML = """
[stages.forge]
kind = "train"
trainer = "specforge"
python = "/opt/specforge/bin/python"
model = "/models/K"
data = "/data/states"
out = "/data/draft"
config = "/data/eagle3.yaml"
gpus = 8
max_steps = 9000
arguments = ["training.log_interval=10"]
[stages.spec]
kind = "train"
trainer = "speculators"
python = "/opt/speculators/bin/python"
model = "/models/K"
data = "/data/export"
out = "/data/draft"
points = [30, 3, 59]
gpus = 8
epochs = 3
env = { HF_HUB_OFFLINE = "1" }
"""


def test_the_trainers_words_are_built() -> None:
    stages = parse(TOML, "x").stages
    forge = build_spec("forge", stages["forge"], "1")
    assert forge.argv[:2] == ["{agent}", "train"]
    assert json.loads(forge.argv[2]) == {"out": "/data/draft", "data": "/data/states", "max_steps": 9000, "epochs": 0}
    assert forge.argv[3:] == [
        "/opt/specforge/bin/python", "-m", "specforge.cli", "train", "--config", "/data/eagle3.yaml",
        "model.target_model_path=/models/K", "data.hidden_states_path=/data/states", "output_dir=/data/draft",
        "deployment.trainer.nproc_per_node=8", "training.max_steps=9000", "training.log_interval=10",
    ]  # fmt: skip
    assert (forge.out_dir, forge.grace_s, forge.env) == ("/data/draft", 120.0, {})
    spec = build_spec("spec", stages["spec"], "1")
    assert spec.argv[3:] == [
        "/opt/speculators/bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8",
        "-m", "speculators.train", "--verifier-name-or-path", "/models/K", "--data-path", "/data/export",
        "--save-path", "/data/draft", "--on-missing", "raise", "--target-layer-ids", "3", "30", "59", "--epochs", "3",
    ]  # fmt: skip
    assert spec.env == {"COLUMNS": "240", "HF_HUB_OFFLINE": "1"}


def test_what_a_training_needs() -> None:
    stages = parse(TOML, "x").stages
    needs = requirements(stages["forge"], "forge")
    assert (needs["python"], needs["modules"]) == ("/opt/specforge/bin/python", ["torch", "specforge>=0.2"])
    assert (needs["clean_gpus"], needs["audited"], needs["model"]) == (True, "/data/states", "/models/K")
    assert needs["paths"] == ["/data/states", "/data/eagle3.yaml"]
    assert needs["others"] == {"stage": "forge", "out": "/data/draft"}
    assert requirements(stages["spec"], "spec")["modules"][-1] == "speculators>=0.9"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("data = '/d'", "needs `trainer` (\"specforge\" or \"speculators\"), or a `command` of your own"),
        ("data = '/d'\ncommand = ['t']\ngpus = 8", "only a training with `trainer` has this; say it in `command`"),
        ("data = '/d'\ntrainer = 'speculators'\nmodel = '/m'", "needs `out`"),
        ("data = '/d'\ntrainer = 'specforge'\nmodel = '/m'\nout = '/o'", "needs `config`"),
        ("data = '/d'\ntrainer = 'specforge'\nmodel = '/m'\nout = '/o'\nconfig = '/c'\npoints = [2]", "leave this out"),
        ("data = '/d'\ntrainer = 'specforge'\ncommand = ['t']", "the command of specforge is built in"),
        ("trainer = 'specforge'\nmodel = '/m'\nout = '/o'\nconfig = '/c'", "needs `data`"),
    ],
)  # fmt: skip
def test_mistakes_are_named(lines: str, said: str) -> None:
    with pytest.raises(ConfigError, match="x:") as raised:
        parse(f"[stages.t]\nkind = 'train'\n{lines}\n", "x")
    assert said in str(raised.value)
