"""Tiny models with random weights, and the truth about them: tiny.py FOLDER PROMPTS.json

PROMPTS.json is {model: {name: [ids]}}. For each model it makes FOLDER/MODEL, a model folder as a server wants it
(hidden size 64, 6 layers), and FOLDER/MODEL.npz: `NAME/states`, float32 [points + 1, L, H], where point k is the
residual stream entering layer k and the last one is after the final norm, and `NAME/token`, the most likely next
token. The truth is transformers in float32 with its plainest attention, each prompt by itself.

Runs in the server's Python.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import cpu
import numpy as np
import torch

cpu.declare_vision_operators()
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

LAYERS = 6
HIDDEN = 64
VOCAB = 512

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

# Multi-head latent attention, a dense layer, then 8 experts in 2 groups: DeepSeek-V3's parts, each as small as can
# be. SGLang's rotary embedding for this attention has no CPU path without yarn scaling.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
MODELS = {
    "llama": {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "deepseek_v3": {
        **{name: value for name, value in BASE.items() if name != "head_dim"},
        **LATENT,
        **EXPERTS,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
    },
}


def write_config(folder: str, name: str) -> None:
    """Write a model's config.json."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump(MODELS[name], file, indent=1)


def write_weights(folder: str, name: str) -> None:
    """Write weights that make neighbouring layers and tokens differ: matrices of 0.1, norms around 1."""
    source = torch.Generator().manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1, generator=source)
            else:
                weight.normal_(1.0, 0.2, generator=source)
    model.to(torch.float32).save_pretrained(folder)
    write_config(folder, name)  # save_pretrained rewrites it in this transformers' own spelling


def write_truth(folder: str, prompts: dict[str, list[int]]) -> None:
    """Write what every prompt gives, beside the model's folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for name, ids in prompts.items():
            given = model(torch.tensor([ids]), output_hidden_states=True)
            found[f"{name}/states"] = torch.cat(given.hidden_states).numpy()
            found[f"{name}/token"] = given.logits[0, -1].argmax().numpy()
    np.savez(folder + ".npz", **found)


def main(folder: str, prompts: str) -> None:
    """Make every model that there are prompts for."""
    with open(prompts, encoding="ascii") as file:
        wanted = json.load(file)
    for name, of_model in wanted.items():
        place = os.path.join(folder, name)
        write_config(place, name)
        write_weights(place, name)
        write_truth(place, of_model)


if __name__ == "__main__":
    main(*sys.argv[1:])
