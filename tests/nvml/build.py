"""Building the double with the C compiler: once for each set of functions that it lacks."""

from __future__ import annotations

import atexit
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pynvml
import pytest

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
LIBRARY = "libnvidia-ml.so.1"
ANY = "*"


@functools.cache
def function_names() -> tuple[str, ...]:
    """List every function that pynvml may ask for; the first stands for all of them."""
    bindings = Path(pynvml.__file__).read_text("utf-8")
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', bindings))
    return (ANY, *sorted(asked | _written()))


def _written() -> set[str]:
    return {name for source in SOURCES for name in re.findall(r"\b(nvml[A-Z]\w+)", source.read_text("ascii"))}


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="nvml-double-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def library(missing: frozenset[str] = frozenset()) -> Path:
    """Build the library without the functions named in `missing`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the NVML double")
    names = function_names()
    unknown = missing - set(names)
    if unknown:
        raise ValueError(f"no such NVML function: {', '.join(sorted(unknown))}")
    out = _folder() / hashlib.sha256(repr(sorted(missing)).encode()).hexdigest()[:12]
    out.mkdir(exist_ok=True)
    _write_headers(out, names)
    script = out / "visible.map"
    hidden = "".join(f"{name};" for name in sorted(missing))
    script.write_text(f"{{ global: nvml*; local: {hidden} nvml_double_stub; *; }};")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wno-misleading-indentation", f"-I{SOURCES[0].parent}",
         f"-I{out}", f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={script}", "-o", out / LIBRARY, *SOURCES],
        check=True,
    )  # fmt: skip
    return out / LIBRARY


def _write_headers(out: Path, names: tuple[str, ...]) -> None:
    written = _written()
    numbers = [f"#define F_{name} {number}" for number, name in enumerate(names) if name != ANY]
    out.joinpath("names.h").write_text(
        "\n".join([f"#define FUNCTION_COUNT {len(names)}", "#define ANY_FUNCTION 0", *numbers, ""])
    )
    stubs = [
        f"int {name}(void *first) {{ return nvml_double_stub(F_{name}, first); }}"
        for name in names
        if name != ANY and name not in written
    ]
    out.joinpath("stubs.h").write_text("\n".join([*stubs, ""]))
