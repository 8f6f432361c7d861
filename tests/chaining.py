"""Chains for tests: a virtual host of two GPUs without SSH, whose state is this test's own HOME; the runs are real."""

from __future__ import annotations

import io
import signal
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.agent import procfs, runtree
from backend.agent.ops import TABLE, Context
from backend.agent.paths import state_dir
from backend.agent.pipeline.standing import standing
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.config import Config, Host, Stage
from backend.link import pack_extractor
from backend.stages import EXTRACTOR, chain_order, chain_spec
from backend.virtual.claims import lay_out
from backend.virtual.corpus import write_corpus
from backend.virtual.driver import VirtualDevices, VirtualDriver
from backend.wire import RUN_ENDED, Pipeline, Run, plain
from tests.runstore import kill_all
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).resolve().parent.parent
GPUS = 2
PYTHON = {"PYTHONPATH": str(CHECKOUT)}


class ChainHost:
    """A host on which chains run. `stages` are those of its configuration."""

    def __init__(self, folder: Path, stages: dict[str, Stage] | None = None) -> None:
        self.folder, self.root = folder, folder / "gpus"
        self.stages = stages or {}
        lay_out(str(self.root), GPUS)
        words = [sys.executable, "-m", "backend.virtual.agent", str(self.root)]
        self.machine = Machine(
            partial(VirtualDriver, str(self.root)), partial(VirtualDevices, str(self.root)), words, virtual=True
        )
        self.store = RunStore(self.machine)
        self._extractor = ""

    def run(self, start: str = "", forced: str = "", chain: list[str] | None = None) -> str:
        """Start the chain and return its id."""
        config = Config(hosts={"here": Host(chain=chain or [])}, stages=self.stages)
        order = chain_order(config, "here", start, {"accept_limited": True, "cuda_test": False}, forced)
        for step in order["steps"]:
            argv = step.get("spec", {}).get("argv", [])
            step.setdefault("spec", {})["argv"] = [self.extractor if word == EXTRACTOR else word for word in argv]
        spec = chain_spec(order, f"pipeline-{len(list(self.store.list()))}")
        self.ask("runs.start", spec=plain(spec), requirements={"others": {"stage": ""}})
        return spec.id

    def ask(self, op: str, **args: Any) -> Any:
        """Ask as a console would."""
        return TABLE[op].call(Context(self.machine, RunStore(self.machine)), args)

    @property
    def extractor(self) -> str:
        """Return the folder of the extractor, unpacked as on a host."""
        if not self._extractor:
            place = self.folder / "extractor"
            zipfile.ZipFile(io.BytesIO(pack_extractor().data)).extractall(place)
            self._extractor = str(place)
        return self._extractor

    def standing(self, chain_id: str) -> Pipeline:
        """Return how a chain stands, read anew."""
        return standing(RunStore(self.machine), chain_id)

    def ended(self, chain_id: str, timeout_s: float = 60.0) -> Pipeline:
        """Wait for the end of a chain's driver and return how it stands."""
        until(lambda: (run := self.store.get(chain_id)) is not None and run.state in RUN_ENDED, timeout_s, 0.05)
        return self.standing(chain_id)

    def at(self, chain_id: str, step: str, state: str = "running", timeout_s: float = 40.0) -> Run:
        """Wait until a step is in a state and return its run."""

        def there() -> str:
            stands = self.standing(chain_id)
            found = next((one for one in stands.steps if one.name == step), None)
            assert stands.state == "running" and (found is None or found.state != "failed"), stands
            return found.run_id if found is not None and found.state == state else ""

        run = self.store.get(until(there, timeout_s))
        assert run is not None
        return run

    def states(self, chain_id: str) -> dict[str, str]:
        """Return each step's state."""
        return {step.name: step.state for step in self.standing(chain_id).steps}

    def log(self, chain_id: str) -> str:
        """Return a run's log."""
        return str(self.store.log(chain_id, 0, 40_000)["text"])

    def record(self, run_id: str, name: str) -> Path:
        """Return a file of a run's folder."""
        return Path(state_dir("runs")) / run_id / name

    def close(self) -> None:
        """Leave nothing behind."""
        for run in sorted(self.store.list(), key=lambda run: run.stage != "pipeline"):
            kill_all(self.store, run)


def signal_run(run: Run, number: int = signal.SIGKILL) -> None:
    """Signal a run's main process by identity."""
    assert runtree.signal_process(run.pid, run.pid_start, number)


def kill_supervisor(run: Run) -> None:
    """Kill the process that holds a run."""
    assert runtree.signal_process(run.supervisor_pid, run.supervisor_start, signal.SIGKILL)
    until(lambda: not procfs.alive(run.supervisor_pid, run.supervisor_start))


def shell(script: str, **keys: Any) -> Stage:
    """Make a stage that runs a shell script."""
    return Stage(command=["sh", "-c", script], **keys)


def serving(root: Path, **keys: Any) -> Stage:
    """Make a service that holds every GPU and says that it is ready."""
    words = [sys.executable, "-m", "backend.virtual.holder", "--root", str(root), "--gpus", f"0-{GPUS - 1}",
             "--per-gpu", "--gib", "60", "--release-ms", "50"]  # fmt: skip
    return Stage(command=words, env=PYTHON, service=True, needs=["clean-gpus"], grace_s=5.0, **keys)


def whole_chain(host: ChainHost, samples: int, tokens: int, wrap: Callable[[Stage], Stage] = lambda it: it) -> None:
    """Give the host the chain of the design: prepare, serve, extract, audit, train."""
    data = host.folder / "data"
    data.mkdir()
    write_corpus(data / "raw.jsonl", samples, tokens)
    states = str(data / "states")
    train = shell(f"echo step 1; sleep 1; echo trained > {data}/model").command
    host.stages = {
        "prepare": Stage(kind="prepare", python=sys.executable, datasets=[str(data / "raw.jsonl")],
                         out=str(data / "corpus"), arguments=["--vocab-size", "4096"]),
        "serve": serving(host.root),
        "extract": Stage(kind="extract", python=sys.executable, corpus=str(data / "corpus" / "corpus.jsonl"),
                         out=states),
        "audit": Stage(kind="audit", folder=states, deep=True),
        "train": Stage(kind="train", command=train, data=states, outputs=[str(data / "model")]),
    }  # fmt: skip
    host.stages = {name: wrap(stage) for name, stage in host.stages.items()}
