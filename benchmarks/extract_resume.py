"""Time from the start of a resumed extraction to its first sample: 10,000 records of real lengths, all but one done.

    python benchmarks/extract_resume.py [RECORDS]

The folder is as an extraction leaves it, but for its files being sparse: lengths as of the reference corpus (mean
1,730 tokens), a journal line each, and a file of the right size each. Prints the time of a whole process from exec
to exit, with the index of the corpus and without, beside what reading the journal's and the corpus's bytes and
hashing them takes alone: the least that a resume which believes nothing else can need.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.extraction.corpus import Corpus
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.extraction.journal import Entry, Header, Journal
from backend.extraction.writer import shard_bytes
from backend.shardfmt import layout

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 8192
REPEATS = 5


def write_corpus(path: Path, records: int) -> None:
    """Write a corpus whose lengths are spread as those of conversations are: log-normal, cut at 8,192."""
    chance = random.Random(8)
    with path.open("w") as file:
        for _ in range(records):
            length = max(1, min(LONGEST, int(chance.lognormvariate(7.15, 0.8))))
            file.write(json.dumps({"input_ids": chance.choices(range(4096), k=length)}) + "\n")


def fill(out: Path, corpus: Corpus, engine: EmbeddedEngine) -> None:
    """Make the folder of an extraction that has one sample left."""
    header = Header(corpus.path, corpus.sha256, corpus.bytes, corpus.lines, engine.name, engine.model,
                    engine.hidden_size, list(engine.capture_points))  # fmt: skip
    journal = Journal(str(out / layout.JOURNAL_NAME), header)
    entries = []
    for index in range(len(corpus) - 1):
        file = out / layout.shard_path(index)
        file.parent.mkdir(exist_ok=True)
        size = shard_bytes(index, corpus.tokens(index), engine.hidden_size, len(engine.capture_points))
        with file.open("wb") as sparse:
            os.truncate(sparse.fileno(), size)
        entries.append(Entry(index, str(index), layout.shard_path(index), size, corpus.tokens(index), 0, time.time()))
    journal.append(entries)
    journal.close()


def extract(corpus: Path, out: Path) -> float:
    """Run the whole command for the sample that is left, and return its seconds."""
    program = "import sys; from backend.extraction.extract import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", program, "--corpus", str(corpus), "--out", str(out), "--json", "--limit"]
    began = time.perf_counter()
    subprocess.run([*argv, str(10**6)], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def main(records: int) -> None:
    """Write, resume, print."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "c.jsonl", Path(folder) / "out"
        out.mkdir()
        write_corpus(path, records)
        engine = EmbeddedEngine()
        corpus = Corpus(str(path), engine.vocab_size)
        tokens = sum(corpus.tokens(index) for index in range(len(corpus)))
        fill(out, corpus, engine)
        last = out / layout.shard_path(records - 1)
        print(f"{records:,} records, {tokens:,} tokens, corpus {corpus.bytes / 1e6:.0f} MB")
        began = time.perf_counter()
        hashlib.sha256(path.read_bytes()).hexdigest()
        [json.loads(line) for line in (out / layout.JOURNAL_NAME).read_bytes().splitlines()]
        least = time.perf_counter() - began
        without = extract(path, out)
        times = []
        for _ in range(REPEATS):
            last.unlink()
            times.append(extract(path, out))
        median = sorted(times)[REPEATS // 2]
        print(
            f"without the index: {without:.2f} s; with it: {median:.2f} s (median of {REPEATS}, exec to exit, with the "
            f"last sample computed and committed)\nreading and hashing alone: {least:.2f} s; ratio {median / least:.1f}"
        )
        corpus.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
