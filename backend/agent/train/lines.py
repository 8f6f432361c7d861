"""Metrics out of what trainers print, tolerant of every line that is not theirs.

Read are the lines of SpecForge 0.2 (`step 10: {'loss': 9.8, ...}`), of SpecForge before that (`Eval - Step 500
[501/10], position 0,  Acc: 0.71` and tqdm's bar of an epoch), and of speculators (`train/loss=..., global_step=4`,
which a logger of a fixed width breaks over many lines). A line that is cut short says nothing.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional

from backend.agent.train.metrics import EVAL, TRAIN, Update, Value, value_of

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?|nan|inf)"
_STEP = re.compile(r"step ([0-9]+): \{(.*)\}$")
_PAIR = re.compile(r"'([^']{1,80})': (?:\[([^\]]*)\]|(%s)(?=,|$))" % NUMBER)
_POSITION = re.compile(
    r"(Train|Eval) - Step ([0-9]+) \[[^\]]*\], position ([0-9]{1,2}), +(Acc|Acceptance Rate|pLoss): +(%s)$" % NUMBER
)
_BAR = re.compile(r"Training Epoch ([0-9]+): .*?\b([0-9]+)/([0-9]+) \[([^\]]*)\]$")
_POSTFIX = re.compile(r"\b(loss|acc)=(%s)(?=,|$)" % NUMBER)
_RANK = re.compile(r"\[(?:rank|default)?[0-9]{1,4}\]:\s?")
_LEVEL = re.compile(r"(?:\[[0-9:]{8}\]|          ) (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +(\S.*)$")
_SOURCE = re.compile(r"\s+\S+\.py:[0-9]+\s*$")
_BOXED = re.compile(r"([A-Za-z][\w/.-]*)=(%s)(?=,|$|\s)" % NUMBER)
_EPOCH = re.compile(r"Training epoch ([0-9]+)/([0-9]+) (started|completed)")
_LAST_KEY = re.compile(r"\bglobal_step=[0-9]+$")
CONTINUES = " " * 12
"""What a logger of a fixed width begins a broken line with, at least."""

MOST_PIECES = 200
_NAMES = {
    "acc": "accuracy", "avg_acc": "accuracy", "lr": "learning_rate", "grad_norm": "grad_norm", "loss": "loss",
    "avg_loss": "loss", "epoch": "epoch", "acceptance_rate": "acceptance", "simulated_acc_len": "accepted_tokens",
    "perf/global_samples_per_second": "samples_per_s",
    "perf/optimizer_step_time_s": "step_s", "tokens_per_s": "tokens_per_s",
}  # fmt: skip
_POSITIONS = {
    "acc": "accuracy", "acces": "accuracy", "per_position_acc": "accuracy", "full_acc": "accuracy",
    "cond_acc": "accuracy_given", "loss": "loss", "ploss": "loss", "plosses": "loss",
    "acceptance_rate": "acceptance", "acceptance_rates": "acceptance",
}  # fmt: skip
_SAID = {"Acc": "accuracy", "Acceptance Rate": "acceptance", "pLoss": "loss"}


class Bar(NamedTuple):
    """How far a progress bar of an epoch is."""

    epoch: int
    done: int
    total: int
    values: Dict[str, Value]


class Reader:
    """Reads one trainer's lines in their order.

    `bar` is the newest bar, `epochs` how many there will be and `epoch_steps` how many steps each has, 0 where nobody
    says.
    """

    def __init__(self) -> None:
        self.bar: Optional[Bar] = None
        self.epochs = self.epoch_steps = 0
        self._step = 0
        self._pieces: List[str] = []

    def take(self, line: str) -> List[Update]:
        """Take a line without its end and return what is known with it."""
        if self._pieces and line.startswith(CONTINUES):
            return self._more(line.strip())
        found = self._flush()
        line = _RANK.sub("", line, count=1) if _RANK.match(line) else line
        opened = _LEVEL.match(line)
        if opened:
            return found + self._more(_SOURCE.sub("", opened.group(1)).strip())
        return found + self._plain(line.strip())

    def end(self) -> List[Update]:
        """Return what the last lines said: nothing follows them."""
        return self._flush()

    def _plain(self, line: str) -> List[Update]:
        match = _STEP.match(line)
        if match:
            return _dictionary(int(match.group(1)), match.group(2))
        match = _POSITION.match(line)
        if match:
            kind, step, position, name, said = match.groups()
            return [Update(kind.lower(), int(step), {"%s/%d" % (_SAID[name], int(position)): value_of(said)})]
        match = _BAR.match(line)
        if match and int(match.group(3)):
            epoch, done, total = (int(match.group(at)) for at in (1, 2, 3))
            said = {_NAMES[key]: value_of(text) for key, text in _POSTFIX.findall(match.group(4) or "")}
            self.bar, self.epoch_steps = Bar(epoch, done, total, said), total
        return []

    def _more(self, text: str) -> List[Update]:
        match = _EPOCH.match(text)
        if match:
            self.epochs = int(match.group(2))
            if match.group(3) == "completed":
                self.epoch_steps = self._step // int(match.group(1))
        self._pieces.append(text)
        return self._flush() if _LAST_KEY.search(text) or len(self._pieces) > MOST_PIECES else []

    def _flush(self) -> List[Update]:
        text, self._pieces = " ".join(self._pieces), []
        said = dict(_BOXED.findall(text)) if "train/loss=" in text or "val/loss_epoch=" in text else {}
        if "val/loss_epoch" in said:  # of an epoch: it belongs to the step that was reached
            heard = {key[4:].replace("_epoch", ""): number for key, number in said.items() if key[:4] == "val/"}
            return [Update(EVAL, self._step, _named(heard))]
        if "train/loss" not in said or not said.get("global_step", "").isdigit():
            return []
        self._step = int(said.pop("global_step")) + 1  # it is counted from 0, and this one is done
        return [Update(TRAIN, self._step, _named({_inner(key): number for key, number in said.items()}))]


def _inner(key: str) -> str:
    for prefix in ("train/", "profile/"):
        if key.startswith(prefix):
            return key[len(prefix) :]
    return "lr" if key.startswith("lr/") else key


def _dictionary(step: int, text: str) -> List[Update]:
    """Read what Python prints of a dictionary, in which nan and inf may stand."""
    said: Dict[str, Dict[str, str]] = {TRAIN: {}, EVAL: {}}
    for key, several, one in _PAIR.findall(text):
        kind, _, name = key.partition("/") if key.startswith(("train/", "eval/")) else (TRAIN, "", key)
        if one:
            said[kind][name] = one
        for at, item in enumerate(several.split(",") if several.strip() else []):
            said[kind]["%s/%d" % (name, at)] = item.strip()
    named = [(kind, _named(pairs)) for kind, pairs in said.items()]
    return [Update(kind, step, values) for kind, values in named if values]


def _named(said: Dict[str, str]) -> Dict[str, Value]:
    """Give every number the name that it has here; one of no such name is left out."""
    values: Dict[str, Value] = {}
    for key, text in said.items():
        base, _, position = key.rpartition("/") if "/" in key else key.rpartition("_")
        name = _NAMES.get(key)
        if name is None and base in _POSITIONS and position.isdigit() and len(position) < 3:
            name = "%s/%d" % (_POSITIONS[base], int(position))
        if name is not None:
            try:
                values[name] = value_of(text)
            except ValueError:
                continue
    if "accuracy/0" in values:
        values["accuracy"] = values["accuracy/0"]  # elsewhere `acc` is the mean of all positions
    return values
