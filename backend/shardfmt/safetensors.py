"""The safetensors layout: eight bytes of length, a JSON header, then all tensors' data without a gap."""

from __future__ import annotations

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The reference loader's own limit."""

METADATA = "__metadata__"
"""The one key that is no tensor: a dictionary from text to text, nothing else."""


def header_bytes(head: bytes) -> int:
    """Return the length of the JSON header that the first eight bytes state."""
    return int.from_bytes(head[:LENGTH_BYTES], "little")


def looks_like(head: bytes) -> bool:
    """Say whether a file begins as safetensors do: the header must start with a brace."""
    return head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
