"""In the middle of each stage something around the chain ends: the state on return is the true one, and it goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs, runtree
from backend.agent.paths import state_dir
from backend.wire import RUN_ENDED, Run
from tests.chaining import ChainHost, kill_supervisor, signal_run, whole_chain
from tests.test_runs_evidence import fill
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = ("prepare", "reset", "serve", "extract", "audit", "reset:2", "train")
pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ChainHost]:
    made = ChainHost(tmp_path)
    whole_chain(made, 40, 4_000)
    yield made
    made.close()


def held(host: ChainHost, chain: str, step: str) -> Run:
    """Wait until the run of a step has been started, and hold its main process where it is."""
    run = host.at(chain, step)
    signal_run(run, signal.SIGSTOP)
    return run


def the_run(host: ChainHost, run_id: str) -> Run:
    run = host.store.get(run_id)
    assert run is not None
    return run


def reboot(host: ChainHost) -> None:
    """Do to every run what a restart of the host does: its processes are gone, and the boot is another one."""
    for run in host.store.list():
        if run.state in RUN_ENDED:
            continue
        members = {*host.store.members(run.id), (run.supervisor_pid, run.supervisor_start)}
        for one in members:
            runtree.signal_process(*one, signal.SIGKILL)
        until(lambda these=members: not any(procfs.alive(*one) for one in these))  # type: ignore[misc]
        path = host.record(run.id, "run.json")
        path.write_text(json.dumps(dict(json.loads(path.read_text()), boot_id="0" * 36)))
        host.record(run.id, "exit.json").unlink(missing_ok=True)


def test_a_host_that_restarts_in_the_middle_of_each_stage(host: ChainHost) -> None:
    start = ""
    for step in STEPS:
        chain = host.run(start)
        run = held(host, chain, step)
        reboot(host)
        stands = host.standing(chain)
        at = next(one for one in stands.steps if one.name == step)
        assert (stands.state, stands.go_on) == ("interrupted", step), stands
        assert stands.reason == "its driver is gone: the host was restarted while it ran"
        assert at.state == "failed" and at.run_id == run.id, at
        assert "the host was restarted" in at.reason or "UNKNOWN" in at.reason or "without a receipt" in at.reason, at
        assert all(one.state in ("done", "skipped", "ended") for one in stands.steps[: STEPS.index(step)]), stands
        start = stands.go_on
    assert host.ended(host.run(start)).state == "done"


def test_a_driver_that_is_killed_in_the_middle_of_each_stage(host: ChainHost) -> None:
    start = ""
    for step in STEPS:
        chain = host.run(start)
        run = held(host, chain, step)
        signal_run(the_run(host, chain))
        stands = host.ended(chain)
        at = next(one for one in stands.steps if one.name == step)
        assert stands.reason == "its driver is gone: ended by SIGKILL", stands
        assert (stands.state, at.state, at.reason) == ("interrupted", "running", "it goes on without the chain"), stands
        signal_run(run, signal.SIGCONT)
        if step == "serve":  # up or not, nobody judges it any more: the chain begins there again
            until(lambda run=run: (told := the_run(host, run.id).progress) and told.state == "ready", 30)  # type: ignore[misc]
            host.ask("runs.stop", id=run.id, grace_s=5.0)
            until(lambda run=run: the_run(host, run.id).state in RUN_ENDED, 30)  # type: ignore[misc]
            start = step
            continue
        until(lambda chain=chain, step=step: host.states(chain)[step] == "done", 30)  # type: ignore[misc]
        start = host.standing(chain).go_on
        assert start == ("" if step == "train" else STEPS[STEPS.index(step) + 1])


def test_a_supervisor_that_is_killed_in_the_middle_of_each_stage(host: ChainHost) -> None:
    chain = host.run()
    for step in STEPS:
        run = held(host, chain, step)
        kill_supervisor(run)
        assert host.states(chain)[step] == "running"
        assert not the_run(host, run.id).supervised
        signal_run(run, signal.SIGCONT)
        if step in ("reset", "serve", "reset:2"):  # one leaves evidence of its own, the other has not ended
            continue
        stands = host.ended(chain)
        assert (stands.state, stands.go_on) == ("failed", step), stands
        assert "lost: " in stands.reason and "its exit status is unknown" in stands.reason, stands
        chain = host.run(step)
    assert host.ended(chain).state == "done"


def test_the_chain_s_own_supervisor_that_is_killed_changes_nothing(host: ChainHost) -> None:
    chain = host.run()
    run = held(host, chain, "extract")
    kill_supervisor(the_run(host, chain))
    signal_run(run, signal.SIGCONT)
    until(lambda: host.standing(chain).state == "done", 60)
    assert host.ended(chain).state == "done"
    assert the_run(host, chain).state == "lost"  # nobody saw its status, but its record is whole


def test_a_disk_that_is_full_in_the_middle_of_each_stage(host: ChainHost, home: Path) -> None:
    disk = home / ".local" / "state"
    disk.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        small = ChainHost(host.folder)
        small.stages = host.stages
        start = ""
        for step, after in zip(STEPS, [*STEPS[1:], ""], strict=True):
            chain = small.run(start)
            run = held(small, chain, step)
            fill(disk / "ballast")
            signal_run(run, signal.SIGCONT)
            if step == "serve":  # it cannot say that it is up, and nobody takes it for that
                cast = host.root / "cast" / f"{run.pid}.json"
                until(cast.exists)
                assert (small.standing(chain).state, small.states(chain)[step]) == ("running", "running")
                (disk / "ballast").unlink()
                until(lambda chain=chain: small.states(chain)["serve"] == "up")  # type: ignore[misc]
                fill(disk / "ballast")
            stands = small.ended(chain)
            at = next(one for one in stands.steps if one.name == step)
            if at.state == "failed":  # its own log, on that disk, could not be written, which ended it
                assert stands.go_on == step and "is full" in stands.reason, stands
            else:  # it came to its end, and the next one could not be started
                assert stands.go_on == after and at.state in ("done", "up"), stands
                assert not after or "No space left on device" in stands.reason, stands
            (disk / "ballast").unlink()
            start = stands.go_on
        assert not start or small.ended(small.run(start)).state == "done"
        small.close()
    finally:
        with contextlib.suppress(OSError):
            (disk / "ballast").unlink()
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert str(state_dir()).startswith(str(disk))
