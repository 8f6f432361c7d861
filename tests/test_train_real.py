"""A real training on the CPU, by either trainer, from shards of our own extraction: launched as a stage, read, ended.

EIGHTZEROS_TRAINERS names the folder that tests/trainers/install.sh has filled. SpecForge is started as it is;
speculators by tests/trainers/train_cpu.py, because it asks for a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backend.agent import ops
from backend.agent.ops import Context
from backend.agent.runs import RunStore
from backend.config import Stage
from backend.extraction.engines.embedded import EmbeddedEngine
from backend.stages import build_spec, requirements
from backend.wire import Refused, plain
from tests.exporting import export, shards, write_safetensors
from tests.runstore import a_store, ended, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINERS = os.environ.get("EIGHTZEROS_TRAINERS", "")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.trainers,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not TRAINERS, reason="needs EIGHTZEROS_TRAINERS, a folder filled by tests/trainers/install.sh"),
]
STEPS, DRAFT = 12, 500
ENV = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
SPECULATORS = ["--speculator-type", "eagle3", "--draft-vocab-size", str(DRAFT), "--draft-attn-impl", "sdpa",
               "--loss-implementation", "eager", "--mask-token-id", "0", "--num-workers", "0",
               "--total-seq-len", "512", "--log-freq", "1"]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    for _ in a_store(tmp_path / "runs"):
        yield RunStore(machine(sys.executable, "-m", "backend.agent.main"), str(tmp_path / "runs"))


def ask(store: RunStore, op: str, **args: Any) -> Any:
    return ops.TABLE[op].call(Context(machine(sys.executable, "-m", "backend.agent.main"), store), args)


def write_model(folder: Path) -> None:
    """Write the embedded engine's head as a model folder: what a trainer takes of the model that was extracted from."""
    engine = EmbeddedEngine()
    folder.mkdir()
    shape = {"vocab_size": engine.vocab_size, "hidden_size": engine.hidden_size, "num_hidden_layers": 8,
             "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
             "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
             "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "model_type": "llama"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**shape, "architectures": ["LlamaForCausalLM"]}))
    head = np.random.default_rng(8).normal(size=(engine.vocab_size, engine.hidden_size)).astype(np.float32)
    tensors = {"model.embed_tokens.weight": head, "lm_head.weight": head,
               "model.norm.weight": engine.final_norm.astype(np.float32)}  # fmt: skip
    write_safetensors(folder / "model.safetensors", {name: ("F32", values) for name, values in tensors.items()})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_specforge_config(folder: Path) -> Path:
    """Write a run of SpecForge. It is checked as it is before the command line's words count."""
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64,
             "target_hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
             "num_hidden_layers": 1, "vocab_size": 4096, "draft_vocab_size": DRAFT, "max_position_embeddings": 2048,
             "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.02}  # fmt: skip
    (folder / "draft.json").write_text(json.dumps(draft))
    training = {"attention_backend": "sdpa", "fsdp_sharding": "NO_SHARD", "ttt_length": 3, "log_interval": 2,
                "save_interval": 6}  # fmt: skip
    model = {"target_model_path": "elsewhere", "draft_model_config": str(folder / "draft.json"),
             "vocab_mapping_path": str(folder / "shards/vocab_mapping/vocab_mapping.pt")}  # fmt: skip
    run = {"model": model, "data": {"hidden_states_path": "elsewhere", "max_length": 512, "dataloader_num_workers": 0},
           "training": training, "run_id": "tiny"}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "run.json"


def a_stage(trainer: str, folder: Path) -> Stage:
    """Make the data of a trainer and its stage."""
    shards(folder, 40, 300)
    write_model(folder / "model")
    python = str(Path(TRAINERS) / trainer / "bin" / "python")
    kept = {"kind": "train", "trainer": trainer, "python": python, "model": str(folder / "model"), "needs": [],
            "out": str(folder / "draft"), "max_steps": STEPS}  # fmt: skip
    if trainer == "specforge":
        assert export("specforge", folder / "shards", "--draft-vocab-size", DRAFT) == 0
        env = {**ENV, "TRITON_INTERPRET": "1"}
        return Stage(**kept, data=str(folder / "shards"), config=str(write_specforge_config(folder)), env=env)
    words = ["export", "speculators", folder / "shards", folder / "export", "--draft-vocab-size", DRAFT]
    program = "import sys; from backend.extraction.main import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([python, "-c", program, *map(str, words)], env={**os.environ, **ENV}, check=True, timeout=300)
    entry = [str(ROOT / "tests/trainers/train_cpu.py")]
    return Stage(**kept, data=str(folder / "export"), entry=entry, points=[2, 4, 5], arguments=SPECULATORS, env=ENV,
                 epochs=1)  # fmt: skip


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_ten_steps_of_a_trainer(trainer: str, store: RunStore, tmp_path: Path) -> None:
    stage = a_stage(trainer, tmp_path)
    spec, needs = plain(build_spec("train", stage, "train-1")), requirements(stage, "train")
    with pytest.raises(Refused) as refused:
        ask(store, "runs.start", spec=spec, requirements=needs)
    assert "it was never audited" in str(refused.value), "all other gates are open, its packages and model among them"
    audit = Stage(kind="audit", folder=stage.data, env=ENV)
    ask(store, "runs.start", spec=plain(build_spec("audit", audit, "audit-1")), requirements={})
    assert ended(store, "audit-1", 60.0).exit_code == 0
    ask(store, "runs.start", spec=spec, requirements=needs)
    run = ended(store, "train-1", 400.0)
    assert run.exit_code == 0, store.log("train-1", -1, 4000)["text"]
    progress = run.progress
    assert progress is not None
    assert (progress.state, progress.steps_done, progress.steps_total) == ("done", STEPS, STEPS)
    assert progress.loss is not None and progress.loss > 0
    assert progress.learning_rate is not None and progress.tokens_per_s > 0
    found = ask(store, "train.metrics", id="train-1")
    steps = [point["step"] for point in found["train"]]
    assert steps == list(range(2, STEPS + 1, 2) if trainer == "specforge" else range(1, STEPS + 1))
    for point in found["train"]:
        values = point["values"]
        assert values["loss"] > 0 and values["loss/0"] > 0
        assert [0 <= values[f"accuracy/{position}"] <= 1 for position in range(3)] == [True] * 3
    left = ask(store, "train.checkpoints", id="train-1")["checkpoints"]
    assert [one["step"] for one in left] == ([12, 6] if trainer == "specforge" else [12])
    assert {one["state"] for one in left} == {"whole"}
    assert progress.shard == left[0]["name"]
