"""Whether a program can be run and, where it is a Python, whether it has the packages, and in which versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Tuple

from backend.wire import Gate, printable

PATIENCE_S = 10.0
_PYTHON = """
import importlib.util, json, sys
try:
    from importlib.metadata import version
except ImportError:
    version = None
found = {}
for name in sys.argv[1:]:
    first = name.split(".")[0]
    try:
        found[name] = version(first)
    except Exception:
        found[name] = None if importlib.util.find_spec(first.replace("-", "_")) is None else ""
print("eightzeros " + json.dumps(["%d.%d.%d" % sys.version_info[:3], found]))
"""
"""Finds packages without importing them. Of a dotted name only the first part can be looked for that way."""

_SPEC = re.compile(r"([A-Za-z0-9._-]+)\s*((?:(?:==|!=|>=|<=|>|<)\s*[0-9][^,\s]*\s*,?\s*)*)")
_BOUND = re.compile(r"(==|!=|>=|<=|>|<)\s*([0-9][^,\s]*)")
_HOLDS = {
    "==": lambda order: order == 0, "!=": lambda order: order != 0, ">=": lambda order: order >= 0,
    "<=": lambda order: order <= 0, ">": lambda order: order > 0, "<": lambda order: order < 0,
}  # fmt: skip


def check(program: str, modules: List[Any], env: Dict[str, str]) -> Gate:
    """Check that a program can be run and, where it is a Python, that it has the packages: `numpy`, `sglang>=0.5.17`.

    `env` is added to the environment, as it will be for the run.
    """
    found = shutil.which(os.path.expanduser(program))
    name = "program %s" % program
    if found is None:
        there = os.path.isfile(os.path.expanduser(program))
        detail = "there, but not executable" if there else "not found on this host's PATH"
        return Gate(name, False, detail, "chmod +x it" if there else "install it, or name it by its whole path")
    if "python" not in os.path.basename(found) and not modules:
        return Gate(name, True, found)
    wanted = [_parts(str(module)) for module in modules]
    try:
        done = subprocess.run(
            [found, "-c", _PYTHON, *(module for module, _ in wanted)], cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=PATIENCE_S, env=dict(os.environ, **env),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Gate(name, None, "%s did not answer within %.0f s" % (found, PATIENCE_S), "try: %s -c pass" % found)
    except OSError as error:
        return Gate(name, False, "%s: %s" % (found, error.strerror), "its interpreter or libraries are missing")
    return _interpreter(name, found, done, wanted)


def _parts(spec: str) -> Tuple[str, List[Tuple[str, str]]]:
    """Split `sglang>=0.5.17,<0.6` into its name and its bounds. Raises ValueError where it is none."""
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ValueError("`%s` is no package: write a name, or name>=version" % spec)
    return match.group(1), _BOUND.findall(match.group(2))


def _interpreter(
    name: str, found: str, done: "subprocess.CompletedProcess[bytes]", wanted: List[Tuple[str, List[Tuple[str, str]]]]
) -> Gate:
    """Read what the interpreter answered."""
    lines = done.stdout.decode("utf-8", "replace").split("\n")
    said = [line.partition(" ")[2] for line in lines if line.startswith("eightzeros ")]
    if not said:
        tail = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
        why = printable(tail, 200) or "exit status %d" % done.returncode
        return Gate(name, False, "%s is no working Python: %s" % (found, why), "try: %s -c pass" % found)
    version, packages = json.loads(said[-1])
    missing = [module for module, _ in wanted if packages[module] is None]
    if missing:
        return Gate(name, False, "Python %s has no %s" % (version, ", ".join(missing)),
                    "%s -m pip install %s, or name another Python" % (found, " ".join(missing)))  # fmt: skip
    for module, bounds in wanted:
        for sign, bound in bounds:
            if not packages[module]:
                return Gate(name, None, "the version of %s cannot be told, %s%s is needed" % (module, sign, bound),
                            "see %s -m pip show %s" % (found, module))  # fmt: skip
            if not _HOLDS[sign](compare(packages[module], bound)):
                return Gate(name, False, "%s is %s, %s%s is needed" % (module, packages[module], sign, bound),
                            "%s -m pip install '%s%s%s'" % (found, module, sign, bound))  # fmt: skip
    has = ", ".join(("%s %s" % (module, packages[module])).strip() for module, _ in wanted)
    return Gate(name, True, "%s, Python %s%s" % (found, version, " with %s" % has if has else ""))


def compare(one: str, other: str) -> int:
    """Compare two versions by their numbers, -1, 0 or 1; what is before a release (rc, dev, a, b) is less than it."""
    a, b = _numbers(one), _numbers(other)
    return (a > b) - (a < b)


def _numbers(version: str) -> Tuple[List[int], bool]:
    match = re.match(r"v?([0-9]+(?:\.[0-9]+)*)[.-]?(.*)", version)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    rest = match.group(2).lower() if match else ""
    return numbers, not rest.startswith(("a", "b", "rc", "c", "dev", "pre"))
