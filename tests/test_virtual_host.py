"""The virtual host as a whole: what it puts up, what the console sees of it, and that it takes all of it down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.agent import procfs
from backend.fleet import Fleet, LinkState
from backend.virtual import belongings, demo
from backend.virtual.corpus import write_corpus
from backend.virtual.host import NAME, VirtualHost
from backend.wire import RunSpec
from tests.pythons import python38
from tests.waiting import until

CHECKOUT = Path(__file__).resolve().parent.parent
PUT_UP = """
import json, sys, time
from pathlib import Path
from backend.virtual.host import VirtualHost
with VirtualHost(Path(sys.argv[1]), 8, 1000) as host:
    print(json.dumps(host.cast), flush=True)
    time.sleep(300)
"""


def living(cast: list[dict[str, Any]]) -> list[str]:
    return [one["role"] for one in cast if procfs.alive(one["pid"], one["start_ticks"])]


def test_a_corpus_is_the_same_each_time(tmp_path: Path) -> None:
    tokens = [write_corpus(tmp_path / name, 12, 5000) for name in ("one", "two")]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    records = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert sum(len(record["input_ids"]) for record in records) == tokens[0] == tokens[1]
    assert all(len(record["loss_mask"]) == len(record["input_ids"]) for record in records)
    assert len({tuple(record["input_ids"]) for record in records}) == 12


def test_the_console_sees_eight_held_virtual_gpus_over_ssh(tmp_path: Path) -> None:
    with VirtualHost(tmp_path, 8, 1000) as host, Fleet(host.config(), archives=host.archive) as fleet:
        state = fleet.ready(NAME, 60).result()
        assert state.link.state is LinkState.LIVE
        assert state.virtual
        fleet.wait(lambda: all(state.reading(gpu, "memory_used_bytes").ok for gpu in range(8)), 30).result()
        plan = fleet.plan_reset(NAME).result(60)
        gates = fleet.gates(NAME, "serve").result(60)
        assert sorted(gpu for one in plan.victims for gpu in one.gpus) == [0, 1, 2, 3, 4, 5, 5, 6, 7]
        assert {one.pid for one in plan.victims} == {one["pid"] for one in host.of_role("serving", "heir")}
        assert host.of_role("monitor")[0]["pid"] in {one.pid for one in plan.spared}
        assert any(gate.ok is False for gate in gates), "a server may not start on GPUs that are held"


def test_its_agent_runs_under_python_3_8(tmp_path: Path) -> None:
    older = python38()
    with VirtualHost(tmp_path, 8, 1000) as host:
        config = host.config()
        old = msgspec.structs.replace(config.hosts[NAME], python=older)
        config = msgspec.structs.replace(config, hosts={NAME: old})
        with Fleet(config, archives=host.archive) as fleet:
            state = fleet.ready(NAME, 60).result()
            assert state.hello is not None, state.link.reason
            assert state.hello.python.startswith("3.8")
            fleet.wait(lambda: state.reading(7, "memory_used_bytes").ok, 30).result()
            assert len(fleet.plan_reset(NAME).result(60).victims) == 9


def test_an_extraction_goes_on_while_the_connection_is_cut(tmp_path: Path) -> None:
    with VirtualHost(tmp_path, 12, 12 * 768) as host, Fleet(host.config(), archives=host.archive) as fleet:
        state = fleet.ready(NAME, 60).result()
        run = fleet.launch(NAME, "extract").result(60)
        lost = fleet.wait(lambda: state.link.state is not LinkState.LIVE, 30)
        host.drop_connections()
        lost.result()
        ended = fleet.run_ended(NAME, run.id, 90).result()
        assert state.link.state is LinkState.LIVE
        assert (ended.exit_code, ended.progress and ended.progress.samples_done) == (0, 12)


@pytest.mark.slow  # a rank that ignores SIGTERM costs the whole grace
def test_a_reset_finishes_although_the_connection_is_cut_after_its_first_signal(tmp_path: Path) -> None:
    with VirtualHost(tmp_path, 8, 1000) as host, Fleet(host.config(), archives=host.archive) as fleet:
        state = fleet.ready(NAME, 60).result()
        run = fleet.start_reset(NAME, fleet.plan_reset(NAME).result(60)).result(60)
        fleet.wait(lambda: any(event.kind == "signal" for event in state.reset.events), 30).result()
        host.drop_connections()
        receipt = fleet.reset_result(NAME, run.id, 90).result()
        assert state.link.state is LinkState.LIVE
        assert {one.pid for one in receipt.killed} == {one["pid"] for one in host.of_role("serving", "heir")}
        assert {gpu.used_bytes.number() for gpu in receipt.after} == {0}
        assert not receipt.survivors
        assert sorted(living(host.cast)) == ["bystander", "monitor"]


def test_leaving_it_ends_everything_even_a_detached_run_and_after_an_exception(tmp_path: Path) -> None:
    host = VirtualHost(tmp_path, 8, 1000)

    def broken() -> None:
        with host, Fleet(host.config(), archives=host.archive) as fleet:
            fleet.ready(NAME, 60).result()
            run = fleet.start_run(NAME, RunSpec("sleeper", "train", ["sleep", "300"])).result(60)
            started = [(run.pid, run.pid_start), (run.supervisor_pid, run.supervisor_start)]
            assert all(procfs.alive(*one) for one in started)
            assert set(started) <= set(belongings.started_under(host.home))
            assert len(living(host.cast)) == 12
            raise RuntimeError("something else went wrong")

    with pytest.raises(RuntimeError, match="something else"):
        broken()
    assert living(host.cast) == []
    assert belongings.started_under(host.home) == []
    assert host.corpus.exists()


def test_the_cast_ends_with_the_process_that_put_it_up_whatever_ends_that(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PUT_UP, str(tmp_path)], cwd=CHECKOUT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            cast = json.loads(process.stdout.readline())
            assert len(living(cast)) == 12
        finally:
            process.kill()
    until(lambda: not living(cast))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_takes_everything_down(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "tui.cli", "demo", "--headless", "--samples", "8"]
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=CHECKOUT, env=surroundings, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            (folder,) = tmp_path.glob("eightzeros-demo-*")
            cast = [json.loads(path.read_bytes()) for path in (folder / "gpus" / "cast").iterdir()]
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    assert b"8 virtual GPUs" in said
    assert len(cast) == 12
    assert living(cast) == []
    assert belongings.started_under(folder / "home") == []
    assert not folder.exists()


def test_a_folder_that_holds_anything_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert demo.run_headless(16, tmp_path) == demo.USAGE
    assert "not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_too_few_samples_to_be_killed_between_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run_headless(3, None) == demo.USAGE
    assert "8 or more" in capsys.readouterr().err


def test_the_consoles_fleet_is_not_started_and_its_folder_goes(tmp_path: Path) -> None:
    with demo.fleet(8) as fleet:
        host = fleet.hosts[NAME]
        assert host.link.state is LinkState.IDLE
        folder = Path(host.config.roots[0]).parent
        assert folder.exists()
    assert not folder.exists()


def test_killing_by_identity_misses_a_process_that_took_over_the_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        found = procfs.stat(process.pid)
        assert found is not None
        assert not belongings.kill(process.pid, found.start_ticks + 1)
        assert belongings.end([(process.pid, found.start_ticks + 1)]) == []
        assert process.poll() is None
        assert belongings.kill(process.pid, found.start_ticks)
        assert process.wait() == -signal.SIGKILL
