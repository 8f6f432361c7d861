"""What a launch needs of the host, each with what was found and what to do about it."""

from backend.agent.gates.checking import check

__all__ = ["check"]
