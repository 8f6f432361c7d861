"""A gate opens only on a fact that was read; each says what was found and what to do."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent import gates, logind
from backend.agent.gates import checking, places, program
from backend.wire import CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, UNKNOWN, Gate, GpuVerdict, Receipt
from tests.runstore import machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_logind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the host's own logind out, whatever it is."""
    monkeypatch.setattr(logind, "RUNNING", ("no/such/folder",))


def check(verify: Callable[[], Receipt] | None = None, **requirements: Any) -> list[Gate]:
    return gates.check(machine(), requirements, verify)


def one(verify: Callable[[], Receipt] | None = None, **requirements: Any) -> Gate:
    (gate,) = check(verify, **requirements)
    return gate


def receipt(verdict: str, reason: str = "", action: str = "") -> Receipt:
    return Receipt("r", "verify", after=[GpuVerdict(0, "u0", verdict, reason, action)], verdict=verdict)


def test_nothing_needed_is_no_gate() -> None:
    assert check() == []
    assert check(clean_gpus=False, paths=[], disk=[], shm_bytes=0, python="", modules=[]) == []


@pytest.mark.parametrize(
    ("verdict", "accept", "ok"),
    [
        (CLEAN, False, True),
        (LIMITED, False, False),
        (LIMITED, True, True),
        (NOT_CLEAN, True, False),
        (UNHEALTHY, True, False),
        (UNKNOWN, True, None),
        ("", True, None),
    ],
)
def test_clean_gpus(verdict: str, accept: bool, ok: bool | None) -> None:
    gate = one(lambda: receipt(verdict, "40 GiB held", "kill 7"), clean_gpus=True, accept_limited=accept)
    assert gate.ok is ok
    assert gate.fix or ok
    if ok is not True:
        assert "GPU 0: 40 GiB held" in gate.detail


def test_gpus_that_cannot_be_verified_are_not_clean() -> None:
    def broken() -> Receipt:
        raise RuntimeError("driver\x1b[2J gone")

    gate = one(broken, clean_gpus=True)
    assert gate.ok is None
    assert gate.detail == "could not be checked: RuntimeError: driver gone"
    assert one(None, clean_gpus=True).ok is None


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(b"x")
    there, folder, absent, beneath = check(
        paths=[str(tmp_path / "corpus"), str(tmp_path), str(tmp_path / "no"), str(tmp_path / "corpus" / "x")]
    )
    assert (there.ok, folder.ok, absent.ok, beneath.ok) == (True, True, False, False)
    assert absent.detail == "No such file or directory"
    assert beneath.detail == "Not a directory"
    assert all(gate.fix for gate in (absent, beneath))


def test_an_unreadable_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests run as root, who may read everything
    gate = one(paths=[str(tmp_path)])
    assert (gate.ok, gate.detail) == (False, "there, but not readable for this user")


def test_disk_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    small, large, under_file = check(
        disk=[[str(tmp_path / "a/b/c"), 1], [str(tmp_path), 1 << 60], [f"{__file__}/x", 1]]
    )
    assert (small.ok, large.ok, under_file.ok) == (True, False, False)
    assert "1073741824.0 GiB needed" in large.detail
    assert large.fix.startswith("free ")
    assert not (tmp_path / "a").exists()
    assert "is no folder" in under_file.detail


def test_shared_memory() -> None:
    assert one(shm_bytes=1).ok is True
    gate = one(shm_bytes=1 << 60)
    assert (gate.name, gate.ok) == ("/dev/shm", False)


def test_python_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('this module must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gate = one(python=sys.executable, modules=["json", "loud"])
    assert gate.ok is True
    assert "Python {}.{}.{}".format(*sys.version_info[:3]) in gate.detail
    gate = one(python=sys.executable, modules=["json", "no_such_module"])
    assert gate.ok is False
    assert gate.detail.endswith("has no no_such_module")
    assert "-m pip install no_such_module" in gate.fix


def test_programs(tmp_path: Path) -> None:
    assert one(python="sh").ok is True
    gate = one(python="no-such-program")
    assert (gate.ok, gate.detail) == (False, "not found on this host's PATH")
    (tmp_path / "tool").write_text("")
    gate = one(python=str(tmp_path / "tool"))
    assert (gate.ok, gate.detail) == (False, "there, but not executable")


def test_a_broken_python(tmp_path: Path) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'cannot load libpython3.so' >&2; exit 127\n")
    broken.chmod(0o755)
    gate = one(python=str(broken))
    assert gate.ok is False
    assert "cannot load libpython3.so" in gate.detail


def test_a_python_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PATIENCE_S", 0.2)
    slow = tmp_path / "python3"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    gate = one(python=str(slow))
    assert gate.ok is None
    assert "did not answer" in gate.detail


def test_a_filesystem_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(places, "path", lambda _path: release.wait(60))
    gate = checking._in_time("path /dead", lambda: places.path("/dead"), 0.05)
    release.set()
    assert gate.ok is None
    assert "no answer within" in gate.detail


@pytest.mark.parametrize("nonsense", [{"paths": [3]}, {"disk": ["/tmp"]}, {"disk": [["/tmp", "x"]]}, {"python": 3}])
def test_nonsense_never_raises_and_never_opens(nonsense: dict[str, Any]) -> None:
    assert one(**nonsense).ok is None


def a_host(root: Path, config: str = "", linger: str = "") -> str:
    """Lay out a host where logind runs."""
    for folder in ("run/here", "etc/systemd/logind.conf.d", "var/lib/systemd/linger"):
        (root / folder).mkdir(parents=True)
    (root / "etc/systemd/logind.conf.d/10.conf").write_text("[Login]\n#KillUserProcesses=yes\n" + config)
    if linger:
        (root / "var/lib/systemd/linger" / linger).touch()
    return str(root)


def logind_gate(
    root: str, uid: int, monkeypatch: pytest.MonkeyPatch, said: dict[str, str] | None = None
) -> Gate | None:
    monkeypatch.setattr(logind, "RUNNING", ("run/here",))
    return logind.check(root, uid, lambda: said or {})


NOBODY = 54321


@pytest.mark.parametrize(
    ("config", "linger", "uid", "said", "ok"),
    [
        ("", "", 0, {}, True),
        ("", "", 998, {}, True),
        ("", "", NOBODY, {}, False),
        ("", str(NOBODY), NOBODY, {}, True),
        ("RemoveIPC=no\n", "", NOBODY, {}, True),
        ("RemoveIPC = off\n", "", NOBODY, {}, True),
        ("", "", NOBODY, {"RemoveIPC": "no"}, True),
        ("RemoveIPC=no\n", "", NOBODY, {"RemoveIPC": "yes"}, False),
        ("KillUserProcesses=yes\n", str(NOBODY), NOBODY, {}, False),
        ("KillUserProcesses=yes\n", "", 0, {}, True),
    ],
)
def test_logind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    linger: str,
    uid: int,
    said: dict[str, str],
    ok: bool,
) -> None:
    gate = logind_gate(a_host(tmp_path, config, linger), uid, monkeypatch, said)
    assert gate is not None
    assert gate.ok is ok
    assert bool(gate.fix) is not ok


def test_no_logind_is_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logind_gate(str(tmp_path), NOBODY, monkeypatch) is None


def test_gates_cross_the_wire() -> None:
    json.dumps([vars(gate) for gate in check(python="sh", shm_bytes=1, paths=["/"])])
