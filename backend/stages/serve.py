"""A serve stage: how its launcher is called (backend.extraction.serving)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.stages.definition import Stage

DEFAULT_PORT = 30000
DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"

DEFAULT_STAGING_GIB = 8.0
"""The launcher's own default (backend.extraction.serving.serve)."""

LEAST_GRACE_S = 40.0
"""A large server takes this long to let go of its pinned memory; a stage may ask for more, never for less."""

KILL_SHARE = 0.7
"""Of the grace, what the server gets before its launcher kills it: the rest is for clearing up after it."""


def serve_grace_s(stage: Stage) -> float:
    """Return the seconds from the request to stop to the kill."""
    return max(stage.grace_s, LEAST_GRACE_S)


def serve_shm_gib(stage: Stage) -> float:
    """Return the GiB that must be free in /dev/shm: the staging lies there, and NCCL wants some too."""
    return max(stage.shm_gib, stage.staging_gib or DEFAULT_STAGING_GIB)


def serve_ram_gib(stage: Stage) -> float:
    """Return the GiB of memory that must be free: what lies in /dev/shm is memory too."""
    return max(stage.ram_gib, serve_shm_gib(stage))


def serve_port(stage: Stage) -> int:
    """Return the port that the server will listen on."""
    return stage.port or DEFAULT_PORT


def serve_argv(stage: Stage) -> list[str]:
    """Return the launcher's words, its role first. What the stage leaves out is the launcher's to decide."""
    words = ["serve", "--model", stage.model or "", "--points", ",".join(map(str, sorted(stage.points)))]
    words += ["--port", str(serve_port(stage)), "--grace-s", f"{KILL_SHARE * serve_grace_s(stage):g}"]
    for key in ("tp", "mem_fraction", "staging_gib", "ready_timeout_s"):
        value = getattr(stage, key)
        words += [f"--{key.replace('_', '-')}", f"{value:g}"] if value is not None else []
    words += [f"--entry={word}" for word in stage.entry]
    return [*words, "--", *stage.arguments]
