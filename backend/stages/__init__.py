"""What each stage runs, needs, shows and leaves behind, and the chain that they make."""

from backend.stages.chain import ChainError, chain_names, chain_order, chain_spec
from backend.stages.mentions import mentions
from backend.stages.stages import EXTRACTOR, build_spec, requirements

__all__ = [
    "EXTRACTOR",
    "ChainError",
    "build_spec",
    "chain_names",
    "chain_order",
    "chain_spec",
    "mentions",
    "requirements",
]
