"""What SGLang is installed in this Python: its version, its flags and what its models can capture.

All of it is read from the sources, without importing them: an import takes 10 to 20 s and needs CUDA's libraries,
and `launch_server --help` is such an import.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

HELP_S = 180.0
"""How long `--help` may take, which is asked only where the sources show no flags."""

EAGLE3, DFLASH = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"


class NotInstalled(Exception):
    """There is no SGLang here that could be served with; the text says what to do."""


@dataclass(frozen=True)
class Installed:
    """An SGLang. `flags` holds every long option of its server, without values."""

    version: str
    folder: str
    flags: frozenset[str] = field(repr=False)

    def lacks(self, words: list[str]) -> list[str]:
        """Return the options among the words that this version does not have."""
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        return sorted({option for option in options if option not in self.flags})


def find(entry: list[str]) -> Installed:
    """Find SGLang in this Python. `entry` are the words that start its server. Raises NotInstalled."""
    try:
        spec = importlib.util.find_spec("sglang")
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise NotInstalled(f"{sys.executable} has no sglang; install it there, or name another `python` for the stage")
    flags = _flags_of_sources(places[0]) or _flags_of_help(entry)
    return Installed(_version(places[0]), places[0], frozenset(flags))


def _version(folder: str) -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pass
    for name in ("_version.py", "version.py"):
        text = _text(os.path.join(folder, name))
        found = re.search(r"^(?:__version__|version)\b[^\"'\n]*[\"']([^\"'\n]+)", text, re.MULTILINE)
        if found:
            return found.group(1)
    return "?"


def _flags_of_sources(folder: str) -> set[str]:
    """Read the options out of the server's arguments: annotated fields, their other names, and add_argument."""
    srt = os.path.join(folder, "srt")
    fields = glob.glob(os.path.join(srt, "arg_groups", "**", "*.py"), recursive=True)
    found: set[str] = set()
    for path in [os.path.join(srt, "server_args.py"), *sorted(fields)]:
        tree = _parse(path)
        if tree is not None:
            found |= _options(tree)
    return found if "--model-path" in found else set()


def _options(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found |= _field_options(node.target.id, node.annotation)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {text for text in map(_literal, node.args) if text.startswith("--")}
    return found


def _field_options(name: str, annotation: ast.expr) -> set[str]:
    """Return the options of `name: A[type, Arg(...)]`; none where the field says that it has none."""
    if not isinstance(annotation, ast.Subscript) or getattr(annotation.value, "id", "") not in ("A", "Annotated"):
        return set()
    found, own = set(), "--" + name.replace("_", "-")
    calls = [node for node in ast.walk(annotation) if isinstance(node, ast.Call)]
    for keyword in [keyword for call in calls for keyword in call.keywords]:
        if keyword.arg == "no_cli" and getattr(keyword.value, "value", False):
            return set()
        if keyword.arg == "cli_name":
            own = _literal(keyword.value) or own
        if keyword.arg == "aliases" and isinstance(keyword.value, (ast.List, ast.Tuple)):
            found |= {text for text in map(_literal, keyword.value.elts) if text.startswith("--")}
    return found | {own if own.startswith("--") else "--" + own}


def _literal(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _flags_of_help(entry: list[str]) -> set[str]:
    """Ask the server itself. Raises NotInstalled with its last words where it cannot answer."""
    try:
        done = subprocess.run(
            [*entry, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HELP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"its flags cannot be read: `--help` gave no answer within {HELP_S:.0f} s") from None
    except OSError as error:
        raise NotInstalled(f"its flags cannot be read: {entry[0]}: {error.strerror}") from None
    found = set(re.findall(r"--[a-z0-9][a-z0-9-]*", done.stdout))
    if done.returncode != 0 or "--model-path" not in found:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").split("\n")[-1]
        raise NotInstalled(f"its flags cannot be read: `--help` said: {words[:300]}")
    return found


def capture_methods(folder: str, architecture: str) -> set[str] | None:
    """Return which of EAGLE3 and DFLASH the code of an architecture has; None where its code is not found.

    A class may have them from a base class in another file of the folder.
    """
    classes = _classes(os.path.join(folder, "srt", "models"), architecture)
    if architecture not in classes:
        return None
    found: set[str] = set()
    waiting, seen = [architecture], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in classes:
            continue
        seen.add(name)
        bases, methods = classes[name]
        waiting += bases
        found |= methods & {EAGLE3, DFLASH}
    return found


def _classes(models: str, architecture: str) -> dict[str, tuple[list[str], set[str]]]:
    """Read (base classes, methods) of the classes that an architecture may be made of, from as few files as do."""
    texts = {path: _text(path) for path in sorted(glob.glob(os.path.join(models, "*.py")))}
    found: dict[str, tuple[list[str], set[str]]] = {}
    wanted, looked = [architecture], set()
    while wanted:
        name = wanted.pop()
        heads = re.compile(rf"^class {re.escape(name)}\b", re.M)
        path = next((path for path, text in texts.items() if heads.search(text)), "")
        if not path or path in looked:
            continue
        looked.add(path)
        tree = _parse(path)
        for node in tree.body if tree else []:
            if isinstance(node, ast.ClassDef):
                bases = [base for base in (_name(base) for base in node.bases) if base]
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                found.setdefault(node.name, (bases, methods))
                wanted += bases
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _parse(path: str) -> ast.Module | None:
    try:
        return ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return None
