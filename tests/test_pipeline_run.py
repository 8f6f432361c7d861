"""A chain goes on by itself: it stops at the first gate or stage that is not well, with the true reason."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs
from backend.wire import Refused
from tests.chaining import ChainHost, serving, shell, signal_run
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ChainHost]:
    made = ChainHost(tmp_path)
    yield made
    made.close()


def test_a_chain_with_a_server_ends_it_by_its_reset_and_holds_nothing(host: ChainHost, tmp_path: Path) -> None:
    host.stages = {
        "serve": serving(host.root),
        "work": shell(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo > {tmp_path}/made",
                      outputs=[str(tmp_path / "made")]),
    }  # fmt: skip
    chain = host.run(chain=["serve", "work", "reset"])
    work = host.at(chain, "work")
    serve = host.at(chain, "serve", "up")
    driver = host.store.get(chain)
    assert driver is not None
    mine = {pid for pid, _ in host.store.members(chain)}
    assert not mine & {pid for run in (serve, work) for pid, _ in host.store.members(run.id)}
    assert not mine & {run.supervisor_pid for run in (serve, work)}
    with pytest.raises(Refused, match="the chain pipeline-0 .* launches its stages by itself"):
        host.run(chain=["work"])
    (tmp_path / "go").touch()
    ended = host.ended(chain)
    assert (ended.state, ended.go_on) == ("done", ""), ended
    assert [step.state for step in ended.steps] == ["ended", "done", "done"]
    assert ended.steps[0].reason == f"ended by {ended.steps[2].run_id}"
    assert not procfs.alive(serve.pid, serve.pid_start)
    kept = host.ask("runs.gates", id=serve.id)
    assert {gate["name"]: gate["ok"] for gate in kept["gates"]}["clean GPUs"] is True
    assert "CLEAN" in next(gate["detail"] for gate in kept["gates"] if gate["name"] == "clean GPUs")


CASES = {
    "a status": (shell("echo so far; echo 'no weights' >&2; exit 3"), "failed", "exit status 3: no weights"),
    "an output that is absent": (shell("true", outputs=["/nonexistent/x"]), "failed", "left no /nonexistent/x"),
    "a gate": (shell("true", inputs=["/nonexistent/in"]), "refused", "path /nonexistent/in: No such file"),
    "a program": (shell("true", cwd="/nonexistent/cwd"), "failed", "working folder /nonexistent/cwd"),
    "a service that ends": (shell("echo bye", service=True), "failed", "it ended before it was up"),
    "a service that is slow": (
        shell("exec sleep 100", service=True, ready_timeout_s=0.3), "failed", "it was not ready within 0 s",
    ),
}  # fmt: skip


def test_each_reason_is_the_true_one_and_the_chain_goes_on_from_there(host: ChainHost, tmp_path: Path) -> None:
    for name, (stage, state, reason) in CASES.items():
        host.stages = {"first": shell("true"), "second": stage, "third": shell("true")}
        ended = host.ended(host.run(start="second"))
        assert (ended.state, ended.go_on) == (state, "second"), (name, ended)
        assert reason in ended.reason and reason in ended.steps[1].reason, (name, ended)
        assert [step.state for step in ended.steps] == ["skipped", state, "waiting"], name
        run = host.store.get(ended.id)
        assert run is not None and run.exit_code == (4 if state == "refused" else 1), name
        if state == "refused":
            assert {gate.name: gate.ok for gate in ended.gates}["path /nonexistent/in"] is False
            assert ended.fix
    host.stages["second"] = CASES["a gate"][0]
    forced = host.ended(host.run(start="second", forced="it is made by hand"))
    assert (forced.state, forced.steps[1].forced) == ("done", "it is made by hand")
    kept = host.ask("runs.gates", id=forced.steps[1].run_id)
    assert kept["forced"] == "it is made by hand" and any(gate["ok"] is False for gate in kept["gates"])


def test_a_run_that_is_killed_and_a_chain_that_is_stopped(host: ChainHost) -> None:
    host.stages = {"first": shell("exec sleep 100"), "second": shell("true")}
    chain = host.run()
    signal_run(host.at(chain, "first"))
    assert host.ended(chain).reason == "ended by SIGKILL"
    chain = host.run()
    run = host.at(chain, "first")
    host.ask("runs.stop", id=chain)
    ended = host.ended(chain)
    assert (ended.state, ended.reason, ended.go_on) == ("stopped", "stopped on request", "first")
    assert not procfs.alive(run.pid, run.pid_start)


def test_a_driver_that_is_killed_leaves_its_stage_running_and_says_so(host: ChainHost, tmp_path: Path) -> None:
    host.stages = {"first": shell(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"), "second": shell("true")}
    chain = host.run()
    run = host.at(chain, "first")
    driver = host.store.get(chain)
    assert driver is not None
    signal_run(driver, signal.SIGKILL)
    stands = host.ended(chain)
    assert (stands.state, stands.go_on) == ("interrupted", "first")
    assert stands.reason == "its driver is gone: ended by SIGKILL"
    assert stands.steps[0].state == "running" and stands.steps[0].reason == "it goes on without the chain"
    (tmp_path / "go").touch()
    until(lambda: host.states(chain)["first"] == "done")
    assert procfs.alive(run.pid, run.pid_start) is False
    assert host.standing(chain).go_on == "second"


def test_values_of_the_environment_are_stored_nowhere(host: ChainHost, tmp_path: Path, home: Path) -> None:
    host.stages = {"first": shell(f"echo $TOKEN > {tmp_path}/said", env={"TOKEN": "hf_secretsecretsecret"})}
    chain = host.run()
    assert host.ended(chain).state == "done"
    assert (tmp_path / "said").read_text() == "hf_secretsecretsecret\n"
    stored = [path for path in home.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert stored == []
    run = json.loads(host.record(chain, "run.json").read_text())
    assert run["env_names"] == ["EIGHTZEROS_CHAIN"]
