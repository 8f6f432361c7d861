"""Completion as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tui.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "has"),
    [(["comp"], "completion"), (["status", "--ho"], "--host"), (["status", "--host", "gpu-b"], "gpu-b7")],
)
def test_bash_completes_commands_options_and_hosts(tmp_path: Path, words: list[str], has: str) -> None:
    (tmp_path / "eightzeros").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tui.cli "$@"\n')
    (tmp_path / "eightzeros").chmod(0o755)
    (tmp_path / "config/eightzeros").mkdir(parents=True)
    (tmp_path / "config/eightzeros/config.toml").write_text(
        '[hosts.gpu-b7]\naddress = "a"\n[hosts.other]\naddress = "b"\n'
    )
    line = " ".join(f'"{word}"' for word in ["eightzeros", *words])
    script = f"source <(eightzeros completion bash)\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
    script += '_eightzeros_completion eightzeros; printf "%s\\n" "${COMPREPLY[@]}"\n'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=60, check=True)
    assert found.stdout.split() == [has], found.stderr


@pytest.mark.parametrize(("shell", "has"), [("zsh", "compdef"), ("fish", "complete --no-files --command eightzeros")])
def test_other_shells_get_their_own_script(shell: str, has: str) -> None:
    assert has in CliRunner().invoke(main, ["completion", shell]).output
