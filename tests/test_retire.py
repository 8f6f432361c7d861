"""Deleting an old cache: what is planned, what is refused, and what a crash or a swap in the middle leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from backend.agent.devices import NvidiaDevices
from backend.agent.nvml import NvmlDriver
from backend.agent.retire.main import Retirement, receipt_of
from backend.agent.retire.place import Place, aside_of
from backend.agent.retire.plan import make_plan
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import Refused
from tests.auditing import age
from tests.nvml import NvmlDouble
from tests.waiting import until
from tui.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Make an old cache in a root, beside something that must never be touched, which a link in it leads to."""
    for path in ("root/old/rows_0-2000/data_0.ckpt", "root/old/rows_0-2000/data_1.ckpt", "root/old/data_config.json",
                 "outside/precious"):  # fmt: skip
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'{"state": "complete", "samples": 2}' if path.endswith("json") else b"x" * 5000)
        age(file, 7200.0)
    (tmp_path / "root/old/link").symlink_to(tmp_path / "outside")
    age(tmp_path / "root/old/link", 7200.0)
    return tmp_path / "root/old"


def look(path: Path, other_users: bool = False, roots: list[str] | None = None) -> dict[str, Any]:
    place = Place(str(path), [str(path.parent)] if roots is None else roots, other_users)
    try:
        return make_plan(place, RunStore(machine()), other_users)[0]
    finally:
        place.close()


def machine() -> Machine:
    return Machine(NvmlDriver, NvidiaDevices, [sys.executable, "-m", "backend.agent.main"])


def retire(path: Path, run_dir: Path, digest: str | None = None) -> int:
    """Delete in this process, as the role does."""
    run_dir.mkdir()
    order = {"path": str(path), "roots": [str(path.parent)], "other_users": False}
    kept = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        return Retirement(machine(), {**order, "digest": digest or look(path)["digest"]}, str(run_dir)).run()
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def codes(plan: dict[str, Any]) -> set[str]:
    return {one["code"] for one in plan["refused"]}


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_counts_dates_and_names_what_refers_to_it(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "root/train.json").write_text(json.dumps({"data": str(cache)}))
    (tmp_path / "root/shortcut").symlink_to(cache)
    plan = look(cache)
    assert (plan["files"], plan["folders"], plan["links"], plan["name"]) == (4, 1, 1, "old")
    assert plan["bytes"] == 10_000 + 35 + len(str(tmp_path / "outside"))
    assert plan["freed_bytes"] >= 10_000
    assert plan["at"] - plan["newest_at"] == pytest.approx(7200, abs=60)
    assert {part["name"]: part["files"] for part in plan["parts"]} == {"": 2, "rows_0-2000": 2}
    said = {ref["kind"]: ref["text"] for ref in plan["refs"]}
    assert "complete" in said["data_config"] and "train.json" in said["record"] and "shortcut" in said["link"]
    assert plan["refused"] == []
    assert look(cache)["digest"] == plan["digest"]
    (cache / "rows_0-2000/data_0.ckpt").write_bytes(b"y" * 5000)
    assert look(cache)["digest"] != plan["digest"]


def test_only_a_plain_path_below_a_root_is_planned(cache: Path, tmp_path: Path) -> None:
    def refusal(path: str | Path, roots: list[str]) -> str:
        with pytest.raises(Refused) as caught:
            look(Path(path), roots=roots)
        return caught.value.code

    root = str(cache.parent)
    (tmp_path / "root/shortcut").symlink_to(cache)
    (tmp_path / "root/away").symlink_to(tmp_path / "outside")
    assert refusal(cache, []) == "no-roots"
    assert refusal(tmp_path / "outside", [root]) == "outside-roots"
    assert refusal(root, [root]) == refusal(root, [root, str(tmp_path)]) == "is-root"
    assert refusal(tmp_path / "root/shortcut", [root]) == refusal(tmp_path / "root/away/precious", [root]) == "link"
    assert refusal(root + "/none", [root]) == "not-found"
    with pytest.raises(Refused, match="bad-path|plain"):
        Place(root + "/../outside", [root])
    with pytest.raises(Refused, match="plain"):
        Place("old", [root])
    alias = tmp_path / "alias"
    alias.symlink_to(cache.parent)
    assert look(alias / "old", roots=[str(alias)])["path"] == str(cache)


@needs_root
def test_what_belongs_to_others_is_refused_unless_it_is_allowed(cache: Path) -> None:
    os.chown(cache / "rows_0-2000/data_0.ckpt", 12345, -1)
    assert codes(look(cache)) == {"not-yours"}
    assert codes(look(cache, other_users=True)) == set()
    os.chown(cache.parent, 12345, -1)
    with pytest.raises(Refused, match="12345"):
        look(cache)
    assert look(cache, other_users=True)["files"] == 4


@needs_root
def test_nothing_is_deleted_through_a_mount(cache: Path, tmp_path: Path) -> None:
    (cache / "bound").mkdir()
    done = subprocess.run(["mount", "--bind", str(tmp_path / "outside"), str(cache / "bound")], check=False)
    if done.returncode:
        pytest.skip("needs mount")
    try:
        plan = look(cache)
        assert codes(plan) == {"mount"}
        assert retire(cache, tmp_path / "run", plan["digest"]) == 2
        with pytest.raises(Refused, match="mount"):
            look(cache / "bound", roots=[str(cache)])
    finally:
        subprocess.run(["umount", str(cache / "bound")], check=True)
    assert (tmp_path / "outside/precious").exists() and (cache / "rows_0-2000/data_0.ckpt").exists()


def test_what_is_in_use_is_refused(cache: Path, tmp_path: Path) -> None:
    shard = cache / "rows_0-2000/data_0.ckpt"
    code = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
    held = subprocess.Popen(
        [sys.executable, "-c", code, str(shard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout and held.stdin
    held.stdout.readline()
    assert codes(look(cache)) == {"process"} and str(held.pid) in look(cache)["refused"][0]["text"]
    held.communicate("")
    until(lambda: not codes(look(cache)))
    code = "import sys, mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()"
    code += "; print(flush=True); sys.stdin.read()"
    held = subprocess.Popen(
        [sys.executable, "-c", code, str(shard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout
    held.stdout.readline()
    assert codes(look(cache)) == {"process"}, "a trainer that maps a shard has no file open"
    held.communicate("")
    age(shard, 5.0)
    assert codes(look(cache)) == {"fresh"}


# --- the deletion -----------------------------------------------------------------------------------------------------


def test_a_confirmed_folder_goes_whole_and_links_are_not_followed(cache: Path, tmp_path: Path) -> None:
    assert retire(cache, tmp_path / "run") == 0
    assert everything(tmp_path / "root") == set()
    assert everything(tmp_path / "outside") == {"precious"}
    receipt = receipt_of(str(tmp_path / "run"))
    assert receipt["verdict"] == "deleted" and receipt["deleted"]["files"] == 4
    assert receipt["plan"]["digest"] and receipt["plan"]["files"] == 4


def test_a_folder_that_changed_after_it_was_confirmed_is_left(cache: Path, tmp_path: Path) -> None:
    digest = look(cache)["digest"]
    age_new = cache / "rows_0-2000/data_2.ckpt"
    age_new.write_bytes(b"new")
    age(age_new)
    before = everything(cache)
    assert retire(cache, tmp_path / "run", digest) == 2
    assert everything(cache) == before
    assert receipt_of(str(tmp_path / "run"))["verdict"] == "refused"


def test_a_folder_swapped_for_a_link_in_the_middle_leads_nowhere(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, renamed = Place.enter, []

    def swapped(place: Place, fd: int, name: str) -> int:
        aside = cache.parent / aside_of(cache.name)
        if name == "rows_0-2000" and aside.exists() and not renamed:
            renamed.append((aside / name).rename(tmp_path / "kept"))
            (aside / name).symlink_to(tmp_path / "outside")
        return enter(place, fd, name)

    monkeypatch.setattr(Place, "enter", swapped)
    assert retire(cache, tmp_path / "run") == 1
    assert renamed and everything(tmp_path / "outside") == {"precious"}
    assert everything(tmp_path / "kept") == {"data_0.ckpt", "data_1.ckpt"}
    receipt = receipt_of(str(tmp_path / "run"))
    assert receipt["verdict"] == "partly deleted" and "rows_0-2000" in receipt["reason"]
    monkeypatch.undo()
    assert retire(cache, tmp_path / "again") == 0, "the link is deleted as a link"
    assert everything(tmp_path / "root") == set() and everything(tmp_path / "outside") == {"precious"}


def test_another_folder_under_the_name_at_the_last_moment_is_put_back(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, swaps = os.rename, []

    def swapped(source: str, target: str, **how: Any) -> None:
        if target == aside_of("old") and not swaps:
            swaps.append(rename(cache, tmp_path / "root/elsewhere"))
            cache.mkdir()
            (cache / "other").write_text("not what was confirmed")
        rename(source, target, **how)

    monkeypatch.setattr(os, "rename", swapped)
    assert retire(cache, tmp_path / "run") == 2
    assert swaps and everything(cache) == {"other"} and len(everything(tmp_path / "root/elsewhere")) == 5


def test_a_crash_at_every_step_leaves_all_or_a_rest_that_the_same_command_deletes(cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    subprocess.run(["cp", "-a", str(cache), str(kept)], check=True)
    whole, step, seen = everything(cache), 0, set()
    while True:
        run_dir = tmp_path / f"run-{step}"
        pid = os.fork()
        if not pid:
            _die_before(step)
            os._exit(retire(cache, run_dir))
        status = os.waitpid(pid, 0)[1]
        assert everything(tmp_path / "outside") == {"precious"}
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        aside = cache.parent / aside_of("old")
        if cache.exists():
            assert everything(cache) == whole and not aside.exists()
        else:
            assert receipt_of(str(run_dir))["verdict"] in ("interrupted", "deleted")
            left = everything(aside) if aside.exists() else set()
            assert left < whole or left == whole
            seen.add(len(left))
            if aside.exists():
                assert look(cache)["resumes"] and look(aside)["target"] == str(aside)
                assert retire(cache if step % 2 else aside, tmp_path / f"again-{step}") == 0
        assert cache.exists() or everything(tmp_path / "root") == set()
        if not cache.exists():
            subprocess.run(["cp", "-a", str(kept), str(cache)], check=True)
        step += 1
    assert seen == {0, 1, 2, 3, 4, 5}


def _die_before(step: int) -> None:
    """Kill this process before its nth change to the filesystem."""
    left = [step]

    def dying(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **how: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **how)

        setattr(os, name, call)

    for name in ("rename", "unlink", "rmdir"):
        dying(name)


def test_a_request_to_stop_is_kept_and_what_is_left_can_be_deleted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def stopping(*args: Any, **how: Any) -> None:
        unlink(*args, **how)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "unlink", stopping)
    assert retire(cache, tmp_path / "run") == 128 + signal.SIGTERM
    monkeypatch.undo()
    receipt = receipt_of(str(tmp_path / "run"))
    assert receipt["verdict"] == "partly deleted" and receipt["deleted"]["files"] == 1
    cache.mkdir()
    assert codes(look(cache)) == {"unfinished"}, "a new cache of that name is another matter"
    assert retire(cache.parent / aside_of("old"), tmp_path / "again") == 0
    assert everything(tmp_path / "root") == {"old"}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[hosts.here]\npython = "{sys.executable}"\nretire_roots = ["{cache.parent}"]\n'
        f'[stages.busy]\ncommand = ["sleep", "60"]\nout = "{cache}"\n'
    )
    with NvmlDouble(gpus=1, tmp_path=tmp_path) as double:
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        yield lambda *words: CliRunner().invoke(main, ["--config", str(path), *words])


@pytest.mark.slow
def test_the_command_plans_asks_for_the_name_and_leaves_a_receipt(run: Callable[..., Result], cache: Path) -> None:
    launched = json.loads(run("launch", "here", "busy", "--json").stdout)
    planned = run("retire", "here", str(cache), "--plan", "--json")
    assert planned.exit_code == 4, planned.output
    plan = json.loads(planned.stdout)
    assert codes(plan) == {"run"} and launched["id"] in plan["refused"][0]["text"]
    assert {"kind": "stage", "text": "the stage `busy` names it as `out`"} in plan["refs"]
    assert run("stop", launched["id"]).exit_code == 0
    wrong = run("retire", "here", str(cache), "--confirm", "new")
    assert wrong.exit_code == 4 and "nothing was deleted" in wrong.output and cache.exists()
    done = run("retire", "here", str(cache), "--confirm", "old", "--json")
    assert done.exit_code == 0, done.output
    receipt = json.loads(done.stdout)
    assert receipt["verdict"] == "deleted" and receipt["deleted"]["files"] == 4
    assert not cache.exists() and everything(cache.parent) == set()
