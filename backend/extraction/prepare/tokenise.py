"""From turns to token ids and a loss mask: the interface, a tokenizer of bytes of our own, and how to open one."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, NamedTuple, Protocol

from backend.extraction.prepare.sources import PrepareError

BYTES = "bytes"
"""The name of the tokenizer of bytes, in the place of a model's folder."""


class Encoded(NamedTuple):
    """A sample's token ids, and 1 for each token that is trained on."""

    input_ids: list[int]
    loss_mask: list[int]


class Tokenizer(Protocol):
    """Turns into tokens. `fingerprint` changes when the same turns would give other tokens."""

    name: str
    vocab_size: int
    fingerprint: str

    def encode(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        """Encode a conversation, the assistant's turns as trained on. Raises ValueError saying why it cannot."""
        ...


class ByteTokenizer:
    """One token is one UTF-8 byte; 256 and 257 begin and end a turn. For tests and the embedded engine."""

    name = BYTES
    vocab_size = 258
    fingerprint = "bytes-1"
    BEGIN, END = 256, 257

    def encode(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        """Encode as BEGIN role LF text END LF a turn; text and END of the assistant's turns are trained on."""
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            head = [self.BEGIN, *message["role"].encode(), 10]
            body = [*_spoken(message).encode(), self.END]
            trained = int(message["role"] == "assistant")
            ids += [*head, *body, 10]
            mask += [0] * len(head) + [trained] * len(body) + [0]
        return Encoded(ids, mask)


def _spoken(message: dict[str, Any]) -> str:
    text = str(message["content"])
    if message.get("reasoning_content"):
        text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
    return text + "".join(json.dumps(call, sort_keys=True) for call in message.get("tool_calls") or [])


def open_tokenizer(name: str, template_args: dict[str, Any], trust_code: bool) -> Tokenizer:
    """Return the tokenizer of bytes or of a model's folder. Raises PrepareError where it cannot be used."""
    if name == BYTES:
        return ByteTokenizer()
    if not os.path.isdir(name):
        raise PrepareError(f"{name}: no such folder; name a model's folder, or `{BYTES}`")
    from backend.extraction.prepare.huggingface import TemplateTokenizer

    return TemplateTokenizer(name, template_args, trust_code)


def model_config(folder: str) -> dict[str, Any]:
    """Return a model folder's config.json, of its text model where it has several; empty where there is none."""
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            record = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PrepareError(f"{folder}/config.json: {error}") from None
    text = record.get("text_config") if isinstance(record, dict) else None
    if not isinstance(record, dict):
        raise PrepareError(f"{folder}/config.json: not a JSON object")
    return {**record, **text} if isinstance(text, dict) else record


def files_digest(folder: str, names: tuple[str, ...]) -> str:
    """Return one digest of those of the files that are there."""
    digest = hashlib.sha256()
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(b"%s\n%s\n" % (name.encode(), hashlib.sha256(file.read()).hexdigest().encode()))
        except FileNotFoundError:
            continue
    return digest.hexdigest()
