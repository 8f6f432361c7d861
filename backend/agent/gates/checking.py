"""What a launch needs of the host, each with what was found and what to do about it.

A gate whose fact cannot be read is not open: `ok` is None, with the reason. Nothing here raises.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional

from backend.agent import logind, serverlook
from backend.agent.gates import audited, model, others, places, port, predicted, program
from backend.agent.runs import RunStore
from backend.agent.seam import Machine
from backend.wire import CLEAN, LIMITED, NOT_CLEAN, UNHEALTHY, Gate, Receipt, printable

PATIENCE_S = 10.0
"""How long a filesystem may take to answer: a dead network filesystem never does."""

MODEL_S, PREDICT_S = 30.0, 30.0
"""A model has hundreds of files, whose heads are read; a corpus without a manifest is read in part."""


def check(
    machine: Machine,
    requirements: Dict[str, Any],
    verify: Optional[Callable[[], Receipt]] = None,
    store: Optional[RunStore] = None,
) -> List[Gate]:
    """Check every requirement (docs/architecture.md, `requirements`) and return one gate for each.

    `verify` looks at the GPUs at this moment; a limited verdict opens the gate only with `accept_limited` in
    the requirements. Requirements that are empty or absent make no gate.
    """
    gates: List[Optional[Gate]] = []
    if requirements.get("others"):
        gates.append(_safely(others.NAME, lambda: others.check(_known(store), requirements["others"])))
    if requirements.get("clean_gpus"):
        gates.append(_safely("clean GPUs", lambda: _clean(requirements, verify)))
    for path in _listed(requirements, "paths"):
        gates.append(_in_time("path %s" % printable(str(path), 200), _bind(places.path, path)))
    if requirements.get("model"):
        gates.append(_in_time("model", _bind(_model, requirements), MODEL_S))
    gates += _rooms(requirements)
    if requirements.get("port"):
        gates.append(_in_time("port", _bind(port.check, requirements["port"])))
    python, modules = requirements.get("python"), _listed(requirements, "modules")
    if python or modules:
        call = _bind(program.check, python or "python3", modules, requirements.get("env") or {})
        gates.append(_in_time("program", call, 2 * program.PATIENCE_S))
    if requirements.get("server"):
        gates.append(_in_time("server", _bind(serverlook.check, str(requirements["server"])), serverlook.PATIENCE_S))
    if requirements.get("audited"):
        gates.append(_in_time("audit", lambda: audited.check(_known(store), str(requirements["audited"]))))
    gates.append(_in_time(logind.NAME, logind.check))
    return [gate for gate in gates if gate is not None]


def _rooms(requirements: Dict[str, Any]) -> List[Optional[Gate]]:
    """Check every place that must have room."""
    gates: List[Optional[Gate]] = []
    for item in _listed(requirements, "disk"):
        path, wanted = item if isinstance(item, (list, tuple)) and len(item) == 2 else (item, None)
        gates.append(_in_time("disk %s" % printable(str(path), 200), _bind(places.room, path, wanted)))
    if requirements.get("predict"):
        gates.append(_in_time("disk", _bind(predicted.check, requirements["predict"]), PREDICT_S))
    if requirements.get("shm_bytes"):
        gates.append(_in_time(places.SHM, _bind(places.room, places.SHM, requirements["shm_bytes"])))
    if requirements.get("ram_bytes"):
        gates.append(_in_time(places.MEMORY, _bind(places.memory, requirements["ram_bytes"])))
    return gates


def _model(requirements: Dict[str, Any]) -> Gate:
    env = requirements.get("env") or {}
    return model.check(str(requirements["model"]), env, bool(requirements.get("dummy_weights")))


def _known(store: Optional[RunStore]) -> RunStore:
    if store is None:
        raise ValueError("nothing knows the runs of this host")
    return store


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
