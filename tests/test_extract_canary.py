"""The check before a long run: each thing that would spoil it is refused, with its true reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.extraction import canary, extract
from backend.extraction.prepare.huggingface import TOKENIZER_FILES
from backend.extraction.prepare.tokenise import files_digest
from backend.extraction.staging import hook_argument
from backend.shardfmt import layout
from tests.extracting import journal, start, write_corpus
from tests.fakeserver import POINTS, RUN, VOCAB, Fake, Faults, head, serving, write_model
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what tries an extraction that must not begin, and gives the reason."""

    def refused(server: Fake, *more: str) -> str:
        write_corpus(tmp_path / "c.jsonl", 5)
        code = extract.main(["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl"),
                             "--out", str(tmp_path / "out"), "--json", *more])  # fmt: skip
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (code, result["state"]) == (1, "failed"), result
        assert not list((tmp_path / "out").glob("rows_*/*"))
        return str(result["error"])

    return refused


def test_no_server_at_all(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path) as server:
        pass
    assert f"no server answers at {server.url}: ConnectionRefusedError" in refused(server)
    assert "is no address of a server" in refused(server, "--server", "localhost")


@pytest.mark.parametrize("hooks", [None, [], [{"name": "other", "hook_factory": "other:factory", "config": {}}]])
def test_a_missing_hook(tmp_path: Path, refused: Callable[..., str], hooks: Any) -> None:
    with serving(tmp_path, forward_hooks=hooks) as server:
        assert "runs without the capture hook" in refused(server)


def test_the_hook_s_settings_may_be_told_as_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 2)
    text = hook_argument(RUN, str(tmp_path / "staging"), POINTS, "model")
    with serving(tmp_path, forward_hooks=text) as server:
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        assert extract.main([*argv, "--out", str(tmp_path / "out"), "--points", "2,4,5"]) == 0


def test_a_hook_that_is_never_called(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "RECORD_S", 0.2)
    with serving(tmp_path, Faults(lambda *_: "lost")) as server:
        assert "the hook was not called (are the prefill CUDA graphs off?)" in refused(server)


def test_the_prefix_cache(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path, disable_radix_cache=False) as server:
        assert "start it with --disable-radix-cache" in refused(server)


def test_other_points_than_the_configured_ones(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path) as server:
        assert refused(server, "--points", "3,4,5") == "the server captures the points [2, 4, 5], not [3, 4, 5]"


def test_other_layers_than_the_points(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path, Faults(lambda *_: "layers")) as server:
        assert "the effective layers are [3, 5, 6], not [2, 4, 5]" in refused(server)


def test_other_layers_on_another_rank(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path) as server:
        rank = {"run": RUN, "rank": 1, "writes": False, "effective_layers": [2, 4, 6]}
        (server.staging / "rank1.json").write_text(json.dumps(rank))
        assert refused(server) == "rank 1 captures the layers [2, 4, 6]; the points are [2, 4, 5]"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("short", "rows were captured of"), ("nan", "NaN"), ("width", "wide"), ("ids", "of other tokens")],
)
def test_states_that_are_wrong(tmp_path: Path, refused: Callable[..., str], fault: str, reason: str) -> None:
    with serving(tmp_path, Faults(lambda *_: fault)) as server:
        said = refused(server)
    assert said.startswith("the canary's states are wrong: ")
    assert reason in said


def test_states_that_differ_from_one_time_to_the_next(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path, Faults(lambda index, _: "differ" if index == 2 else "")) as server:
        assert "one prompt gave two different aux states, at row" in refused(server)


def test_a_first_pass_that_only_begins_the_capture_is_asked_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", 2)
    with serving(tmp_path, Faults(lambda index, attempt: "failed" if (index, attempt) == (1, 0) else "")) as server:
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        assert extract.main([*argv, "--out", str(tmp_path / "out")]) == 0
        assert [seen for seen in server.faults.seen if not seen[1]] == [(1, 0), (2, 0), (3, 0)]


def test_a_last_state_that_does_not_give_the_next_token(tmp_path: Path, refused: Callable[..., str]) -> None:
    """The state before the final norm, or another model's folder."""
    write_model(tmp_path / "model", np.roll(head(), 1, axis=0))
    with serving(tmp_path) as server:
        assert "the last state does not give the server's own next token: lm_head.weight makes it" in refused(server)
    write_model(tmp_path / "model")
    with serving(tmp_path, Faults(lambda *_: "token")) as server:
        assert "does not give the server's own next token" in refused(server)


def test_text_that_the_model_does_not_know(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A head that is sure of one token: everything else in the corpus is a surprise to it."""
    write_model(tmp_path / "model", head() * 200)
    with serving(tmp_path) as server:
        assert "was it made with another tokenizer?" in refused(server)
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        assert extract.main([*argv, "--out", str(tmp_path / "out"), "--accept-tokens"]) == 0


def test_a_vocabulary_that_is_too_small_for_the_corpus(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_model(tmp_path / "model", head()[:512], vocab_size=512)
    with serving(tmp_path) as server:
        assert "is outside the vocabulary (0 to 511)" in refused(server)


def manifest(folder: Path, fingerprint: str, corpus_sha256: str) -> None:
    record = {
        "corpus": {"sha256": corpus_sha256},
        "tokenizer": "/models/other",
        "tokenizer_sha256": fingerprint,
    }
    (folder / "manifest.json").write_text(json.dumps(record))


def test_the_tokenizer_that_the_manifest_names(tmp_path: Path, refused: Callable[..., str]) -> None:
    (write_model(tmp_path / "model") / "tokenizer.json").write_text("{}")
    ours = files_digest(str(tmp_path / "model"), TOKENIZER_FILES)
    with serving(tmp_path) as server:
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        write_corpus(tmp_path / "c.jsonl", 5)
        assert extract.main([*argv, "--out", str(tmp_path / "first")]) == 0
        sha256 = json.loads((tmp_path / "first" / layout.CONFIG_NAME).read_bytes())["corpus"]["sha256"]
        manifest(tmp_path, "ab" * 32, sha256)
        assert "the corpus was made with the tokenizer of /models/other, and" in refused(server)
        manifest(tmp_path, ours, sha256)
        assert extract.main([*argv, "--out", str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / layout.CONFIG_NAME).read_bytes())
    assert about["canary"]["tokenizer"] == "the model's own"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load_format": "dummy"}, "not checked: the server runs dummy weights"),
        ({}, "not checked: no output head in the safetensors files of"),
    ],
)
def test_a_head_that_cannot_be_read_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    if not change:
        (write_model(tmp_path / "model") / "model.safetensors").unlink()
    write_corpus(tmp_path / "c.jsonl", 2)
    with serving(tmp_path, **change) as server:
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        assert extract.main([*argv, "--out", str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / layout.CONFIG_NAME).read_bytes())
    assert about["canary"]["head"].startswith(said)


def test_a_model_that_is_not_on_this_host(tmp_path: Path, refused: Callable[..., str]) -> None:
    with serving(tmp_path, model_path="some/model") as server:
        assert "some/model: no config.json of this model on this host; name its folder with --model" in refused(server)


def test_two_extractions_from_one_server(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_corpus(tmp_path / "d.jsonl", 50)
    with serving(tmp_path) as server:
        first = start(tmp_path / "d.jsonl", tmp_path / "first", "--engine", "sglang", "--server", server.url,
                      "--throttle", "20")  # fmt: skip
        until(lambda: journal(tmp_path / "first"))
        assert "another extraction reads the states of" in refused(server)
        first.kill()
        first.communicate()


def test_another_model_does_not_go_on_with_a_folder(tmp_path: Path, refused: Callable[..., str]) -> None:
    records = write_corpus(tmp_path / "c.jsonl", 5)
    assert max(max(record["input_ids"]) for record in records) < VOCAB
    with serving(tmp_path) as server:
        argv = ["--engine", "sglang", "--server", server.url, "--corpus", str(tmp_path / "c.jsonl")]
        assert extract.main([*argv, "--out", str(tmp_path / "out"), "--limit", "2"]) == 0
        for path in (tmp_path / "out").glob("rows_*/*"):
            path.unlink()
        write_model(tmp_path / "model", head() * 1.001)
        assert "this folder was begun with another model" in refused(server)
