"""A tokenizer folder whose tokens are UTF-8 bytes, with a chat template, written without transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BEGIN, END, THINK, UNTHINK = range(256, 260)
VOCAB = 260
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

_OPEN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
_CLOSE = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = (
    _OPEN + "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\\n' }}" + _CLOSE
)
"""A template that drops the thinking of earlier turns and opens an empty thought in the last."""

MARKED = (
    _OPEN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}" + _CLOSE
)
"""A template that marks what is generated."""


def _letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary: itself where it can be printed."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


def write_tokenizer(folder: Path, template: str = PLAIN) -> Path:
    """Write the folder and return it."""
    folder.mkdir()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": 256 + n, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for n, text in enumerate(_SPECIAL)]  # fmt: skip
    model = {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(_letters())}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64, "vocab_size": VOCAB}))
    return folder
