"""What lies beside the double, read by the machine of the tests, also under Python 3.8."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY = "libcuda.so.1"


def residue(folder: str) -> str:
    """Return the UUID of the GPU on which a process left memory, empty where none did."""
    try:
        return Path(folder, "residue").read_text("ascii")
    except FileNotFoundError:
        return ""


def library_in(folder: str) -> str:
    """Return the double in a folder, empty where there is none: a machine without CUDA."""
    path = os.path.join(folder, LIBRARY)
    return path if os.path.exists(path) else ""
