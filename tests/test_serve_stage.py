"""From the configuration to a server that runs on a host, and the gate of the extraction that needs it."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from backend.config import Config, ConfigError, Host, Stage, parse
from backend.extraction.serving.serve import parse as launcher
from backend.fleet import Fleet
from backend.stages import EXTRACTOR, build_spec, requirements
from backend.wire import Refused, Run
from tests.nvml.double import NvmlDouble
from tests.serving import FAKE, a_model, free_port
from tests.waiting import until
from tui.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVE = "[stages.x]\nkind = 'serve'\nmodel = '/m'\n"


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlDouble]:
    with NvmlDouble(gpus=1, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield double


def test_a_stage_becomes_the_launcher_s_own_command_line() -> None:
    stage = Stage(kind="serve", python="/opt/py", model="/m", points=[59, 3, 31], tp=8, port=31000, mem_fraction=0.85,
                  staging_gib=16.0, arguments=["--trust-remote-code"], entry=["-m", "wrapped"], ready_timeout_s=60.0,
                  grace_s=100.0)  # fmt: skip
    spec = build_spec("serve", stage, "1")
    assert spec.argv[:3] == ["/opt/py", EXTRACTOR, "serve"] and spec.grace_s == 100.0
    settings = launcher(spec.argv[3:])
    wanted = settings.wanted
    assert (wanted.model, wanted.points, wanted.tp, wanted.port) == ("/m", [3, 31, 59], 8, 31000)
    assert (wanted.mem_fraction, wanted.arguments) == (0.85, ["--trust-remote-code"])
    assert settings.entry == [sys.executable, "-m", "wrapped"]
    assert (settings.staging_gib, settings.ready_timeout_s) == (16.0, 60.0)
    assert settings.grace_s < spec.grace_s  # the launcher kills before it is killed itself
    needs = requirements(stage)
    assert (needs["python"], needs["modules"], needs["model"]) == ("/opt/py", ["sglang", "numpy"], "/m")
    assert needs["shm_bytes"] == needs["ram_bytes"] == 16 << 30  # the staging lies there, and is memory
    assert (needs["port"], needs["clean_gpus"]) == (31000, True)


def test_what_a_stage_leaves_out_is_left_to_the_launcher() -> None:
    spec = build_spec("serve", Stage(kind="serve", model="org/name", points=[2]), "1")
    settings = launcher(spec.argv[3:])
    assert (settings.wanted.port, settings.wanted.tp, settings.wanted.mem_fraction) == (30000, 1, None)
    assert settings.entry[1:] == ["-m", "sglang.launch_server"]
    assert spec.grace_s == 40.0 and settings.grace_s < 40.0
    assert requirements(Stage(kind="serve", model="org/name", points=[2], needs=[]))["clean_gpus"] is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SERVE, 'ez.toml:1: stages.x: a stage of kind = "serve" needs `points`'),
        ("[stages.x]\nkind = 'serve'\npoints = [2]\n", "needs `model`"),
        (SERVE + "points = [2, 2]\n", "ez.toml:4: stages.x.points: a capture point stands here twice"),
        (SERVE + "points = [-1]\n", "stages.x.points[0]"),
        (SERVE + "points = [2]\ncommand = ['a']\n", "ez.toml:5: stages.x.command: a stage of kind"),
        (SERVE + "points = [2]\ncorpus = 'c'\n", 'stages.x.corpus: only a stage of kind = "extract"'),
        (SERVE + "points = [2]\nport = 80\n", "stages.x.port"),
        (SERVE + "points = [2]\narguments = ['--x', '--host=0.0.0.0']\n", "arguments[1]: the stage sets --host itself"),
        ("[stages.x]\ncommand = ['a']\ntp = 8\n", 'stages.x.tp: only a stage of kind = "serve"'),
    ],
)
def test_mistakes_name_file_line_and_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "ez.toml")
    assert said in str(error.value)


def test_a_server_is_launched_and_the_extraction_waits_for_it(nvml: NvmlDouble, tmp_path: Path) -> None:
    port, corpus = free_port(), tmp_path / "c.jsonl"
    corpus.write_text('{"input_ids": [1]}\n')
    model = str(a_model(tmp_path / "m"))
    head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "m" / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"w")
    serve = Stage(kind="serve", python=sys.executable, model=model, points=[2, 16, 29], port=port, staging_gib=0.01,
                  needs=[],
                  env={"PYTHONPATH": str(FAKE), "FAKE_MODE": "ready"})  # fmt: skip
    extract = Stage(kind="extract", python=sys.executable, engine="sglang", corpus=str(corpus), out=str(tmp_path / "o"),
                    server=f"http://127.0.0.1:{port}")  # fmt: skip
    config = Config(hosts={"here": Host(python=sys.executable)}, stages={"serve": serve, "extract": extract})
    with Fleet(config) as fleet:
        fleet.ready("here", 30).result()
        closed = [gate for gate in fleet.gates("here", "extract").result() if gate.ok is not True]
        assert [gate.name for gate in closed] == [f"server http://127.0.0.1:{port}"]
        with pytest.raises(Refused, match="no server answers there"):
            fleet.launch("here", "extract").result()
        run = fleet.launch("here", "serve").result()  # sglang comes with the stage's own PYTHONPATH
        try:
            until(lambda: _state(fleet, run) == "ready", 30)
            gates = {gate.name: gate for gate in fleet.gates("here", "extract").result()}
            assert gates[f"server http://127.0.0.1:{port}"].ok is True
            assert "1 tokens (counted) of 32784 bytes" in gates[f"disk {tmp_path / 'o'}"].detail
            taken = {gate.name: gate for gate in fleet.gates("here", "serve").result()}
            assert "taken by process" in taken[f"port {port}"].detail
            assert "has been running" in taken["no other run"].detail and run.id in taken["no other run"].fix
            assert os.path.isdir(f"/dev/shm/eightzeros/{run.id}")
        finally:
            fleet.stop_run("here", run.id).result()
            ended = fleet.run_ended("here", run.id, 60).result()
        assert ended.exit_code == 0
        assert not os.path.exists(f"/dev/shm/eightzeros/{run.id}")


def _state(fleet: Fleet, run: Run) -> str:
    progress = fleet.hosts["here"].runs[run.id].progress
    return progress.state if progress else ""


def test_the_adopt_command(nvml: NvmlDouble, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[hosts.here]\npython = "{sys.executable}"\n')

    def command(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["--config", str(path), *words])
        return result.exit_code, result.output

    code, text = command("adopt", "--out", str(tmp_path), "--label", "theirs", "--json")
    assert code == 0, text
    run = json.loads(text)
    assert (run["stage"], run["label"], run["adopted"]) == ("adopt", "theirs (adopted)", True)
    code, text = command("stop", run["id"])
    assert code == 0, text
    code, text = command("adopt", "--out", str(tmp_path / "no"))
    assert code == 1 and "is no folder on this host" in text
