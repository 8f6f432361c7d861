"""A train stage: the trainer's own command line, started and watched by a role of the agent's program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from backend.wire import AGENT

if TYPE_CHECKING:
    from backend.stages.definition import Stage

LEAST_GRACE_S = 120.0
"""A trainer that is asked to end writes a checkpoint first; a stage may give it more time, never less."""

NEEDS = {
    "specforge": ["torch", "specforge>=0.2"],
    "speculators": ["torch", "transformers", "speculators>=0.9"],
}
"""What the interpreter must have. Older ones read other files (docs/datasets.md)."""

WIDTH = "240"
"""speculators breaks its lines at the width of a terminal, which a log is not: this many columns keep a step on two."""


def train_argv(stage: Stage) -> list[str]:
    """Return the whole argv: the watcher's role, what it is to know, and the trainer's own words."""
    order = {"out": stage.out, "data": stage.data, "max_steps": stage.max_steps or 0, "epochs": stage.epochs or 0}
    return [AGENT, "train", json.dumps(order), *_TRAINERS[stage.trainer](stage)]


def train_grace_s(stage: Stage) -> float:
    """Return the seconds from the request to stop to the kill."""
    return max(stage.grace_s, LEAST_GRACE_S) if stage.trainer else stage.grace_s


def train_env(stage: Stage) -> dict[str, str]:
    """Return the stage's environment, with what makes the trainer's output readable where the stage leaves it open."""
    return {"COLUMNS": WIDTH, **stage.env} if stage.trainer == "speculators" else dict(stage.env)


def _own(stage: Stage) -> list[str]:
    return list(stage.command)


def _specforge(stage: Stage) -> list[str]:
    """Return SpecForge's words: a file of its own settings, and what the stage says over it."""
    words = [stage.python, *(stage.entry or ["-m", "specforge.cli"]), "train", "--config", stage.config]
    words += [
        f"model.target_model_path={stage.model}",
        f"data.hidden_states_path={stage.data}",
        f"output_dir={stage.out}",
    ]
    for key, value in (("deployment.trainer.nproc_per_node", stage.gpus), ("training.max_steps", stage.max_steps),
                       ("training.num_epochs", stage.epochs)):  # fmt: skip
        words += [f"{key}={value}"] if value else []
    return [*words, *stage.arguments]


def _speculators(stage: Stage) -> list[str]:
    """Return speculators' words. A sample that is missing is an error: by default it would ask a server for it."""
    words = [stage.python]
    if stage.gpus and stage.gpus > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stage.gpus}"]
    words += stage.entry or ["-m", "speculators.train"]
    words += ["--config", stage.config] if stage.config else []
    words += ["--verifier-name-or-path", stage.model or "", "--data-path", stage.data, "--save-path", stage.out]
    words += ["--on-missing", "raise"]
    words += ["--target-layer-ids", *map(str, sorted(stage.points))] if stage.points else []
    words += ["--max-steps", str(stage.max_steps)] if stage.max_steps else []
    words += ["--epochs", str(stage.epochs)] if stage.epochs else []
    return [*words, *stage.arguments]


_TRAINERS = {"": _own, "specforge": _specforge, "speculators": _speculators}
