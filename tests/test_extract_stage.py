"""From the configuration to the extraction's own command line, which must take every word of it."""

from __future__ import annotations

from backend.config import Stage
from backend.extraction.arguments import parser
from backend.stages import EXTRACTOR, build_spec, requirements


def test_a_stage_of_the_server_s_engine_names_the_server() -> None:
    stage = Stage(kind="extract", engine="sglang", corpus="/c.jsonl", out="/o", limit=9, grace_s=50.0,
                  server="http://127.0.0.1:31000", staging="/dev/shm/x", concurrency=8)  # fmt: skip
    spec = build_spec("extract", stage, "1")
    assert spec.argv[:2] == ["python3", EXTRACTOR]
    args = parser().parse_args(spec.argv[2:])
    assert (args.engine, args.server, args.staging) == ("sglang", "http://127.0.0.1:31000", "/dev/shm/x")
    assert (args.concurrency, args.limit, args.drain) == (8, 9, 30.0)
    assert requirements(stage)["modules"] == ["numpy"]


def test_what_is_not_said_is_left_to_the_extraction() -> None:
    args = parser().parse_args(
        build_spec("e", Stage(kind="extract", engine="sglang", corpus="c", out="o"), "1").argv[2:]
    )
    assert (args.server, args.staging, args.concurrency) == ("http://127.0.0.1:30000", "", 32)
    assert build_spec("e", Stage(kind="extract", corpus="c", out="o"), "1").argv[2:] == [
        "--engine", "embedded", "--corpus", "c", "--out", "o",
    ]  # fmt: skip
