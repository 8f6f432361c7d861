"""The embedded engine: the same words everywhere, and states that depend on every token before."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from backend.extraction.bfloat16 import bfloat16_words, to_float32
from backend.extraction.engines import EngineError, open_engine
from backend.extraction.engines.embedded import EmbeddedEngine

GOLDEN = "381115eea2b5a1cc3cc555bbe562495ea90cd2c3156b43245cbfb6cfa3b7ddca"
DIGEST = (
    "import hashlib; from backend.extraction.engines import open_engine;"
    "s = open_engine('embedded').states([(7 * i * i + 3) % 4096 for i in range(600)]);"
    "print(hashlib.sha256(s.aux.tobytes() + s.last.tobytes()).hexdigest())"
)


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    return EmbeddedEngine()


def test_shapes_and_finite_values(engine: EmbeddedEngine) -> None:
    states = engine.states([5, 6, 7])
    assert (states.aux.shape, states.last.shape) == ((3, 3 * 64), (3, 64))
    assert (states.aux.dtype, states.last.dtype) == (np.uint16, np.uint16)
    assert not ((states.aux & 0x7FFF) >= 0x7F80).any()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_words_are_the_same_whatever_the_threads(threads: str) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GOLDEN


def test_a_longer_sample_goes_on_from_a_shorter_one(engine: EmbeddedEngine) -> None:
    """Causal, and no matter in which blocks the rows are computed."""
    ids = [(31 * i + 5) % 4096 for i in range(700)]
    long, short = engine.states(ids), engine.states(ids[:130])
    assert np.array_equal(long.aux[:130], short.aux)
    assert np.array_equal(long.last[:130], short.last)


def test_every_token_before_matters(engine: EmbeddedEngine) -> None:
    ids = [(31 * i + 5) % 4096 for i in range(60)]
    states = engine.states(ids)
    for place in (0, 20, 58):
        other = engine.states([*ids[:place], ids[place] ^ 1, *ids[place + 1 :]])
        assert np.array_equal(other.last[:place], states.last[:place])
        assert not np.array_equal(other.last[place], states.last[place])
        assert not np.array_equal(other.last[-1], states.last[-1])
        assert not np.array_equal(other.aux[-1], states.aux[-1])
    swapped = engine.states([ids[1], ids[0], *ids[2:]])
    assert not np.array_equal(swapped.last[-1], states.last[-1])


def test_the_three_points_differ(engine: EmbeddedEngine) -> None:
    first, second, third = np.split(engine.states([1, 2, 3]).aux, 3, axis=1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)


@pytest.mark.parametrize("ids", [[], [-1], [4096], [[1, 2]]])
def test_what_it_cannot_compute_is_refused(engine: EmbeddedEngine, ids: list[int]) -> None:
    with pytest.raises(EngineError):
        engine.states(ids)


def test_rounding_is_half_to_even() -> None:
    values = {1.0: 0x3F80, -2.0: 0xC000, 1.00390625: 0x3F80, 1.01171875: 0x3F82, 0.0: 0, float("inf"): 0x7F80,
              1e39: 0x7F80, float("nan"): 0x7FC0, 3.4e38: 0x7F80}  # fmt: skip
    words = bfloat16_words(np.array(list(values)))
    assert words.tolist() == list(values.values())
    assert np.array_equal(bfloat16_words(to_float32(words)), words)


@pytest.mark.torch
def test_rounding_is_torch_s() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(100_000) * 10.0 ** np.arange(-20, 30, 0.0005)
    words = torch.from_numpy(values).to(torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16_words(values), words)


def test_an_engine_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="there is embedded"):
        open_engine("sgl")
