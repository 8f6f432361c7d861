"""Every guard of a reset is needed: with one taken out of a copy of the tree, a test that names it fails.

Each copy is tried in a pid namespace of its own, so that a reset without its guards reaches no process outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.mutating import GUARDS, Guard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parent.parent
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
ASSERTED = ("AssertionError", "assert ", "Failed: DID NOT RAISE")


def copy(folder: Path) -> Path:
    """Copy what the named tests run."""
    for name in ("backend", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def attempt(folder: Path, names: list[str]) -> tuple[dict[str, str], str]:
    """Run tests of a copy: the first line of what each failed with, empty where it passed, and all that was said."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare: a reset without its guards runs in a pid namespace only")
    report = folder / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider",
             f"--junitxml={report}", *(f"tests/{name}" for name in names)]  # fmt: skip
    done = subprocess.run([*APART, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=240,
                          env={**os.environ, "PYTHONPATH": str(folder)})  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = str(case.get("name"))  # stands twice where its teardown failed too: the first is the test's own
        failed = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        said = "" if failed is None else (failed.get("message") or failed.tag).splitlines()[0]
        found[name] = found.get(name) or said
    return found, done.stdout


def test_the_named_tests_pass_where_every_guard_stands(tmp_path: Path) -> None:
    found, out = attempt(copy(tmp_path), sorted({name for guard in GUARDS for name in guard.tests}))
    assert found and not any(found.values()), out


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name for guard in GUARDS])
def test_a_test_fails_where_a_guard_is_taken_out(guard: Guard, tmp_path: Path) -> None:
    path = copy(tmp_path) / "backend" / "agent" / guard.file
    source = path.read_text(encoding="utf-8")
    assert source.count(guard.text) == 1, (
        f"backend/agent/{guard.file} has {guard.text!r} {source.count(guard.text)} times, not once: where the guard "
        f"{guard.name!r} was written anew, give its new text in tests/mutating.py; where it is gone, put it back"
    )
    path.write_text(source.replace(guard.text, guard.becomes), encoding="utf-8")
    found, out = attempt(tmp_path, list(guard.tests))
    caught = [name for name, said in found.items() if said.startswith(ASSERTED)]
    assert caught, out
    print(f"{guard.name}: caught by {', '.join(caught)}")
