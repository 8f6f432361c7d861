"""A tiny transformer in numpy: the same tokens give the same words on every machine.

Its states depend on every token before, so that a torn, mixed-up or shifted sample is found by computing it
again. Weights come from a counter and a mixing function, never from a random generator whose stream a
release may change. Everything is computed in float64: what a BLAS, a block size or a thread count changes
lies ten orders of magnitude below a bfloat16's last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.bfloat16 import bfloat16_words
from backend.extraction.engines import EngineError, States

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HIDDEN = 64
LAYERS = 8
HEADS = 2
SLOPES = (0.0, 0.125)
"""What a head takes off a score for each token of age. Without the 0, far tokens would leave no trace in the words."""

INNER = 128
VOCAB = 4096
POINTS: tuple[int, ...] = (2, LAYERS // 2, LAYERS - 3)
"""SGLang's default for EAGLE-3, by point: 2, n/2, n-3 (facts: extraction, 1f)."""

_QUERY_ROWS = 512
"""Rows of attention at a time: bounds the scores of an 8,192-token sample to 128 MiB."""


class EmbeddedEngine:
    """The engine of the demo and the tests."""

    name = "embedded"
    model = f"embedded-1 (seed 8, {LAYERS} layers, hidden {HIDDEN}, vocabulary {VOCAB})"
    hidden_size = HIDDEN
    vocab_size = VOCAB
    capture_points = POINTS

    def __init__(self) -> None:
        self._embeddings = _weights(0, VOCAB, HIDDEN, 1.0)
        self._layers = [_Layer(10 * (number + 1)) for number in range(LAYERS)]
        self._final_norm: NDArray[np.float64] = 1.0 + _weights(1, 1, HIDDEN, 0.5)[0]

    def states(self, input_ids: Sequence[int]) -> States:
        """Compute one sample. Raises EngineError where an id is outside the vocabulary."""
        ids = np.asarray(input_ids, dtype=np.int64)
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= VOCAB:
            raise EngineError(f"ids must be a non-empty list within 0 to {VOCAB - 1}")
        stream = self._embeddings[ids]
        points = []
        for number, layer in enumerate(self._layers):
            if number in POINTS:
                points.append(stream)
            stream = layer.forward(stream)
        last = _norm(stream) * self._final_norm
        return States(bfloat16_words(np.concatenate(points, axis=1)), bfloat16_words(last))

    def about(self) -> dict[str, Any]:
        """Return nothing: what it is follows from its name."""
        return {}

    @property
    def final_norm(self) -> NDArray[np.float64]:
        """Return the weight of the final norm, [H]: an export divides by it."""
        return self._final_norm

    def close(self) -> None:
        """Do nothing: the weights go with the object."""


class _Layer:
    """Attention and a gated inner layer, each adding to the residual stream."""

    def __init__(self, seed: int) -> None:
        scale = (3.0 / HIDDEN) ** 0.5
        self._qkv = _weights(seed, HIDDEN, 3 * HIDDEN, scale)
        self._out = _weights(seed + 1, HIDDEN, HIDDEN, scale)
        self._up = _weights(seed + 2, HIDDEN, 2 * INNER, scale)
        self._down = _weights(seed + 3, INNER, HIDDEN, (3.0 / INNER) ** 0.5)

    def forward(self, stream: NDArray[np.float64]) -> NDArray[np.float64]:
        stream = stream + self._attention(_norm(stream)) @ self._out
        gate, value = np.split(_norm(stream) @ self._up, 2, axis=1)
        return stream + (gate / (1.0 + np.exp(-gate)) * value) @ self._down

    def _attention(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Attend to the tokens up to each one; one head forgets with age, the other never does."""
        length, width = x.shape[0], HIDDEN // HEADS
        qkv = (x @ self._qkv).reshape(length, 3, HEADS, width)
        out = np.empty((length, HIDDEN))
        for first in range(0, length, _QUERY_ROWS):
            end = min(first + _QUERY_ROWS, length)
            ages = np.arange(first, end, dtype=np.float64)[:, None] - np.arange(end)[None, :]
            future = np.where(ages < 0, np.inf, 0.0)
            forgetting = [future + slope * ages for slope in SLOPES]
            for head in range(HEADS):
                q, k, v = (np.ascontiguousarray(qkv[:end, part, head]) for part in range(3))
                scores = q[first:] @ k.T * width**-0.5
                scores -= forgetting[head]
                scores -= scores.max(axis=1, keepdims=True)
                weights = np.exp(scores, out=scores)
                attended = weights @ v / weights.sum(axis=1, keepdims=True)
                out[first:end, head * width : (head + 1) * width] = attended
        return out


def _norm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return scaled


def _weights(seed: int, rows: int, columns: int, scale: float) -> NDArray[np.float64]:
    """Return weights within +-scale: splitmix64 of a counter, its top 53 bits as a fraction."""
    with np.errstate(over="ignore"):
        z = np.arange(rows * columns, dtype=np.uint64) + np.uint64((seed + 8) << 40)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    fraction = (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return ((2.0 * fraction - 1.0) * scale).reshape(rows, columns)
