"""Preparations for tests: datasets written, prepared in this process, and read back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from backend.extraction.prepare.main import main

if TYPE_CHECKING:
    from pathlib import Path


def write_lines(path: Path, records: list[Any]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """Return a record of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def prepare(out: Path, *words: object) -> int:
    """Prepare with the tokenizer of bytes, and return the exit code."""
    return main(["--out", str(out), "--tokenizer", "bytes", *map(str, words)])


def prepared(out: Path, *words: object) -> dict[str, Any]:
    """Prepare, and return the manifest. It must succeed."""
    assert prepare(out, *words) == 0
    return manifest(out)


def manifest(out: Path) -> dict[str, Any]:
    """Read the manifest."""
    found: dict[str, Any] = json.loads((out / "manifest.json").read_bytes())
    return found


def corpus(out: Path) -> list[dict[str, Any]]:
    """Read the corpus."""
    return lines(out / "corpus.jsonl")


def notes(out: Path) -> list[dict[str, Any]]:
    """Read the notes."""
    return lines(out / "notes.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, which end at LF alone."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def answer(sample: dict[str, Any]) -> str:
    """Return the text that a sample of bytes is trained on."""
    values = range(len(sample["input_ids"]))
    return bytes(
        sample["input_ids"][n] for n in values if sample["loss_mask"][n] and sample["input_ids"][n] < 256
    ).decode()
