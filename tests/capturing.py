"""A forward pass as SGLang shows it to a hook, made of plain tensors, and states that say whose they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backend.extraction.capture.config import Config
from backend.extraction.capture.hook import Capture
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from backend.extraction.staging import Staging

HIDDEN = 4
POINTS = [2, 5]
RUN = "run7"
WIDTH = HIDDEN * len(POINTS)


@dataclass(frozen=True)
class Mode:
    """A forward mode."""

    extend: bool

    def is_extend(self) -> bool:
        return self.extend


@dataclass
class Rows:
    """One request's rows of a pass: `rows` of them, from `prefix` of its prompt on."""

    rid: str
    rows: int
    prefix: int = 0


def ids_of(rid: str, tokens: int) -> np.ndarray:
    """Return a prompt's ids: they differ between requests and places."""
    return np.arange(tokens, dtype=np.int64) * 7 + sum(rid.encode()) % 1000


def states_of(rid: str, tokens: int) -> np.ndarray:
    """Return [tokens, (points + 1) x hidden]: every value names its request, row and column."""
    columns = np.arange(WIDTH + HIDDEN, dtype=np.float32) / 64
    return (ids_of(rid, tokens).astype(np.float32)[:, None] + columns).astype(np.float32)


def pass_of(*rows: Rows, padding: int = 0, extend: bool = True) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the forward batch, aux and last of a pass with these rows and padding after them."""
    states = [states_of(r.rid, r.prefix + r.rows)[r.prefix :] for r in rows]
    states += [np.full((padding, WIDTH + HIDDEN), np.nan, np.float32)]
    ids = [ids_of(r.rid, r.prefix + r.rows)[r.prefix :] for r in rows] + [np.zeros(padding, np.int64)]
    joined = torch.from_numpy(np.concatenate(states))
    batch = SimpleNamespace(
        forward_mode=Mode(extend),
        rids=[r.rid for r in rows],
        input_ids=torch.from_numpy(np.concatenate(ids)),
        extend_seq_lens_cpu=[r.rows for r in rows] if extend else None,
        extend_prefix_lens_cpu=[r.prefix for r in rows] if extend else None,
    )
    return batch, joined[:, :WIDTH].contiguous(), joined[:, WIDTH:].contiguous()


@dataclass
class Stack:
    """A model's layer stack: captures once it was asked to, as EAGLE-3's code in SGLang does."""

    layers_to_capture: list[int] = field(default_factory=list)
    layers: list[None] = field(default_factory=lambda: [None] * 8)


class Server:
    """One rank of a server with the hook on its layer stack."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        raw = {"run": RUN, "folder": str(folder), "points": POINTS, "slots": 2, "writers": 2, **settings}
        self.hook = Capture(Config.of(raw), rank=0, writes=True)
        self.stack = Stack()

    def run(self, *rows: Rows, padding: int = 0, extend: bool = True, split: bool = False) -> torch.Tensor:
        """Run a pass; return what the server goes on with."""
        batch, aux, last = pass_of(*rows, padding=padding, extend=extend)
        captured: Any = list(aux.split(HIDDEN, dim=-1)) if split else aux
        output = (last, captured) if self.stack.layers_to_capture else last
        with torch.inference_mode():
            replaced = self.hook(self.stack, (batch.input_ids, None, batch), output)
        return output if replaced is None else replaced

    def warm_up(self) -> None:
        """Run the server's own first request."""
        self.run(Rows("HEALTH_CHECK", 3))

    def close(self) -> None:
        """End it."""
        self.hook.close()


def check(reader: Staging, rid: str) -> None:
    """Wait for a request and compare every value with what the model had."""
    until(lambda: rid in reader.look().whole)
    found, tokens = reader.open(rid), int(rid.rpartition("-")[2])
    want = states_of(rid, tokens)
    assert np.array_equal(found.ids, ids_of(rid, tokens))
    assert np.array_equal(found.aux, want[:, :WIDTH])
    assert np.array_equal(found.last, want[:, WIDTH:])
    assert (found.dtype, found.points, found.effective_layers) == ("float32", POINTS, POINTS)


def failure(reader: Staging, rid: str) -> str:
    """Wait for a request's failure and return its reason."""
    until(lambda: rid in reader.look().failed)
    reason = reader.reason(rid)
    assert reader.look().failed == []
    return reason


def failure_of(reader: Staging, rid: str) -> str:
    """Wait for one of several failures and return its reason."""
    until(lambda: rid in reader.look().failed)
    return reader.reason(rid)
