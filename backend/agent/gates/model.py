"""Whether a model is on this host and whole: its configuration, every weight file that its index names, their sizes."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Set

from backend.shardfmt import safetensors
from backend.wire import GIB, Gate, printable

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
SHOWN = 3


def check(model: str, env: Dict[str, str], dummy: bool) -> Gate:
    """Check a model's folder, or the snapshot of a name in the Hugging Face cache. `dummy` weights need no files."""
    name = "model %s" % printable(model, 100)
    folder = locate(model, env)
    if not folder:
        fix = "correct `model`, or download it on the host: hf download %s" % model
        return Gate(name, False, "no folder with a config.json, and none in the Hugging Face cache", fix)
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8-sig") as file:
            if not isinstance(json.load(file), dict):
                raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        return Gate(name, False, "%s/config.json: %s" % (folder, printable(str(error), 200)), "download it again")
    if dummy:
        return Gate(name, True, "%s: a configuration, and weights that the server makes up" % folder)
    try:
        names = _named(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Gate(name, False, "its index cannot be read: %s" % printable(str(error), 200), "download it again")
    if not names:
        return Gate(name, False, "%s holds no weights" % folder, "download it again")
    return _weigh(name, folder, names)


def locate(model: str, env: Dict[str, str]) -> str:
    """Return the folder of a model: a path, or the newest snapshot in the Hugging Face cache; empty if absent."""
    path = os.path.expanduser(model)
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    around = dict(os.environ, **env)
    home = around.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = around.get("HF_HUB_CACHE") or os.path.join(os.path.expanduser(home), "hub")
    snapshots = os.path.join(os.path.expanduser(cache), "models--" + model.replace("/", "--"), "snapshots")
    try:
        found = [os.path.join(snapshots, one) for one in os.listdir(snapshots)]
    except OSError:
        return ""
    found = [folder for folder in found if os.path.isfile(os.path.join(folder, "config.json"))]
    return max(found, key=os.path.getmtime, default="")


def _named(folder: str) -> List[str]:
    """Return the weight files that must be there: those of the index, else those that lie there."""
    for index in INDEXES:
        path = os.path.join(folder, index)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                named: Set[str] = set(json.load(file)["weight_map"].values())
            return sorted(named)
    return sorted(one for one in os.listdir(folder) if one.endswith(WEIGHTS))


def _weigh(name: str, folder: str, names: List[str]) -> Gate:
    absent, short, total = [], [], 0
    for one in names:
        path = os.path.join(folder, one)
        try:
            size = os.stat(path).st_size
        except OSError:
            absent.append(one)
            continue
        total += size
        wanted = _whole_bytes(path) if one.endswith(".safetensors") else max(size, 1)
        if not wanted:
            short.append("%s has no header of a weight file" % one)
        elif size != wanted:
            short.append("%s has %d of %d bytes" % (one, size, wanted))
    trouble: List[str] = []
    if absent:
        trouble.append("%d of %d weight files are not there: %s" % (len(absent), len(names), _some(absent)))
    if short:
        trouble.append("%d are not whole: %s" % (len(short), _some(short)))
    if trouble:
        return Gate(name, False, printable("; ".join(trouble), 400), "download them again, or copy them to the end")
    return Gate(name, True, "%s: %d weight files, %.1f GiB, whole" % (folder, len(names), total / GIB))


def _whole_bytes(path: str) -> int:
    """Return the size that a safetensors file's own header gives it; 0 where it has none that makes sense."""
    try:
        with open(path, "rb") as file:
            head = file.read(safetensors.LENGTH_BYTES)
            length = safetensors.header_bytes(head)
            if len(head) < safetensors.LENGTH_BYTES or length > safetensors.MAX_HEADER_BYTES:
                return 0
            header: Dict[str, Any] = json.loads(file.read(length))
        ends = [about["data_offsets"][1] for key, about in header.items() if key != safetensors.METADATA]
        return safetensors.LENGTH_BYTES + length + int(max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return 0


def _some(texts: List[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (", and %d more" % (len(texts) - SHOWN) if len(texts) > SHOWN else "")
