"""Which samples of a corpus are wanted, and in which order."""

from __future__ import annotations

import json
import os
import random
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.extraction.corpus import Corpus

MAX_LISTED = 10
REHEARSED = 50
"""Samples of a rehearsal (DESIGN section 7)."""

_SEED = 8


class SelectionError(Exception):
    """Samples that were named and are not in the corpus."""


def order_of(text: str) -> str:
    """Check the word of --order: corpus, shortest, longest, or seed:N. Raises ValueError."""
    if not re.fullmatch(r"corpus|shortest|longest|seed:\d+", text):
        raise ValueError(text)
    return text


def choose(corpus: Corpus, only: str | None, order: str, limit: int | None) -> list[int]:
    """Return the wanted samples in order: named, then ordered, then the first `limit`. Raises SelectionError."""
    chosen = list(range(len(corpus))) if only is None else _named(corpus, only)
    if order == "shortest":
        chosen.sort(key=lambda index: (corpus.tokens(index), index))
    elif order == "longest":
        chosen.sort(key=lambda index: (-corpus.tokens(index), index))
    elif order.startswith("seed:"):
        random.Random(int(order.partition(":")[2])).shuffle(chosen)
    return chosen if limit is None else chosen[:limit]


def rehearsed(missing: Sequence[int]) -> list[int]:
    """Return what a rehearsal takes: a fair choice of lengths, the same again where it is repeated."""
    if len(missing) <= REHEARSED:
        return list(missing)
    return sorted(random.Random(_SEED).sample(missing, REHEARSED), key=missing.index)


def _named(corpus: Corpus, only: str) -> list[int]:
    """Resolve a list of ids and #INDEX, or a file of one a line, in corpus order. failed.jsonl is such a file."""
    words = _words_of_file(only) if os.path.exists(only) else [word.strip() for word in only.split(",")]
    words = [word for word in words if word]
    numbers = {int(word[1:]) for word in words if re.fullmatch(r"#\d+", word)}
    names = {word for word in words if not re.fullmatch(r"#\d+", word)}
    chosen = {number for number in numbers if number < len(corpus)}
    lacking = [f"#{number}" for number in sorted(numbers - chosen)]
    if names:
        found = [(row.id, row.index) for row in map(corpus.row, range(len(corpus))) if row.id in names]
        chosen.update(index for _, index in found)
        lacking += sorted(names - {name for name, _ in found})
    if lacking or not chosen:
        more = f" and {len(lacking) - MAX_LISTED} more" if len(lacking) > MAX_LISTED else ""
        listed = ", ".join(lacking[:MAX_LISTED]) + more
        raise SelectionError(f"--only: not in the corpus: {listed or only}; name ids, #INDEX from 0, or a file of them")
    return sorted(chosen)


def _words_of_file(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [_word(line.strip()) for line in file]


def _word(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return f"#{int(json.loads(line)['index'])}"
    except (ValueError, KeyError, TypeError):
        return line
