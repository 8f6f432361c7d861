"""data_config.json: what is in the folder and how it was made, for people and for the stages that follow."""

from __future__ import annotations

import json
import os
import platform
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.durable import replace_file
from backend.extraction.engines import CONVENTION
from backend.shardfmt import layout
from backend.wire import SCHEMA

if TYPE_CHECKING:
    from backend.extraction.corpus import Corpus
    from backend.extraction.engines import Engine
    from backend.extraction.journal import Journal


def describe(
    engine: Engine, corpus: Corpus, journal: Journal, state: str, failed: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the record. `state` is running, complete, or incomplete (stopped, limited, failed samples)."""
    entries = list(journal.entries.values())
    hidden, points = engine.hidden_size, list(engine.capture_points)
    return {
        "schema": SCHEMA,
        "state": state,
        "at": time.time(),
        "engine": engine.name,
        **engine.about(),
        "model": engine.model,
        "hidden_size": hidden,
        "vocab_size": engine.vocab_size,
        "capture_points": points,
        "capture_convention": CONVENTION,
        "format": f"torch zip, rows_A-B/data_N{journal.header.suffix}",
        "tensors": {
            layout.INPUT_IDS: {"dtype": "int64", "shape": ["tokens"]},
            layout.LOSS_MASK: {"dtype": "int64", "shape": ["tokens"]},
            layout.AUX_HIDDEN_STATE: {"dtype": "bfloat16", "shape": [1, "tokens", len(points) * hidden]},
            layout.HIDDEN_STATE: {"dtype": "bfloat16", "shape": [1, "tokens", hidden], "norm": "final"},
        },
        "corpus": {"path": corpus.path, "sha256": corpus.sha256, "bytes": corpus.bytes, "lines": corpus.lines,
                   "samples": len(corpus), "skipped_lines": [bad.line for bad in corpus.skipped]},
        "samples": len(entries),
        "tokens": sum(entry.tokens for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
        "failed": failed,
        "failed_file": layout.FAILED_NAME if failed else "",
        "checksums": {"file": layout.JOURNAL_NAME, "kind": "CRC-32 of each whole file"},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }  # fmt: skip


def write(out: str, record: dict[str, Any]) -> None:
    """Write the record, whole or not at all. Raises DiskFull or OSError."""
    replace_file(os.path.join(out, layout.CONFIG_NAME), json.dumps(record, indent=1).encode("ascii") + b"\n")
