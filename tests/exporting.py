"""Exports for tests: a folder of shards, an export in this process, and rows read back without its code."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.main import main
from tests.extracting import write_corpus

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PROGRAM = "import sys; from backend.extraction.main import main; sys.exit(main(sys.argv[1:]))"
ITEMS = {"I64": np.int64, "BF16": np.uint16, "F32": np.float32}


def shards(folder: Path, samples: int, tokens: int = 40) -> list[dict[str, Any]]:
    """Extract so many samples with the embedded engine into FOLDER/shards, and return the corpus's records."""
    folder.mkdir(exist_ok=True)
    records = write_corpus(folder / "corpus.jsonl", samples, tokens)
    assert main(["--corpus", str(folder / "corpus.jsonl"), "--out", str(folder / "shards")]) == 0
    return records


def export(*words: object) -> int:
    """Export, and return the exit code."""
    return main(["export", *map(str, words)])


def start(*words: object) -> subprocess.Popen[str]:
    """Start an export in a process of its own."""
    argv = [sys.executable, "-c", PROGRAM, "export", *map(str, words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read a safetensors file's tensors; bfloat16 as words."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    found, end = {}, 0
    for key, entry in json.loads(data[8 : 8 + size]).items():
        begin, stop = entry["data_offsets"]
        values = np.frombuffer(data[8 + size + begin : 8 + size + stop], ITEMS[entry["dtype"]])
        found[key], end = values.reshape(entry["shape"]), max(end, stop)
    assert len(data) == 8 + size + end, "a safetensors file ends with its last tensor"
    return found


def write_safetensors(path: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> None:
    """Write tensors, each with the name of its type."""
    header, body = {}, b""
    for key, (dtype, values) in tensors.items():
        raw = values.tobytes()
        header[key] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def floats(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bfloat16's words as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def check_rows(out: Path, records: list[dict[str, Any]], engine: Any) -> dict[str, Any]:
    """Check that every row is there, and what computing it again gives; return export.json."""
    found: dict[str, Any] = json.loads((out / "export.json").read_bytes())
    names = sorted(path.name for path in (out / "hidden_states").iterdir())
    assert names == sorted(f"hs_{row}.safetensors" for row in range(len(records)))
    for row, index in enumerate(found["rows"]):
        tensors = read_safetensors(out / "hidden_states" / f"hs_{row}.safetensors")
        states = engine.states(records[index]["input_ids"])
        assert tensors["token_ids"].tolist() == records[index]["input_ids"]
        assert tensors["hidden_states"].shape == (len(records[index]["input_ids"]), 4, engine.hidden_size)
        assert np.array_equal(tensors["hidden_states"][:, :3].reshape(states.aux.shape), states.aux)
        check_before(tensors["hidden_states"][:, 3], states.last, engine.final_norm)
    return found


def check_before(before: NDArray[np.uint16], last: NDArray[np.uint16], weight: NDArray[Any]) -> None:
    """Check that norming the exported state gives the final one again, within bfloat16's roundings (2 x 2^-8)."""
    values = floats(before).astype(np.float64)
    again = values / np.sqrt((values * values).mean(axis=1, keepdims=True)) * weight
    assert np.all(np.abs(again - floats(last)) <= 2**-7 * np.abs(floats(last)) + 1e-9)
