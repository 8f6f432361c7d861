"""From the configuration to commands: each kind's own words, its mistakes, and the chain that the stages make."""

from __future__ import annotations

import pytest

from backend.config import ConfigError, Stage, parse
from backend.extraction.arguments import parser
from backend.extraction.export import parser as export_parser
from backend.stages import EXTRACTOR, ChainError, build_spec, chain_names, chain_order, chain_spec, requirements
from backend.wire import CHAIN_ENV, GIB

TOML = """
[hosts.a]
[hosts.b]
chain = ["reset", "train", "reset", "audit"]
[stages.prepare]
kind = "prepare"
datasets = ["chat.jsonl"]
out = "/corpus"
cwd = "/data"
[stages.serve]
kind = "serve"
model = "/m"
points = [2]
hosts = ["a"]
[stages.extract]
kind = "extract"
engine = "sglang"
corpus = "/c"
out = "/s"
order = "seed:4"
only = "failed.jsonl"
suffix = ".pt"
retries = 0
[stages.audit]
kind = "audit"
folder = "/s"
[stages.train]
kind = "train"
command = ["torchrun"]
data = "/s"
packages = ["torch>=2.9"]
python = "/opt/py"
"""


def test_the_chain_has_a_reset_before_what_needs_clean_gpus() -> None:
    config = parse(TOML, "x")
    assert chain_names(config, "a") == ["prepare", "reset", "serve", "extract", "audit", "reset:2", "train"]
    assert chain_names(config, "b") == ["reset", "train", "reset:2", "audit"]
    order = chain_order(config, "a", "extract", {"cuda_test": False}, "why")
    assert (order["start"], order["forced"]) == (3, "why")
    assert [step["name"] for step in order["steps"] if step.get("service")] == ["serve"]
    assert [step["name"] for step in order["steps"] if step.get("needs_service")] == ["extract"]
    spec = chain_spec(order, "pipeline-1")
    assert spec.argv == ["{agent}", "pipeline"] and spec.starts_runs and list(spec.env) == [CHAIN_ENV]
    assert spec.grace_s > 900  # a reset that is under way comes to its verdict
    with pytest.raises(ChainError, match="`serve` is no step of the chain of b; steps: reset, train, reset:2, audit"):
        chain_order(config, "b", "serve", {})
    with pytest.raises(ChainError, match="no stage for a"):
        chain_order(parse("[hosts.a]\n", "x"), "a", "", {})
    with pytest.raises(ChainError, match="over 122,880"):
        chain_spec(chain_order(parse(f"[stages.x]\ncommand = ['{'a' * 130000}']\n[hosts.a]\n", "x"), "a", "", {}), "p")


def test_an_extraction_says_everything_that_its_stage_does() -> None:
    stage = parse(TOML, "x").stages["extract"]
    words = parser().parse_args(build_spec("extract", stage, "r").argv[2:])
    assert (words.order, words.only, words.suffix, words.retries) == ("seed:4", "failed.jsonl", ".pt", 0)
    assert requirements(stage)["predict"] == {}  # how many samples it will be stands in that file
    plain = Stage(kind="extract", corpus="c", out="s", cwd="/data")
    words = parser().parse_args(build_spec("extract", plain, "r").argv[2:])
    assert (words.order, words.only, words.suffix) == ("corpus", None, ".ckpt")
    needs = requirements(plain)
    assert (needs["predict"]["corpus"], needs["predict"]["out"], needs["paths"]) == ("/data/c", "/data/s", ["/data/c"])


def test_an_export_says_what_its_program_reads() -> None:
    stage = Stage(kind="export", format="speculators", folder="/s", out="/o", model="/m", arguments=["--partial"])
    spec = build_spec("export", stage, "r")
    assert spec.argv[:3] == ["python3", EXTRACTOR, "export"]
    words = export_parser().parse_args(spec.argv[3:])
    assert (words.shards, words.out, words.model, words.partial) == ("/s", "/o", "/m", True)
    needs = requirements(stage, "export")
    assert (needs["audited"], needs["predict"]) == ("/s", {"out": "/o", "shards": "/s"})
    assert needs["modules"] == ["numpy", "pyarrow"]
    small = Stage(
        kind="export", format="specforge", folder="/s", out="/o/map.pt", arguments=["--draft-vocab-size", "9"]
    )
    words = export_parser().parse_args(build_spec("export", small, "r").argv[3:])
    assert (words.shards, words.out, words.draft_vocab_size) == ("/s", "/o/map.pt", 9)
    assert requirements(small)["predict"] == {}


def test_a_training_needs_clean_gpus_and_audited_shards() -> None:
    needs = requirements(parse(TOML, "x").stages["train"], "train")
    assert needs["clean_gpus"] is True and needs["audited"] == "/s" and needs["paths"] == ["/s"]
    assert (needs["python"], needs["modules"]) == ("/opt/py", ["torch>=2.9"])
    assert needs["others"] == {"stage": "train", "out": ""}
    own = requirements(Stage(command=["make"], cwd="/w", inputs=["a", "/b"], disk_gib=1, ram_gib=2, port=8000))
    assert (own["paths"], own["disk"], own["python"]) == (["/w/a", "/b"], [["/w", GIB]], "make")
    assert (own["ram_bytes"], own["port"], own["clean_gpus"]) == (2 * GIB, 8000, False)


EXTRACT = "[stages.s]\nkind = 'extract'\ncorpus = 'c'\nout = 'o'\n"
OWN = "[stages.s]\ncommand = ['a']\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[stages.reset]\ncommand = ['a']\n", "x:1: stages.reset: `reset` is what runs of eightzeros itself"),
        ("[hosts.a]\nchain = ['b']\n", "x:2: hosts.a.chain[0]: `b` is no stage of this file; a chain takes reset"),
        (
            "[hosts.a]\nchain = ['s']\n[hosts.b]\n" + OWN + "hosts = ['b']\n",
            "does not run on this host",
        ),
        (
            EXTRACT + "order = 'random'\n",
            "x:5: stages.s.order: `random` is",
        ),
        (EXTRACT + "retries = 3\n", 'with engine = "sglang" has this'),
        (EXTRACT + "suffix = 'pt'\n", "it takes .ckpt, .pt"),
        ("[stages.s]\nkind = 'train'\ncommand = ['a']\n", 'a stage of kind = "train" needs `data`'),
        ("[stages.s]\nkind = 'export'\nfolder = 'f'\nout = 'o'\n", "needs `format`"),
        (OWN + "ready_url = 'http://h/x'\n", "only a stage with service = true"),
        (OWN + "service = true\nready_url = 'h'\n", "x:4: stages.s.ready_url: write http://"),
        (
            "[stages.s]\ncommand = ['a']\npackages = ['torch', 'b c']\n",
            "x:3: stages.s.packages[1]: `b c` is no package",
        ),
        (OWN + "folder = 'f'\n", 'only a stage of kind = "audit" or "export" has this'),
        (OWN + "needs = ['gpus']\n", "it takes clean-gpus"),
    ],
)
def test_mistakes_name_file_line_and_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "x")
    assert said in str(error.value)
