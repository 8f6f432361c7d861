"""A prepare stage of the configuration: what is checked, what the host is asked, and what the shipped program does."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from backend import config as configuration
from backend.link import pack_extractor
from backend.stages.stages import EXTRACTOR, build_spec, requirements
from tests.preparing import corpus, talk, write_lines

if TYPE_CHECKING:
    from pathlib import Path

STAGE = """
[stages.prepare]
kind = "prepare"
python = "/opt/sglang/bin/python"
datasets = ["chat=/data/a.jsonl", "/data/b=1.parquet"]
tokenizer = "/models/kimi"
max_tokens = 8192
seed = 0
out = "/data/corpus"
arguments = ["--skip-bad", "--too-long", "drop"]
"""


def stage(text: str) -> configuration.Stage:
    return configuration.parse(text, "ez.toml").stages["prepare"]


def test_the_run_and_what_it_needs() -> None:
    found = stage(STAGE)
    spec = build_spec("prepare", found, "r1")
    options = ["--tokenizer", "/models/kimi", "--max-tokens", "8192", "--seed", "0", "--skip-bad", "--too-long", "drop"]
    assert spec.argv[:5] == ["/opt/sglang/bin/python", EXTRACTOR, "prepare", "--out", "/data/corpus"]
    assert spec.argv[5:] == [*options, "chat=/data/a.jsonl", "/data/b=1.parquet"]
    needs = requirements(found)
    assert needs["paths"] == ["/data/a.jsonl", "/data/b=1.parquet", "/models/kimi"]
    assert needs["modules"] == ["numpy", "transformers", "pyarrow"]
    assert needs["python"] == "/opt/sglang/bin/python"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STAGE.replace("datasets", "# datasets"), "needs `datasets`"),
        (STAGE.replace("out =", "# out ="), "needs `out`"),
        (STAGE + "command = ['a']\n", "brings its own"),
        (STAGE + "tp = 8\n", "ez.toml:11: stages.prepare.tp: only a stage of kind"),
        ("[stages.x]\ncommand = ['a']\ntokenizer = 'b'\n", 'only a stage of kind = "prepare" has this'),
        (STAGE.replace("8192", "0"), "max_tokens"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(configuration.ConfigError, match=".*") as caught:
        stage(text)
    assert said in str(caught.value)


def test_the_shipped_program_prepares_and_then_extracts_as_before(tmp_path: Path) -> None:
    program = tmp_path / "extractor"
    with zipfile.ZipFile(io.BytesIO(pack_extractor().data)) as archive:
        archive.extractall(program)
    data = write_lines(tmp_path / "d.jsonl", [talk("q", "a"), talk("q", "b")])
    text = STAGE.replace("/opt/sglang/bin/python", sys.executable).replace('"/models/kimi"', '"bytes"')
    text = text.replace('["chat=/data/a.jsonl", "/data/b=1.parquet"]', f'["two={data}"]').replace(
        "/data/corpus", str(tmp_path / "out")
    )
    argv = [str(program) if word == EXTRACTOR else word for word in build_spec("prepare", stage(text), "r1").argv]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [sample["source"] for sample in corpus(tmp_path / "out")] == ["two", "two"]
    argv = [
        sys.executable,
        str(program),
        "--corpus",
        str(tmp_path / "out/corpus.jsonl"),
        "--out",
        str(tmp_path / "shards"),
    ]
    ran = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert json.loads(ran.stdout)["samples"] == 2
