"""The draft vocabulary: the tokens that are trained on most, and the maps to and from the target's.

`d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` says which target ids are in the draft: the same
in both trainers, SpecForge as vocab_mapping.pt, speculators as two .npy files (facts: extraction, 2a and 2b).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from backend.extraction.readshard import ShardFolder


class VocabularyMap(NamedTuple):
    """int64 [draft size] offsets, bool [target size], and what part of the trained tokens the draft can say."""

    d2t: NDArray[np.int64]
    t2d: NDArray[np.bool_]
    covered: float


def count_trained(folder: ShardFolder) -> NDArray[np.int64]:
    """Count every token that is trained on, over the whole folder. Raises ShardError."""
    counts = np.zeros(folder.vocab_size, np.int64)
    for entry in folder.entries:
        ids, mask = folder.read_tokens(entry)
        add_trained(counts, ids, mask)
    return counts


def add_trained(counts: NDArray[np.int64], ids: NDArray[np.int64], mask: NDArray[np.int64]) -> None:
    """Add the trained tokens of one sample."""
    counts += np.bincount(ids[mask == 1], minlength=counts.size)


def vocabulary_map(counts: NDArray[np.int64], draft_size: int) -> VocabularyMap:
    """Choose the commonest tokens, the lower id first among equals. Raises ValueError where there are too few."""
    if not 0 < draft_size <= counts.size:
        raise ValueError(f"a draft vocabulary of {draft_size:,} tokens: the target has {counts.size:,}")
    order = np.lexsort((np.arange(counts.size), -counts))
    chosen = np.sort(order[:draft_size])
    t2d = np.zeros(counts.size, np.bool_)
    t2d[chosen] = True
    total = int(counts.sum())
    covered = float(counts[chosen].sum() / total) if total else 0.0
    return VocabularyMap((chosen - np.arange(draft_size)).astype(np.int64), t2d, covered)
