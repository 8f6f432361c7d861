"""Extractions for tests: small corpora, real processes, and shards read back without torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.agent.shards.show import show
from backend.shardfmt import layout

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PROGRAM = "import sys; from backend.extraction.extract import main; sys.exit(main(sys.argv[1:]))"
DTYPES = {"int64": np.int64, "bfloat16": np.uint16}


def write_corpus(path: Path, samples: int, tokens: int = 40) -> list[dict[str, Any]]:
    """Write a corpus of samples of up to `tokens` tokens and return its records."""
    chance = random.Random(samples)
    records = []
    for number in range(samples):
        length = chance.randint(1, tokens)
        ids = [chance.randrange(4096) for _ in range(length)]
        records.append({"id": f"s{number}", "input_ids": ids, "loss_mask": [n % 2 for n in range(length)]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def start(corpus: Path, out: Path, *more: str, run_dir: Path | None = None) -> subprocess.Popen[str]:
    """Start an extraction in a process of its own."""
    environment = {**os.environ, **({"EIGHTZEROS_RUN_DIR": str(run_dir)} if run_dir else {})}
    argv = [sys.executable, "-c", PROGRAM, "--corpus", str(corpus), "--out", str(out), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end and return exit code, stdout and stderr."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def journal(out: Path) -> list[dict[str, Any]]:
    """Return the journal's samples; empty where there is none yet, without a line that is being written."""
    try:
        data = (out / layout.JOURNAL_NAME).read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.split(b"\n")[1:-1]]


def read_shard(path: Path) -> dict[str, NDArray[Any]]:
    """Read a shard's tensors by the offsets that `show` gives; bfloat16 as words."""
    found = {}
    for entry in show(str(path))["entries"]:
        total = int(np.prod(entry["shape"]))
        values = np.fromfile(path, DTYPES[entry["dtype"]], total, offset=entry["offset"])
        found[entry["key"]] = values.reshape(entry["shape"])
    return found


def check_folder(out: Path, records: list[dict[str, Any]], engine: Any, every: int = 1) -> None:
    """Check that each sample is there once, whole and right, and that nothing else is."""
    lines = journal(out)
    assert sorted(line["index"] for line in lines) == list(range(len(records)))
    there = sorted(path.relative_to(out).as_posix() for path in out.glob("rows_*/*"))
    assert there == sorted(line["file"] for line in lines)
    for line in lines[::every]:
        record, data = records[line["index"]], (out / line["file"]).read_bytes()
        assert (len(data), zlib.crc32(data)) == (line["bytes"], line["crc32"])
        assert (line["id"], line["tokens"]) == (record["id"], len(record["input_ids"]))
        shard, states = read_shard(out / line["file"]), engine.states(record["input_ids"])
        assert shard["input_ids"].tolist() == record["input_ids"]
        assert shard["loss_mask"].tolist() == record["loss_mask"]
        assert np.array_equal(shard["aux_hidden_state"][0], states.aux)
        assert np.array_equal(shard["hidden_state"][0], states.last)
