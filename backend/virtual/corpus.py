"""A small corpus of token ids for the virtual host: the same for the same numbers, on every machine."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from backend.extraction.engines.embedded import VOCAB

if TYPE_CHECKING:
    from pathlib import Path

SEED = 8
LONGEST, SHORTEST = 768, 128
HEADLESS_TOKENS = 48_000
CONSOLE_TOKENS = 400_000
"""How many tokens a corpus has about: seconds of work for the headless demo, a minute or two to look at."""


def write_corpus(path: Path, samples: int, tokens: int) -> int:
    """Write so many records as JSON lines and return their tokens, about `tokens` in all."""
    mean = max(SHORTEST, min(LONGEST, tokens // samples))
    chance, total = random.Random(SEED), 0
    with path.open("w", encoding="ascii") as file:
        for number in range(samples):
            length = chance.randint(mean // 2, mean + mean // 2)
            prompt = chance.randint(1, length // 2)
            ids = [chance.randrange(VOCAB) for _ in range(length)]
            mask = [0] * prompt + [1] * (length - prompt)
            record = {"id": f"virtual-{number:05d}", "input_ids": ids, "loss_mask": mask}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            total += length
    return total
