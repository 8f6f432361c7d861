"""A shuffle that is the same everywhere: it rests on a digest, not on a random generator that a release may change."""

from __future__ import annotations

from hashlib import blake2b


def shuffled(count: int, seed: int) -> list[int]:
    """Return the numbers below `count` in the order of this seed: sorted by the digest of seed and number."""
    key = b"eightzeros shuffle %d" % seed

    def rank(number: int) -> bytes:
        return blake2b(b"%d" % number, digest_size=16, key=blake2b(key, digest_size=32).digest()).digest()

    return sorted(range(count), key=rank)
