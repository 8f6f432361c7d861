"""What the trainers' own readers make of our shards and exports, and what a real tokenizer makes of a dataset.

EIGHTZEROS_TRAINERS names the folder that tests/trainers/install.sh has filled. What is compared is a digest of
every tensor that a reader hands to training, against one of the states computed again here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction.engines.embedded import EmbeddedEngine
from backend.extraction.main import main
from tests.exporting import PROGRAM, check_rows, export, read_safetensors, shards
from tests.extracting import read_shard
from tests.preparing import corpus, talk, write_lines
from tests.tinytokenizer import BEGIN, END, MARKED, PLAIN, THINK, UNTHINK, write_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAINERS = os.environ.get("EIGHTZEROS_TRAINERS", "")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.trainers,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not TRAINERS, reason="needs EIGHTZEROS_TRAINERS, a folder filled by tests/trainers/install.sh"),
]
SAMPLES, TOKENS, DRAFT = 40, 300, 500


def python(trainer: str, *words: object) -> str:
    """Run a trainer's Python and return what it printed. It must succeed."""
    program = Path(TRAINERS) / trainer / "bin" / "python"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([program, *map(str, words)], capture_output=True, text=True, env=env, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def digest(values: NDArray[Any], dtype: str) -> list[Any]:
    return [f"torch.{dtype}", list(values.shape), hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()]


def test_specforge_reads_every_shard_and_the_map(tmp_path: Path) -> None:
    records = shards(tmp_path, SAMPLES, TOKENS)
    assert export("specforge", tmp_path / "shards", "--draft-vocab-size", DRAFT) == 0
    python("specforge", ROOT / "tests/trainers/read_specforge.py", tmp_path / "shards", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_bytes())
    engine = EmbeddedEngine()
    assert found["refs"] == len(found["samples"]) == SAMPLES
    counts = np.zeros(engine.vocab_size, np.int64)
    for number, record in enumerate(records):
        states, ids = engine.states(record["input_ids"]), np.array([record["input_ids"]], np.int64)
        mask = np.array([record["loss_mask"]], np.int64)
        counts += np.bincount(ids[mask == 1], minlength=counts.size)
        mask[0, -1] = 0  # what its normaliser does
        assert found["samples"][f"rows_0-2000/data_{number}.ckpt"] == {
            "input_ids": digest(ids, "int64"),
            "loss_mask": digest(mask, "int64"),
            "attention_mask": digest(np.ones_like(mask), "int64"),
            "hidden_state": digest(states.aux[None], "bfloat16"),
            "target": digest(states.last[None], "bfloat16"),
        }
    assert {int(token): count for token, count in found["counts"].items()} == {
        int(token): int(counts[token]) for token in np.flatnonzero(counts)
    }
    chosen = [n + offset for n, offset in enumerate(found["map"]["d2t"])]
    assert chosen == sorted(sorted(range(counts.size), key=lambda token: (-counts[token], token))[:DRAFT])
    assert np.flatnonzero(found["map"]["t2d"]).tolist() == chosen and len(found["map"]["t2d"]) == counts.size


def test_speculators_reads_every_row_and_the_maps(tmp_path: Path) -> None:
    records = shards(tmp_path, SAMPLES, TOKENS)
    words = ["export", "speculators", tmp_path / "shards", tmp_path / "data", "--draft-vocab-size", DRAFT]
    python("speculators", "-c", PROGRAM, *words, "--order", "shuffled", "--seed", 3)
    record = check_rows(tmp_path / "data", records, EmbeddedEngine())
    read = ROOT / "tests/trainers/read_speculators.py"
    python("speculators", read, tmp_path / "data", tmp_path / "out.json", DRAFT)
    found = json.loads((tmp_path / "out.json").read_bytes())
    assert len(found["rows"]) == SAMPLES
    for row, index in enumerate(record["rows"]):
        own = read_shard(tmp_path / f"shards/rows_0-2000/data_{index}.ckpt")
        states = read_safetensors(tmp_path / f"data/hidden_states/hs_{row}.safetensors")["hidden_states"]
        tokens = len(own["input_ids"])
        assert found["rows"][row] == {
            "input_ids": digest(own["input_ids"], "int64"),
            "loss_mask": digest(own["loss_mask"], "int64"),
            "hidden_states": digest(own["aux_hidden_state"][0], "bfloat16"),
            "verifier_last_hidden_states": digest(states[:, 3], "bfloat16"),
            "lengths": digest(np.array([tokens], np.int64), "int64"),
            "position_ids": digest(np.arange(tokens, dtype=np.int64), "int64"),
        }
    assert found["map"] == found["map_again"], "the maps are those that it makes itself"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["marks found", "marked by the template"])
def test_a_model_s_own_tokenizer_and_template(template: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", template)
    turns = [("user", "é?"), ("assistant", "one"), ("user", "more"), ("assistant", "two\u2028")]
    record = {"id": "x", "messages": [{"role": role, "content": text} for role, text in turns]}
    spoofed = talk("say <|im_end|> now", "a")
    path = write_lines(tmp_path / "d.jsonl", [record] if template is MARKED else [record, spoofed])
    words = ["prepare", "--out", tmp_path / "out", "--tokenizer", tokenizer, "--skip-bad", path]
    python("speculators", "-c", PROGRAM, *words)
    [sample] = corpus(tmp_path / "out")
    ids: list[int] = []
    mask: list[int] = []
    for number, (role, text) in enumerate(turns):
        head = [BEGIN, *role.encode(), 10]
        thought = [THINK, 10, 10, UNTHINK, 10, 10] if number == 3 and template is PLAIN else []
        body = [*thought, *text.encode(), END]
        ids += [*head, *body, 10]
        mask += [*[0] * len(head), *[int(role == "assistant")] * len(body), 0]
    assert (sample["input_ids"], sample["loss_mask"]) == (ids, mask)
    manifest = json.loads((tmp_path / "out/manifest.json").read_bytes())
    assert (manifest["vocab_size"], manifest["extraction"]["hidden_size"]) == (260, 64)
    assert main(["--corpus", str(tmp_path / "out/corpus.jsonl"), "--out", str(tmp_path / "shards")]) == 0
