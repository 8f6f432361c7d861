"""What of a sample is kept, and whether anything in it is trained on."""

from __future__ import annotations

from typing import NamedTuple

POLICIES = ("cut", "drop")


class Verdict(NamedTuple):
    """The sample that is left, and what became of it: kept, cut, dropped (too long) or untrained."""

    input_ids: list[int]
    loss_mask: list[int]
    what: str
    why: str = ""


def judge(ids: list[int], mask: list[int], max_tokens: int | None, too_long: str) -> Verdict:
    """Apply the length policy, then see whether the mask still trains on anything."""
    tokens = len(ids)
    over = max_tokens is not None and tokens > max_tokens
    if over and too_long == "drop":
        return Verdict(ids, mask, "dropped", f"{tokens:,} tokens, over {max_tokens:,}")
    if not trains(mask):
        return Verdict(ids, mask, "untrained", _nothing(mask))
    if not over:
        return Verdict(ids, mask, "kept")
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    if not trains(mask):
        return Verdict(ids, mask, "untrained", f"what it would be trained on lies beyond {max_tokens:,} tokens")
    return Verdict(ids, mask, "cut", f"{tokens:,} tokens cut to {max_tokens:,}")


def trains(mask: list[int]) -> bool:
    """Say whether a mask trains on anything: SpecForge's reader sets the last value to 0 (facts: extraction, 2a)."""
    return any(mask[:-1])


def _nothing(mask: list[int]) -> str:
    return (
        "its loss mask is 1 for its last token alone, which is not trained" if any(mask) else "its loss mask is all 0"
    )
