"""A model's own tokenizer and chat template, through transformers, which only this module imports.

Where the template marks what the assistant generates ({% generation %}), its mask is taken. Where it does not,
the marks around an assistant's turn are found by rendering three small conversations: what follows a prompt, a
last turn and an earlier turn alike begins a turn, and what follows their text alike ends one. A conversation is
rendered once, and each stretch between the marks is trained on, the end mark included. Rendering a growing
prefix instead would be wrong: templates drop the thinking of earlier turns.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from backend.extraction.prepare.sources import PrepareError
from backend.extraction.prepare.tokenise import Encoded, files_digest, model_config
from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "added_tokens.json",
)  # fmt: skip
"""What a tokenizer's fingerprint is made of."""

_GENERATION = "generation %}"
_ASK, _SAY, _MORE = "quagga asks", "okapi says", "quagga goes on"
"""Texts of the small conversations: no template holds them."""


class Marks(NamedTuple):
    """The texts that begin and end an assistant's turn."""

    begin: str
    end: str


class TemplateTokenizer:
    """The tokenizer of a model's folder."""

    def __init__(self, folder: str, template_args: dict[str, Any], trust_code: bool = False) -> None:
        """Load it. Raises PrepareError where transformers is missing, or the folder has no usable tokenizer."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise PrepareError(
                f"a model's tokenizer needs transformers, which {sys.executable} has not; name the Python of your "
                "SGLang or training environment for this stage, or `pip install transformers` there"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise PrepareError(f"{folder}: the tokenizer cannot be loaded: {printable(str(error), 400)}") from None
        if not self._tokenizer.chat_template:
            raise PrepareError(f"{folder}: the tokenizer has no chat template; give it one, or use token ids")
        self.name = folder
        self.vocab_size = int(model_config(folder).get("vocab_size") or len(self._tokenizer))
        self.fingerprint = files_digest(folder, TOKENIZER_FILES)
        self._args = template_args
        self._fast = bool(self._tokenizer.is_fast)
        self._marked = self._fast and _GENERATION in str(self._tokenizer.chat_template)
        self._marks = None if self._marked else find_marks(self._render, folder)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False, tools: list[Any] | None = None) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._args
        )
        return text

    def encode(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        """Encode a conversation. Raises ValueError where the template or the marks do not take it."""
        from jinja2 import TemplateError

        try:
            if self._marks is None:
                return self._generated(messages, tools)
            text = self._render(messages, tools=tools)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses it: {printable(str(error), 200)}") from None
        spans = turns(text, messages, self._marks)
        return self._by_offsets(text, spans) if self._fast else self._by_pieces(text, spans)

    def _generated(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self._args
        )
        return Encoded(list(map(int, found["input_ids"])), list(map(int, found["assistant_masks"])))

    def _by_offsets(self, text: str, spans: list[tuple[int, int]]) -> Encoded:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, number = [], 0
        for begin, end in found["offset_mapping"]:
            while number < len(spans) and begin >= spans[number][1]:
                number += 1
            mask.append(int(number < len(spans) and begin >= spans[number][0] and end <= spans[number][1]))
        return Encoded(list(found["input_ids"]), mask)

    def _by_pieces(self, text: str, spans: list[tuple[int, int]]) -> Encoded:
        """Encode stretch by stretch, as a server does with a prompt and an answer: a slow tokenizer has no offsets."""
        ids: list[int] = []
        mask: list[int] = []
        at = 0
        for begin, end in [*spans, (len(text), len(text))]:
            for piece, trained in ((text[at:begin], 0), (text[begin:end], 1)):
                found = self._tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
                ids += found
                mask += [trained] * len(found)
            at = end
        return Encoded(ids, mask)


def find_marks(render: Callable[..., str], name: str) -> Marks:
    """Find the marks of a template. Raises PrepareError where they cannot be told."""
    ask = {"role": "user", "content": _ASK}
    say = {"role": "assistant", "content": _SAY}
    try:
        asked, prompt = render([ask]), render([ask], True)
        last = render([ask, say])
        earlier = render([ask, say, {"role": "user", "content": _MORE}])
    except Exception as error:
        raise PrepareError(f"{name}: the chat template fails on two turns: {printable(str(error), 300)}") from None
    heads = [text[len(_common([text, asked])) :].partition(_SAY)[0] for text in (last, earlier)]
    if len(prompt) > len(asked) and prompt.startswith(asked):
        heads.append(prompt[len(asked) :])
    begin = _common(heads).rstrip("<")  # what differs may be two tags, which begin alike
    if not begin.strip():  # the prompt ends with the user's turn: what lies between question and answer begins one
        between = [text.partition(_ASK)[2].partition(_SAY)[0] for text in (last, earlier)]
        begin = _common(between)
    end = _common([text.partition(_SAY)[2] for text in (last, earlier)]).rstrip()
    whole = end == last.partition(_SAY)[2].rstrip()  # else two different marks end a turn
    if not begin.strip() or not end or not whole:
        raise PrepareError(
            f"{name}: the chat template has no marks around an assistant's turn that could be found; add "
            "{% generation %} to the template, or prepare token ids with a loss mask yourself"
        )
    return Marks(begin, end)


def _common(texts: list[str]) -> str:
    """Return what all of the texts begin with."""
    first, last = min(texts), max(texts)
    same = next((at for at, letter in enumerate(first) if letter != last[at]), len(first))
    return first[:same]


def turns(text: str, messages: list[dict[str, Any]], marks: Marks) -> list[tuple[int, int]]:
    """Return where each assistant's turn lies in the rendered text. Raises ValueError where it cannot be told."""
    for message in messages:
        for mark in (marks.begin.strip(), marks.end.strip()):
            if mark in message["content"]:
                raise ValueError(f"a turn of the {message['role']} holds the chat template's own mark {mark!r}")
    answers = [message for message in messages if message["role"] == "assistant"]
    spans = []
    at = text.find(marks.begin)
    while at >= 0:
        begin = at + len(marks.begin)
        end = text.find(marks.end, begin)
        end = len(text) if end < 0 else end + len(marks.end)
        spans.append((begin, end))
        at = text.find(marks.begin, end)
    if len(spans) != len(answers):
        raise ValueError(f"the chat template renders {len(spans)} turns of the assistant, not {len(answers)}")
    for number, (begin, end) in enumerate(spans):
        said = str(answers[number]["content"]).rpartition("</think>")[2].strip()
        if said not in text[begin:end]:
            raise ValueError("the chat template does not render a turn of the assistant as it is")
    return spans
