"""Packing what is shipped to a host: one deterministic zip a program, named by its digest."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("wire", "shardfmt")
DATE = (1980, 1, 1, 0, 0, 0)
"""Every file's date in an archive: the same sources give the same bytes, and so the same place in the host's
cache."""


@dataclass(frozen=True)
class Archive:
    """A program as one zip. `argv` are words before the role's name; `tree` is the digest of its unpacked
    files."""

    name: str
    sha256: str
    data: bytes = field(repr=False)
    argv: list[str] = field(default_factory=list)
    tree: str = ""


def pack_agent(entry: str = "backend.agent", extra_modules: Iterable[str] = (), argv: Sequence[str] = ()) -> Archive:
    """Pack the agent with pynvml. `entry` is a package whose module `main` has `main(argv)`, or a module that
    has it.

    `extra_modules` are modules or packages of ours by their full names, packed with the packages that they
    lie in.
    """
    files = _sources("backend.agent", *(f"backend.{part}" for part in SHARED), *extra_modules)
    found = importlib.util.find_spec("pynvml")  # found, not imported: only the host runs it
    if found is None or found.origin is None:
        raise FileNotFoundError("pynvml is not installed here; `pip install nvidia-ml-py` brings it")
    files["pynvml.py"] = Path(found.origin).read_bytes()
    return _pack("agent", entry, files, argv)


@cache
def pack_extractor() -> Archive:
    """Pack the extractor, which runs in the stage's own Python."""
    files = _sources("backend.extraction", *(f"backend.{part}" for part in SHARED))
    return _pack("extractor", "backend.extraction", files, ())


def _pack(name: str, entry: str, files: dict[str, bytes], argv: Sequence[str]) -> Archive:
    module = f"{entry}.main" if ROOT.joinpath(*entry.split(".")[1:]).is_dir() else entry
    files |= _sources(module)
    program = f"import sys\n\nfrom {module} import main\n\nsys.exit(main(sys.argv[1:]))\n"
    files["__main__.py"] = program.encode()
    return pack_files(name, files, argv)


def pack_files(name: str, files: dict[str, bytes], argv: Sequence[str] = ()) -> Archive:
    """Pack files by their paths; `__main__.py` is what runs."""
    buffer, total = io.BytesIO(), hashlib.sha256()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(files):
            info = zipfile.ZipInfo(path, DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            archive.writestr(info, files[path])
            total.update(f"{path}\n{len(files[path])}\n".encode() + files[path])
    data = buffer.getvalue()
    return Archive(name, hashlib.sha256(data).hexdigest(), data, list(argv), total.hexdigest())


def _sources(*names: str) -> dict[str, bytes]:
    """Read modules and packages of ours, with the `__init__.py` of every package above them."""
    files: dict[str, bytes] = {}
    for name in names:
        parts = name.split(".")
        if parts[0] != "backend":
            raise ValueError(f"`{name}` is no module of ours")
        place = ROOT.joinpath(*parts[1:])
        if place.is_dir():
            found = [path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        elif place.with_suffix(".py").is_file():
            found = [place.with_suffix(".py")]
        else:
            raise FileNotFoundError(f"`{name}` is no module: neither {place} nor {place}.py is there")
        above = [ROOT.joinpath(*parts[1:depth], "__init__.py") for depth in range(1, len(parts))]
        for path in [*above, *found]:
            files[path.relative_to(ROOT.parent).as_posix()] = path.read_bytes()
    return files


def stub_source() -> str:
    """Return the text that the host runs first."""
    return Path(__file__).with_name("stub.py").read_text("utf-8")
