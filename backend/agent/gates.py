"""What a launch needs of the host, each with what was found and what to do about it.

A gate whose fact cannot be read is not open: `ok` is None, with the reason. Nothing here raises.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from typing import Any, Callable, Dict, List, Optional

from backend.agent import logind, serverlook
from backend.agent.progress import free_bytes
from backend.agent.seam import Machine
from backend.wire import CLEAN, GIB, LIMITED, NOT_CLEAN, UNHEALTHY, Gate, Receipt, printable

PATIENCE_S = 10.0
"""How long a filesystem or an interpreter may take to answer: a dead network filesystem never does."""

SHM = "/dev/shm"
_PYTHON = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name.split(".")[0]) is None]
print("eightzeros " + json.dumps(["%d.%d.%d" % sys.version_info[:3], missing]))
"""
"""Finds modules without importing them. Of a dotted name only the first part can be looked for that way."""


def check(machine: Machine, requirements: Dict[str, Any], verify: Optional[Callable[[], Receipt]] = None) -> List[Gate]:
    """Check every requirement (docs/architecture.md, `requirements`) and return one gate for each.

    `verify` looks at the GPUs at this moment; a limited verdict opens the gate only with `accept_limited` in
    the requirements. Requirements that are empty or absent make no gate.
    """
    gates: List[Gate] = []
    if requirements.get("clean_gpus"):
        gates.append(_safely("clean GPUs", lambda: _clean(requirements, verify)))
    for path in _listed(requirements, "paths"):
        gates.append(_in_time("path %s" % printable(str(path), 200), _bind(_path, path)))
    for item in _listed(requirements, "disk"):
        path, wanted = item if isinstance(item, (list, tuple)) and len(item) == 2 else (item, None)
        gates.append(_in_time("disk %s" % printable(str(path), 200), _bind(_room, path, wanted)))
    if requirements.get("shm_bytes"):
        gates.append(_in_time(SHM, _bind(_room, SHM, requirements["shm_bytes"])))
    python, modules = requirements.get("python"), _listed(requirements, "modules")
    if python or modules:
        gates.append(_in_time("program", _bind(_program, python or "python3", modules), 2 * PATIENCE_S))
    if requirements.get("server"):
        gates.append(_in_time("server", _bind(serverlook.check, str(requirements["server"])), serverlook.PATIENCE_S))
    detached = _in_time(logind.NAME, logind.check)
    return gates + ([detached] if detached is not None else [])


def _listed(requirements: Dict[str, Any], name: str) -> List[Any]:
    value = requirements.get(name) or []
    return value if isinstance(value, list) else [value]


def _bind(call: Callable[..., Optional[Gate]], *words: Any) -> Callable[[], Optional[Gate]]:
    return lambda: call(*words)


def _safely(name: str, call: Callable[[], Any]) -> Any:
    """Return the call's gate, or one that says why there is none."""
    try:
        return call()
    except Exception as error:  # whatever went wrong, a gate that cannot be read stays shut
        text = "%s: %s" % (type(error).__name__, printable(str(error), 300))
        return Gate(name, None, "could not be checked: " + text, "correct the stage, or look at the host by hand")


def _in_time(name: str, call: Callable[[], Optional[Gate]], patience_s: float = PATIENCE_S) -> Any:
    """Return the call's gate, or one that says that it did not answer in time."""
    answers: List[Any] = []
    thread = threading.Thread(target=lambda: answers.append(_safely(name, call)), daemon=True)
    thread.start()
    thread.join(patience_s)
    if answers:
        return answers[0]
    return Gate(
        name,
        None,
        "no answer within %.0f s" % patience_s,
        "see whether its filesystem hangs: timeout 5 stat -f PATH",
    )


def _clean(requirements: Dict[str, Any], verify: Optional[Callable[[], Receipt]]) -> Gate:
    """Turn the verdict on the GPUs into a gate."""
    name = "clean GPUs"
    if verify is None:
        return Gate(name, None, "nothing verified them", "run verify")
    receipt = verify()
    worst = [gpu for gpu in receipt.after if gpu.verdict == receipt.verdict]
    detail = "%s: %d of %d GPUs" % (receipt.verdict or "no verdict", len(worst), len(receipt.after))
    detail += ", the first is GPU %d: %s" % (worst[0].index, worst[0].reason) if worst else ""
    host = [one for one in receipt.host_findings if one["level"] == "fail"]
    detail += "; ".join([""] + [one["reason"] for one in host])
    if receipt.verdict == CLEAN:
        return Gate(name, True, "%d GPUs CLEAN" % len(receipt.after))
    if receipt.verdict == LIMITED:
        accepted = bool(requirements.get("accept_limited"))
        return Gate(name, accepted, detail, "" if accepted else "set accept_limited for this host, or verify as root")
    if receipt.verdict in (NOT_CLEAN, UNHEALTHY):
        actions = [gpu.action for gpu in worst] + [one["action"] for one in host]
        return Gate(name, False, detail, next(filter(None, actions), "reset the host"))
    return Gate(name, None, detail, "a GPU that cannot be read is not clean: see `nvidia-smi -q`")


def _path(path: str) -> Gate:
    """Check that a path is there and can be read."""
    where, name = os.path.expanduser(path), "path %s" % path
    try:
        st = os.stat(where)
    except OSError as error:
        return Gate(name, False, error.strerror or str(error), "make it, or correct the stage's path")
    need = os.R_OK | (os.X_OK if os.path.isdir(where) else 0)
    if not os.access(where, need):
        return Gate(name, False, "there, but not readable for this user", "chmod it, or run as its owner")
    return Gate(name, True, "folder" if os.path.isdir(where) else "%.2f GiB" % (st.st_size / GIB))


def _room(path: str, wanted_bytes: int) -> Gate:
    """Check the room where a path is or would be, and that this user may write there."""
    where, name = os.path.abspath(os.path.expanduser(path)), path if path == SHM else "disk %s" % path
    parent = where
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    free, wanted = free_bytes(parent), int(wanted_bytes)
    detail = "%.1f GiB free, %.1f GiB needed" % (free / GIB, wanted / GIB)
    if not os.path.isdir(parent):
        return Gate(name, False, "%s is no folder" % parent, "correct the stage's path")
    if free < wanted:
        return Gate(name, False, detail, "free %.1f GiB on the disk of %s" % ((wanted - free) / GIB, parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        return Gate(name, False, "%s; but this user may not write in %s" % (detail, parent), "chown or chmod it")
    return Gate(name, True, detail)


def _program(program: str, modules: List[Any]) -> Gate:
    """Check that a program can be run and, where it is a Python, that it has the modules."""
    found = shutil.which(os.path.expanduser(program))
    name = "program %s" % program
    if found is None:
        there = os.path.isfile(os.path.expanduser(program))
        detail = "there, but not executable" if there else "not found on this host's PATH"
        return Gate(name, False, detail, "chmod +x it" if there else "install it, or name it by its whole path")
    if "python" not in os.path.basename(found) and not modules:
        return Gate(name, True, found)
    words = [str(module) for module in modules]
    try:
        done = subprocess.run(
            [found, "-c", _PYTHON, *words], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, timeout=PATIENCE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Gate(name, None, "%s did not answer within %.0f s" % (found, PATIENCE_S), "try: %s -c pass" % found)
    except OSError as error:
        return Gate(name, False, "%s: %s" % (found, error.strerror), "its interpreter or libraries are missing")
    return _interpreter(name, found, done, words)


def _interpreter(name: str, found: str, done: "subprocess.CompletedProcess[bytes]", modules: List[str]) -> Gate:
    """Read what the interpreter answered."""
    lines = done.stdout.decode("utf-8", "replace").split("\n")
    said = [line.partition(" ")[2] for line in lines if line.startswith("eightzeros ")]
    if not said:
        tail = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
        why = printable(tail, 200) or "exit status %d" % done.returncode
        return Gate(name, False, "%s is no working Python: %s" % (found, why), "try: %s -c pass" % found)
    version, missing = json.loads(said[-1])
    if missing:
        return Gate(name, False, "Python %s has no %s" % (version, ", ".join(missing)),
                    "%s -m pip install %s, or name another Python" % (found, " ".join(missing)))  # fmt: skip
    has = " with %s" % ", ".join(modules) if modules else ""
    return Gate(name, True, "%s, Python %s%s" % (found, version, has))
