"""What an audit stage runs: a role of the agent's own program, so that the host needs nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.wire import AGENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.stages.definition import Stage


def audit_argv(stage: Stage, roots: Sequence[str]) -> list[str]:
    """Return the whole argv. `roots` are the folders whose files may be inspected on that host."""
    argv = [AGENT, "audit", stage.folder]
    for option, value in (("--corpus", stage.corpus), ("--quarantine", stage.quarantine)):
        argv += [option, value] if value else []
    argv += ["--max-tokens", str(stage.max_tokens)] if stage.max_tokens else []
    argv += ["--deep"] if stage.deep else []
    for root in roots:
        argv += ["--root", root]
    return [*argv, *stage.arguments]
