"""The audit as a detached run: by the agent's operations, as a stage of the configuration, and by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from backend import config as configuration
from backend.agent import ops
from backend.agent.ops import Context
from backend.agent.runs import RunStore
from backend.agent.shards.audit import results
from backend.agent.shards.audit.faults import Faults
from backend.agent.shards.audit.pool import Pool, Task
from backend.stages import build_spec, requirements
from backend.wire import AGENT, Progress, Refused, plain
from tests.auditing import age, write
from tests.nvml.double import NvmlDouble
from tests.pythons import python38
from tests.runstore import a_store, ended, machine
from tests.waiting import until
from tui.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGE = """
[stages.audit]
kind = "audit"
folder = "/data/states"
corpus = "/data/corpus.jsonl"
deep = true
max_tokens = 8192
quarantine = "/data/bad"
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield from a_store(tmp_path / "runs")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Make five good files and a cut one."""
    for index in range(6):
        write(tmp_path / "shards", index)
    path = tmp_path / "shards/rows_0-2000/data_5.ckpt"
    path.write_bytes(path.read_bytes()[:-1])
    age(path)
    return tmp_path / "shards"


def ask(store: RunStore, op: str, **args: Any) -> Any:
    agent = machine(sys.executable, "-m", "backend.agent.main")
    return ops.TABLE[op].call(Context(agent, store), args)


def test_the_stage_becomes_a_run_of_the_agent_s_own_program() -> None:
    stage = configuration.parse(STAGE, "ez.toml").stages["audit"]
    spec = build_spec("audit", stage, "a-1", roots=["/data"])
    assert spec.argv[:3] == [AGENT, "audit", "/data/states"] and spec.argv[-2:] == ["--root", "/data"]
    assert {"--deep", "--corpus", "--max-tokens", "--quarantine"} <= set(spec.argv)
    needs = requirements(stage)
    assert (needs["paths"], needs["python"], needs["modules"]) == (["/data/states", "/data/corpus.jsonl"], "", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STAGE.replace("folder", "# folder"), 'a stage of kind = "audit" needs `folder`'),
        (STAGE + "tp = 8\n", "ez.toml:9: stages.audit.tp: only a stage of kind"),
        (STAGE + "out = 3\n", "ez.toml:9: stages.audit.out"),
        ("[stages.x]\ncommand = ['a']\ndeep = true\n", 'ez.toml:3: stages.x.deep: only a stage of kind = "audit"'),
    ],
)
def test_what_is_wrong_with_a_stage_is_said(text: str, said: str) -> None:
    with pytest.raises(configuration.ConfigError) as caught:
        configuration.parse(text, "ez.toml")
    assert said in str(caught.value)


def test_a_detached_audit_tells_how_far_it_is_and_leaves_its_findings(store: RunStore, shards: Path) -> None:
    stage = configuration.Stage(kind="audit", folder=str(shards))
    spec = build_spec("audit", stage, "audit-1", roots=[str(shards.parent)])
    ask(store, "runs.start", spec=plain(spec), requirements=requirements(stage))
    run = ended(store, "audit-1")
    assert run.exit_code == 1 and AGENT not in run.argv
    progress = run.progress
    assert progress is not None
    assert (progress.state, progress.samples_done, progress.samples_total) == ("done", 6, 6)
    assert progress.samples_failed == 1 and "1 faults in 1 files" in progress.message
    summary = ask(store, "audits.get", id="audit-1")
    assert (summary["files"], summary["faults"]["truncated"]["count"]) == (6, 1)
    page = ask(store, "audits.faults", id="audit-1", code="truncated")
    assert [fault["path"] for fault in page["faults"]] == ["rows_0-2000/data_5.ckpt"] and page["next"] is None
    with pytest.raises(Refused):
        ask(store, "audits.get", id="nothing-1")


def test_an_audit_stays_inside_the_roots(store: RunStore, shards: Path) -> None:
    stage = configuration.Stage(kind="audit", folder=str(shards))
    spec = build_spec("audit", stage, "audit-2", roots=["/usr"])
    ask(store, "runs.start", spec=plain(spec), requirements={})
    assert ended(store, "audit-2").exit_code == 2
    until(lambda: "outside the configured roots" in store.log("audit-2", 0, 4000)["text"])


def test_findings_come_in_pages_that_fit_a_message(tmp_path: Path) -> None:
    faults = Faults()
    for number in range(3000):
        faults.add("truncated" if number % 3 else "sparse", "x" * 200, f"data_{number}.ckpt", number)
    results.write(str(tmp_path), {"files": 3000}, faults)
    for code, total in (("", 3000), ("sparse", 1000)):
        seen: list[Any] = []
        offset, pages = 0, 0
        while offset is not None:
            page = results.page(str(tmp_path), offset, code)
            assert len(json.dumps(page)) < 250_000
            seen, offset, pages = seen + page["faults"], page["next"], pages + 1
        assert len(seen) == total == len({fault["sample"] for fault in seen}) and pages > 1


def test_what_is_found_so_far_is_told_as_it_comes(tmp_path: Path) -> None:
    found, faults = results.Found(str(tmp_path)), Faults()
    assert results.page(str(tmp_path), 0, "") == {"faults": [], "next": None, "at": 0, "live": True}
    faults.add("truncated", "cut", "data_1.ckpt", 1)
    found.add(faults)
    first = results.page(str(tmp_path), 0, "")
    assert [fault["sample"] for fault in first["faults"]] == [1] and first["live"] and first["next"] is None
    found.add(faults)
    with (tmp_path / results.FOUND_NAME).open("ab") as file:
        file.write(b'{"code": "torn')
    again = results.page(str(tmp_path), first["at"], "")
    assert len(again["faults"]) == 1 and results.page(str(tmp_path), again["at"], "")["faults"] == []
    found.close()
    results.write(str(tmp_path), {"files": 1}, faults)
    assert not results.page(str(tmp_path), 0, "")["live"]


def test_an_audit_tells_the_faults_of_settled_files_while_it_runs(
    store: RunStore, shards: Path, tmp_path: Path
) -> None:
    young = write(shards, 6)
    young.write_bytes(young.read_bytes()[:-1])  # may be being written
    stage = configuration.Stage(kind="audit", folder=str(shards))
    ask(store, "runs.start", spec=plain(build_spec("audit", stage, "audit-3")), requirements={})
    assert ended(store, "audit-3").exit_code == 1
    lines = (Path(store.folder("audit-3")) / results.FOUND_NAME).read_text().splitlines()
    assert {json.loads(line)["path"] for line in lines} == {"rows_0-2000/data_5.ckpt"}
    final = ask(store, "audits.faults", id="audit-3")
    assert {fault["path"] for fault in final["faults"]} >= {"rows_0-2000/data_5.ckpt", "rows_0-2000/data_6.ckpt"}


def test_time_left_is_by_files_where_no_tokens_are_counted() -> None:
    assert Progress(0.0, "running", samples_done=10, samples_total=30, samples_per_s=4.0).eta_s() == 5.0
    assert Progress(0.0, "running", samples_total=30).eta_s() is None
    tokens = Progress(0.0, "running", samples_total=30, samples_per_s=1.0, tokens_total=100, tokens_per_s=50.0)
    assert tokens.eta_s() == 2.0


# --- the pool ---------------------------------------------------------------------------------------------------------


def _work(task: Task, tick: Callable[[], None]) -> Any:
    if task[0].startswith("die"):
        raise SystemExit
    while task[0] == "hang":
        pass
    return task[0]


def test_a_process_that_dies_or_hangs_costs_one_file() -> None:
    tasks: list[Task] = [[name] for name in ("a", "die", "b", "hang", *"cdefghijklmnopqrstuvwxyz", "die")]
    answers = list(Pool(_work, 2, patience_s=0.5).run(tasks, lambda: False))
    assert sorted(task[0] for task, _, _ in answers) == sorted(task[0] for task in tasks)
    failed = sorted((task[0], why.partition(":")[0]) for task, answer, why in answers if answer is None)
    assert failed == [("die", "reader-died"), ("die", "reader-died"), ("hang", "no-answer")]


def test_answers_that_a_dead_process_held_back_are_asked_for_again_and_nobody_else_is_blamed() -> None:
    tasks: list[Task] = [[f"die{n}" if n % 40 == 39 else f"t{n}"] for n in range(400)]
    answers = list(Pool(_work, 2).run(tasks, lambda: False))
    assert sorted(task[0] for task, _, _ in answers) == sorted(task[0] for task in tasks)
    assert {task[0] for task, answer, _ in answers if answer is None} == {t[0] for t in tasks if t[0][0] == "d"}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    path = tmp_path / "config.toml"
    path.write_text(f'[hosts.here]\npython = "{sys.executable}"\nroots = ["{tmp_path}"]\n')
    with NvmlDouble(gpus=1, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield lambda *words: CliRunner().invoke(main, ["--config", str(path), *words])


def test_the_command_on_a_host_is_a_run_and_answers_as_here(run: Callable[..., Result], shards: Path) -> None:
    result = run("shards", "audit", str(shards), "--host", "here", "--json")
    assert result.exit_code == 1, result.output
    there = json.loads(result.stdout)
    assert there["faults"]["truncated"]["count"] == 1 and there["list"][0]["code"] == "truncated"
    [known] = json.loads(run("runs", "--json").stdout)
    assert (known["id"], known["stage"]) == (there["run"], "audit")
    (shards / "rows_0-2000/data_5.ckpt").unlink()
    assert run("shards", "audit", str(shards), "--host", "here").exit_code == 0
    assert run("shards", "audit", "/usr", "--host", "here").exit_code == 2
    assert run("shards", "audit", "here/it/is", "--host", "here").exit_code == 2


def test_the_command_here_prints_kinds_and_the_first_files(shards: Path) -> None:
    argv = [sys.executable, "-m", "tui.cli", "shards", "audit", str(shards)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "FAULT truncated: 1" in done.stdout and "rows_0-2000/data_5.ckpt" in done.stdout
    assert "1 faults in 1 files" in done.stdout


def test_it_runs_on_the_oldest_python(shards: Path) -> None:
    argv = [python38(), "-m", "backend.agent.main", "audit", str(shards), "--json", "--deep"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert list(json.loads(done.stdout)["faults"]) == ["truncated"]
