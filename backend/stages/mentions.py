"""Which stages of the configuration name a folder of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.stages.stages import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from backend.stages.definition import Stage

KEYS = ("out", "folder", "data", "corpus", "quarantine", "model")


def mentions(stages: Mapping[str, Stage], host: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield (stage, key) of each stage of a host that reads or writes a folder, or something in it."""
    for name, stage in stages.items():
        if stage.hosts and host not in stage.hosts:
            continue
        named = [(key, getattr(stage, key)) for key in KEYS]
        named += [(key, word) for key in ("inputs", "outputs") for word in getattr(stage, key)]
        for key, word in named:
            if word and (placed(stage, word).rstrip("/") + "/").startswith(path.rstrip("/") + "/"):
                yield name, key
