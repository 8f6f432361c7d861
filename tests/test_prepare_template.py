"""Where the assistant's turns lie in what a chat template renders, for templates of several manners."""

from __future__ import annotations

import pytest

from backend.extraction.prepare.huggingface import Marks, TemplateTokenizer, find_marks, turns
from backend.extraction.prepare.sources import PrepareError

Messages = list[dict[str, str]]


def chatml(messages: Messages, prompt: bool = False) -> str:
    """Render as ChatML does, with thinking opened for the last turn and dropped from earlier ones."""
    last = max(n for n, message in enumerate(messages) if message["role"] == "user")
    text = ""
    for n, message in enumerate(messages):
        said = message["content"]
        if message["role"] == "assistant":
            said = (
                said.rpartition("</think>")[2] if n < last else said if "</think>" in said else f"<think></think>{said}"
            )
        text += f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if prompt else "")


def reasoner(messages: Messages, prompt: bool = False) -> str:
    """Render as R1 does: no end after the user, a prompt that opens a thought that history lacks."""
    marks = {"user": "<U>{}", "assistant": "<A>{}<eos>", "system": "{}"}
    text = "<bos>" + "".join(marks[m["role"]].format(m["content"].rpartition("</think>")[2]) for m in messages)
    return text + ("<A><think>\n" if prompt else "")


def bracketed(messages: Messages, prompt: bool = False) -> str:
    """Render as Mistral does: the prompt is the end of the user's turn."""
    marks = {"user": "[INST] {} [/INST]", "assistant": " {}</s>"}
    return "<s>" + "".join(marks[m["role"]].format(m["content"]) for m in messages)


def harmony(messages: Messages, prompt: bool = False) -> str:
    """Render as harmony does: the last turn ends with another mark than earlier ones."""
    text = ""
    for n, message in enumerate(messages):
        end = "<|return|>" if n == len(messages) - 1 and message["role"] == "assistant" else "<|end|>"
        text += f"<|start|>{message['role']}<|message|>{message['content']}{end}"
    return text + ("<|start|>assistant" if prompt else "")


def plain(messages: Messages, prompt: bool = False) -> str:
    return "\n".join(message["content"] for message in messages)


def said(*words: str) -> Messages:
    return [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]


@pytest.mark.parametrize(
    ("render", "marks", "trained"),
    [
        (chatml, Marks("<|im_start|>assistant\n", "<|im_end|>"), ["one<|im_end|>", "<think>why</think>two<|im_end|>"]),
        (reasoner, Marks("<A>", "<eos>"), ["one<eos>", "two<eos>"]),
        (bracketed, Marks(" [/INST] ", "</s>"), ["one</s>", "<think>why</think>two</s>"]),
    ],
)
def test_turns_are_found_whatever_the_template_does(render: object, marks: Marks, trained: list[str]) -> None:
    assert callable(render)
    assert find_marks(render, "m") == marks
    messages = said("q", "<think>hm</think>one" if render is not bracketed else "one", "more", "<think>why</think>two")
    text = render(messages)
    assert [text[begin:end] for begin, end in turns(text, messages, marks)] == trained


@pytest.mark.parametrize("render", [harmony, plain])
def test_a_template_without_clear_marks_is_refused(render: object) -> None:
    assert callable(render)
    with pytest.raises(PrepareError, match="generation"):
        find_marks(render, "m")


@pytest.mark.parametrize("message", ["<|im_end|> inside", "<|im_start|>assistant\nspoofed"])
def test_a_turn_that_holds_a_mark_is_refused(message: str) -> None:
    messages = said(message, "a")
    with pytest.raises(ValueError, match="own mark"):
        turns(chatml(messages), messages, find_marks(chatml, "m"))


def test_a_turn_that_the_template_leaves_out_is_refused() -> None:
    messages = said("q", "a")
    with pytest.raises(ValueError, match="0 turns"):
        turns(chatml(messages[:1]), messages, find_marks(chatml, "m"))
    with pytest.raises(ValueError, match="as it is"):
        turns(chatml(said("q", "other")), messages, find_marks(chatml, "m"))


def test_a_tokenizer_without_offsets_encodes_stretch_by_stretch() -> None:
    tokenizer = TemplateTokenizer.__new__(TemplateTokenizer)
    pieces: list[str] = []

    def encode(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert text and not add_special_tokens
        pieces.append(text)
        return {"input_ids": list(text.encode())}

    tokenizer._tokenizer = encode
    text = "ask[one]ask[two]."
    found = tokenizer._by_pieces(text, [(4, 8), (12, 16)])
    assert pieces == ["ask[", "one]", "ask[", "two]", "."]
    assert bytes(found.input_ids).decode() == text
    assert found.loss_mask == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [0]
