"""The chain of a host: which steps in which order, and what its driver is told of each (backend/agent/pipeline)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from backend.stages.extract import server_of
from backend.stages.stages import build_spec, placed, requirements
from backend.wire import AGENT, CHAIN_ENV, PIPELINE, RESET, SCHEMA, RunSpec, plain

if TYPE_CHECKING:
    from backend.config import Config
    from backend.stages.definition import Stage

READY_S = 1800.0
"""How long a service of one's own may take to be up, where its stage does not say."""

STOP_S, RESET_S = 60.0, 900.0
"""What a stop of the chain may take beside its stage's grace: to settle, and for a reset to come to its verdict."""

MOST_BYTES = 120 * 1024
"""A value of the environment may have 128 KiB (Linux, MAX_ARG_STRLEN)."""


class ChainError(ValueError):
    """A chain that cannot be run; the text is for the operator."""


def chain_names(config: Config, host: str) -> list[str]:
    """Return the names of a host's steps, each once: `reset`, `reset:2` and so on.

    Where the host's `chain` does not say them, they are the stages that may run on it in the order of the file, and a
    reset before each that needs clean GPUs.
    """
    names: list[str] = list(config.hosts[host].chain)
    if not names:
        for name, stage in config.stages.items():
            if not stage.hosts or host in stage.hosts:
                names += [RESET, name] if stage.clean_gpus else [name]
    seen: dict[str, int] = {}
    steps = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        steps.append(name if seen[name] == 1 else f"{name}:{seen[name]}")
    return steps


def chain_order(config: Config, host: str, start: str, policy: dict[str, Any], forced: str = "") -> dict[str, Any]:
    """Return what the driver is told, ready for JSON. Raises ChainError for an empty chain or an unknown start."""
    names = chain_names(config, host)
    if not names:
        raise ChainError(f"the configuration has no stage for {host}")
    if start and start not in names:
        raise ChainError(f"`{start}` is no step of the chain of {host}; steps: {', '.join(names)}")
    roots = config.hosts[host].roots
    return {
        "schema": SCHEMA,
        "steps": [_step(config, name, roots) for name in names],
        "start": names.index(start) if start else 0,
        "policy": policy,
        "forced": forced,
    }


def _step(config: Config, step: str, roots: list[str]) -> dict[str, Any]:
    name = step.partition(":")[0]
    if name == RESET:
        return {"name": step, "kind": RESET}
    stage: Stage = config.stages[name]
    return {
        "name": step,
        "kind": stage.kind,
        "spec": plain(build_spec(name, stage, "", roots=roots)),
        "requirements": requirements(stage, name),
        "service": stage.serves,
        "ready_url": stage.ready_url,
        "ready_timeout_s": (stage.ready_timeout_s or READY_S) + (STOP_S if stage.kind == "serve" else 0.0),
        "needs_service": bool(server_of(stage)),
        "outputs": [placed(stage, path) for path in stage.outputs],
    }


def chain_spec(order: dict[str, Any], run_id: str) -> RunSpec:
    """Return the run that drives a chain. Raises ChainError where the chain is too long to be handed over."""
    text = json.dumps(order, separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise ChainError(f"the chain takes {len(text):,} bytes, over {MOST_BYTES:,}: shorten its commands")
    steps = order["steps"][order["start"] :]
    longest = max([float(step["spec"]["grace_s"]) for step in steps if step["kind"] != RESET], default=0.0)
    grace_s = STOP_S + max(longest, RESET_S if any(step["kind"] == RESET for step in steps) else 0.0)
    label = "chain: " + ", ".join(step["name"] for step in steps)
    return RunSpec(run_id, PIPELINE, [AGENT, PIPELINE], env={CHAIN_ENV: text}, label=label, grace_s=grace_s,
                   forced=order["forced"], starts_runs=True)  # fmt: skip
