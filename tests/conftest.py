"""Fixtures that every test may use, and the rule that CI skips nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty HOME and no XDG folders, so that none reads or writes the operator's."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> object:
    """Fail a run under EIGHTZEROS_NO_SKIPS that skipped for want of a tool: a green CI must have run it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    wanting = [report for report in skipped if "needs " in str(report.longrepr)]
    if wanting and os.environ.get("EIGHTZEROS_NO_SKIPS"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line(f"{len(wanting)} tests were skipped for want of a tool; CI must have it", red=True)
    return (yield)
