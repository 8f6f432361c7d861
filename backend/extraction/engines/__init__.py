"""What an extraction asks of the model that computes the states, and the engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

NAMES = ("embedded", "sglang")

CONVENTION = "capture point k is the residual stream entering layer k (0 is the embeddings), before any norm"
"""Written beside the points, because systems count them differently by one (facts: extraction, 1f)."""


class States(NamedTuple):
    """The states of one sample as bfloat16 words (uint16).

    `aux` is [L, K x H]: the capture points side by side, lowest first. `last` is [L, H], after the final
    norm.
    """

    aux: NDArray[np.uint16]
    last: NDArray[np.uint16]


class EngineError(Exception):
    """One sample could not be computed; the text says why. The next one may work."""


class EngineRefused(Exception):
    """The engine must not be used as it is; the text says why and what to do. Nothing was extracted."""


class Engine(Protocol):
    """A model. `model` names its weights exactly: a resumed extraction refuses another one."""

    name: str
    model: str
    hidden_size: int
    vocab_size: int
    capture_points: tuple[int, ...]

    def about(self) -> dict[str, Any]:
        """Return what data_config.json should say of the engine beside this."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds."""
        ...


class Computing(Engine, Protocol):
    """A model in this process."""

    def states(self, input_ids: Sequence[int]) -> States:
        """Compute one sample. Raises EngineError where this sample cannot be computed."""
        ...


def open_engine(name: str) -> Computing:
    """Return the engine of this name that computes here. Raises ValueError naming those that exist."""
    if name == "embedded":
        from backend.extraction.engines.embedded import EmbeddedEngine

        return EmbeddedEngine()
    raise ValueError(f"no engine is called {name!r}; there is {', '.join(NAMES)}")
