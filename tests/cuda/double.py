"""Building the double with the C compiler, and telling it what to do wrong."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cuda.beside import LIBRARY


class CudaDouble:
    """The library in a folder of its own, or one that is there; what it does wrong stands in a file beside it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        shutil.copy(_built(), self._folder / LIBRARY)

    @property
    def path(self) -> str:
        """Return the library's path."""
        return str(self._folder / LIBRARY)

    def fault(self, function: str, what: int | str, uuid: str = "*") -> None:
        """Let a function fail with an error's number, or hang, crash, be wrong or leave a residue."""
        with open(self._folder / "faults", "a", encoding="ascii") as file:
            file.write(f"{uuid} {function} {what}\n")


@functools.cache
def _built() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the CUDA double")
    folder = tempfile.mkdtemp(prefix="cuda-double-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).with_name("double.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wno-misleading-indentation", f"-Wl,-soname,{LIBRARY}", "-o",
         Path(folder, LIBRARY), source, "-ldl"],
        check=True,
    )  # fmt: skip
    return Path(folder, LIBRARY)
