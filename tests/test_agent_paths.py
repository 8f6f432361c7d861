"""Where the agent keeps things: in HOME, and where that cannot be written, in a private folder that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.agent import paths


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests chose."""
    monkeypatch.setattr(paths, "_chosen", {})


def test_state_lies_in_home_for_the_user_alone(home: Path) -> None:
    assert paths.state_dir("runs") == str(home / ".local/state/eightzeros/runs")
    assert os.stat(paths.state_dir()).st_mode & 0o777 == 0o700
    assert not paths.homeless()


def test_xdg_folders_are_honoured_where_they_are_absolute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "elsewhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert paths.state_dir() == str(home / "elsewhere/eightzeros") + "/"
    assert paths.cache_dir() == str(home / ".cache/eightzeros")


def test_a_home_that_cannot_be_written_is_said_and_the_agent_serves_all_the_same(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("HOME", str(home / "file"))  # nothing can be made below a file, even by root
    done = subprocess.run(
        [sys.executable, "-m", "backend.agent.main", "agent", "n"], input=b"", capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b'"t":"hello"' in done.stdout
    assert b"HOME cannot be written" in done.stdout
    assert paths.state_dir().startswith("/tmp/eightzeros-")
