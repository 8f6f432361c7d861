"""Layer ids: every system's spelling of the same capture points, against what the systems' sources say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from backend.extraction.layers import FAMILIES, Cannot, check_points, default_points, server_spelling, spellings
from backend.extraction.modelshape import ShapeError, locate, read_shape
from tests.serving import a_model
from tui.cli import main

if TYPE_CHECKING:
    from pathlib import Path

KIMI, LLAMA, GPT_OSS = "KimiK25ForConditionalGeneration", "LlamaForCausalLM", "GptOssForCausalLM"


def ids(architecture: str, layers: int, points: list[int]) -> dict[str, list[int] | None]:
    return {one.system: one.ids for one in spellings(architecture, layers, points)}


def captured(architecture: str, convention: str, given: list[int], layers: int) -> list[int]:
    """Return the points that SGLang 0.5.23 captures, as its models' own functions work them out."""
    if convention == "DFLASH":
        return sorted(given if architecture.startswith("MuseGlimmer") else [number + 1 for number in given])
    if architecture in (KIMI, "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"):
        return sorted([number + 1 for number in given] if given[0] == 1 else given)
    if architecture == GPT_OSS and max(given) == layers:
        return sorted(given)
    return sorted(number + 1 for number in given)


def test_the_reference_run_on_kimi() -> None:
    found = ids(KIMI, 61, [3, 31, 59])
    assert found == {
        "SGLang EAGLE3": [3, 31, 59], "SGLang DFLASH": [2, 30, 58], "SGLang default": None,
        "SpecForge": [3, 31, 59], "TorchSpec": [2, 30, 58], "vLLM/speculators": [3, 31, 59],
    }  # fmt: skip
    notes = {one.system: one.note for one in spellings(KIMI, 61, [3, 31, 59])}
    assert "without ids it captures the points 2 30 58" in notes["SGLang default"]
    assert "as outputs of layers they are 2 30 58" in notes["SpecForge"]


def test_a_llama() -> None:
    found = ids(LLAMA, 32, [2, 16, 29])
    assert found == {
        "SGLang EAGLE3": [1, 15, 28], "SGLang DFLASH": [1, 15, 28], "SGLang default": [2, 16, 29],
        "SpecForge": [1, 15, 28], "TorchSpec": [1, 15, 28], "vLLM/speculators": [2, 16, 29],
    }  # fmt: skip


def test_a_list_that_would_begin_with_one_is_turned_where_that_means_another_layer() -> None:
    assert ids(KIMI, 61, [1, 30, 58])["SGLang EAGLE3"] == [30, 58, 1]
    assert ids(KIMI, 61, [1])["SGLang EAGLE3"] is None
    assert ids(KIMI, 61, [2, 30, 58])["SGLang default"] == [2, 30, 58]


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("points", [[2, 16, 29], [1, 2, 3], [1, 31], [31]])
def test_what_the_server_is_given_captures_the_points(architecture: str, points: list[int]) -> None:
    convention, given = server_spelling(architecture, points, 32)
    assert captured(architecture, convention, given, 32) == points
    assert len(set(given)) == len(given) and all(0 <= number < 32 for number in given)


def test_ends_of_the_model() -> None:
    assert ids(KIMI, 61, [0, 30])["SGLang EAGLE3"] == [0, 30]
    assert ids(LLAMA, 32, [0])["SGLang EAGLE3"] is None and ids(LLAMA, 32, [0])["vLLM/speculators"] == [0]
    assert ids(LLAMA, 32, [32])["SGLang DFLASH"] is None and ids(GPT_OSS, 24, [24])["SGLang DFLASH"] == [23]
    assert server_spelling("Glm4MoeForCausalLM", [5], 46) == ("EAGLE3", [4])
    assert default_points(62, FAMILIES["MiniMaxM3SparseForConditionalGeneration"]) == [3, 32, 60]


def test_points_that_the_model_does_not_have() -> None:
    for points, words in (([3, 62], "0 .the embeddings. to 61"), ([3, 3], "twice"), ([], "no capture points")):
        with pytest.raises(Cannot, match=words):
            check_points(points, 61)
    with pytest.raises(Cannot, match="not known here"):
        server_spelling("KimiK3ForConditionalGeneration", [3], 61)
    assert ids("NobodyForCausalLM", 32, [3])["SGLang EAGLE3"] is None


def test_a_configuration_that_keeps_its_language_model_inside(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}
    a_model(tmp_path, architectures=[KIMI], text_config=text, auto_map={"AutoModel": "x.Y"})
    shape = read_shape(str(tmp_path))
    assert (shape.architecture, shape.layers, shape.hidden_size, shape.own_code) == (KIMI, 61, 7168, True)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ShapeError, match=r"config\.json: not a JSON object"):
        read_shape(str(tmp_path))


def test_a_model_of_the_cache_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert locate("org/name") == ""
    a_model(snapshot)
    assert locate("org/name") == str(snapshot)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["layers", *words])
    return result.exit_code, result.output


def test_the_command(tmp_path: Path) -> None:
    code, text = run("kimi-k2.5", "--points", "3,31,59")
    assert code == 0
    assert "--speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids 2 30 58" in text
    assert "point 3: the residual stream entering layer 3, the output of layer 2" in text
    assert "SGLang default" in text and "cannot: without ids" in text
    code, text = run(str(a_model(tmp_path)), "--points", "2,16,29", "--json")
    record = json.loads(text)
    assert code == 0 and record["layers"] == 32
    assert {one["system"]: one["ids"] for one in record["systems"]} == ids(LLAMA, 32, [2, 16, 29])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llamaforcausallm", "--points", "2"], "--layers"),
        (["nobody", "--points", "2"], "is not known"),
        (["/no/where", "--points", "2"], "no config.json"),
        (["kimi-k2.5", "--points", "2,99"], "to 61"),
        (["kimi-k2.5", "--points", "two"], "write numbers"),
    ],
)
def test_mistakes_are_usage_errors(words: list[str], said: str) -> None:
    code, text = run(*words)
    assert code == 2 and said in text
