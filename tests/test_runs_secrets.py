"""Values of the environment and secrets on a command line are nowhere but in the run itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from backend.agent import procfs
from backend.agent.runfiles import redact
from tests.runstore import a_store, ended, logged, shell

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "v3ry-s3cret-value"


def test_env_values_reach_the_run_and_nothing_else(tmp_path: Path) -> None:
    stores = a_store(tmp_path / "runs")
    store = next(stores)
    script = 'echo up; [ "$HF_TOKEN" = v3ry-"s3cret"-value ] || exit 9; exec sleep 100'
    run = store.start(shell("one", script, env={"HF_TOKEN": SECRET}))
    logged(store, "one", "up")
    assert run.env_names == ["HF_TOKEN"]
    for path in (tmp_path / "runs").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    for pid in procfs.pids():
        assert SECRET.encode() not in (procfs.read_bytes(f"/proc/{pid}/cmdline") or b"")
    assert SECRET not in json.dumps(vars(run))
    store.stop("one", 0.0)
    assert ended(store, "one").exit_code in (-9, -15), "not 9: the run had the value"
    assert list(stores) == []


def test_the_record_of_a_command_line_is_redacted_and_the_run_is_not(tmp_path: Path) -> None:
    stores = a_store(tmp_path / "runs")
    store = next(stores)
    spec = shell("one", 'echo "got $2" | tr a-z A-Z')
    spec.argv += ["sh", "--api-key", SECRET]
    assert store.start(spec).argv[-1] == "***"
    ended(store, "one")
    assert store.log("one", 0, 100)["text"] == "GOT " + SECRET.upper() + "\n"
    for path in (tmp_path / "runs").rglob("*.json"):
        assert SECRET not in path.read_text(), path
    assert list(stores) == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", "abc"], ["--api-key", "***"]),
        (["--api-key=abc", "x"], ["--api-key=***", "x"]),
        (["--api-key", "--port", "1"], ["--api-key", "--port", "1"]),
        (["HF_TOKEN=abc", "python"], ["HF_TOKEN=***", "python"]),
        (["-c", "export WANDB_API_KEY=abc; run"], ["-c", "export WANDB_API_KEY=***; run"]),
        (["--header", "Authorization: Bearer abc"], ["--header", "Authorization: ***"]),
        (["hf_abcdefghijklmnopqrstuvwxyz"], ["***"]),
        (["https://me:pass@host/x"], ["https://***@host/x"]),
        (["--max-tokens", "8192"], ["--max-tokens", "8192"]),
        (["--max-total-tokens=8192"], ["--max-total-tokens=8192"]),
        (["--tokenizer-path", "/m"], ["--tokenizer-path", "/m"]),
        (["--model-path", "/models/sk"], ["--model-path", "/models/sk"]),
        (["--chunked-prefill-size", "-1"], ["--chunked-prefill-size", "-1"]),
    ],
)
def test_redaction(given: list[str], kept: list[str]) -> None:
    assert redact(given) == kept
