"""Finding an older Python for what is shipped to the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def python38() -> str:
    """Return a python3.8; skips the test where there is none."""
    for found in _candidates():
        try:
            said = subprocess.run(
                [found, "-c", "import sys; print(sys.executable, *sys.version_info[:2])"],
                capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
        except OSError:
            continue
        words = said.stdout.split()
        if said.returncode == 0 and words[1:] == ["3", "8"]:
            return words[0]
    pytest.skip("no python3.8 on PATH: what runs on the host is checked under this Python alone")


def _candidates() -> list[str]:
    """List what PATH offers; a shim of pyenv stands beside the versions that it chooses from."""
    found = shutil.which("python3.8")
    if found is None:
        return []
    versions = Path(found).parents[1] / "versions"
    return [found, *(str(path) for path in sorted(versions.glob("3.8.*/bin/python")))]
