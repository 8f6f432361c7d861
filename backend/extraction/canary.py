"""Before a long run: one prompt sent twice, and everything about its states that can be checked."""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction import modelfolder
from backend.extraction.bfloat16 import to_float32
from backend.extraction.engines import EngineRefused
from backend.extraction.engines.sglang import Rejected, ServerGone
from backend.extraction.intake import states_of
from backend.extraction.prepare.huggingface import TOKENIZER_FILES
from backend.extraction.prepare.preparation import MANIFEST_NAME
from backend.extraction.prepare.tokenise import files_digest
from backend.extraction.staging import Staged, StagingError
from backend.extraction.writer import BadStates, check_states
from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backend.extraction.corpus import Corpus
    from backend.extraction.engines.sglang import Answer, SglangEngine

AT_HOME = 0.7
"""A model whose surprise is under this share of blind guessing knows the text."""

SHORT_TOKENS, LONG_TOKENS = 16, 512
TRIES = 3
RECORD_S = 30.0
LOOK_EVERY_S = 0.01
TOLERANCE = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-4}
"""How far two runs of one prompt may lie apart, by the length of the difference of a row over the row's."""

TIE = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-4}
"""How far under the best logit the server's own token may lie, over the spread of the logits: roundings differ."""

SURPRISE_ROWS = 64
SURPRISE_NATS = 4.0
"""How much more surprised by the corpus than by its own guesses a model may be. Trained models are calibrated:
both are alike for text of any kind; ids of another tokenizer are noise to it, many nats dearer."""


class Canary:
    """One prompt, asked twice. `found` is what was seen, for the log and data_config.json."""

    def __init__(
        self, engine: SglangEngine, corpus: Corpus, wanted: Sequence[int], accept_tokens: bool = False
    ) -> None:
        self._engine, self._corpus, self._accept = engine, corpus, accept_tokens
        self._prompt = prompt_of(corpus, wanted)
        self.found: dict[str, Any] = {"tokens": len(self._prompt)}
        self._number = 0

    def check(self) -> None:
        """Ask and compare. Raises EngineRefused with the first thing that is wrong."""
        first, answer = self._ask()
        second, _ = self._ask()
        try:
            self._layers(first)
            self._same(first, second)
            self._head(first, answer)
            self._tokenizer()
        finally:
            first.discard()
            second.discard()

    def _ask(self) -> tuple[Staged, Answer]:
        """Send the prompt until states come of it: a server's very first pass may only begin the capture."""
        why = ""
        for _ in range(TRIES):
            self._number += 1
            rid = self._engine.staging.rid(self._number, 0, len(self._prompt))  # samples count from attempt 1
            try:
                answer = self._engine.ask(rid, self._prompt, 1)
                staged = self._await(rid)
            except (ServerGone, Rejected) as error:
                raise EngineRefused(f"the canary prompt was not answered: {error}") from None
            except (OSError, StagingError) as error:
                raise EngineRefused(f"the canary's states cannot be read: {error}") from None
            if isinstance(staged, Staged):
                self._whole(staged)
                return staged, answer
            why = staged
        raise EngineRefused(f"the canary prompt was not captured: {why}")

    def _await(self, rid: str) -> Staged | str:
        end = time.monotonic() + RECORD_S
        while time.monotonic() < end:
            seen = self._engine.staging.look()
            if rid in seen.whole:
                return self._engine.staging.open(rid)
            if rid in seen.failed:
                return self._engine.staging.reason(rid)
            time.sleep(LOOK_EVERY_S)
        self._engine.staging.forget(rid)
        raise EngineRefused(
            f"the server answered the canary prompt and left no states within {RECORD_S:g} s: the hook was not called "
            "(are the prefill CUDA graphs off?), or its folder is not the one that is read here: "
            f"{self._engine.staging.folder}"
        )

    def _whole(self, staged: Staged) -> None:
        hidden, points = self._engine.hidden_size, self._engine.capture_points
        try:
            states = states_of(staged, self._prompt, hidden, points)
            check_states(states, len(self._prompt), hidden, len(points))
        except BadStates as error:
            staged.discard()
            raise EngineRefused(f"the canary's states are wrong: {error}") from None
        self.found["dtype"] = staged.dtype

    def _layers(self, staged: Staged) -> None:
        """Compare the layers that every rank says it captures with the points."""
        wanted = list(self._engine.capture_points)
        seen = {f"rank {rank.get('rank')}": rank.get("effective_layers") for rank in self._engine.ranks()}
        seen["the states"] = staged.effective_layers
        for who, layers in seen.items():
            if layers is not None and list(layers) != wanted:
                raise EngineRefused(f"{who} captures the layers {layers}; the points are {wanted}")
        self.found["effective_layers"] = staged.effective_layers

    def _same(self, first: Staged, second: Staged) -> None:
        worst = 0.0
        for name, a, b in (("aux", first.aux, second.aux), ("last", first.last, second.last)):
            x, y = to_float32(a), to_float32(b)
            apart = np.linalg.norm(x - y, axis=1) / np.maximum(np.linalg.norm(x, axis=1), 1e-30)
            worst = max(worst, float(apart.max()))
            if worst > TOLERANCE[first.dtype]:
                row = int(apart.argmax())
                raise EngineRefused(
                    f"one prompt gave two different {name} states, at row {row} apart by {worst:.2g} of their length "
                    f"(allowed for {first.dtype}: {TOLERANCE[first.dtype]:g}): rows are mixed up or not reproducible"
                )
        self.found["repeated_within"] = worst

    def _head(self, staged: Staged, answer: Answer) -> None:
        """Compute the next token from the last state, as a trainer will, and compare with the server's."""
        engine = self._engine
        text = modelfolder.text_config(engine.folder)
        head: modelfolder.Head | str = "the server runs dummy weights"
        if engine.info.get("load_format") != "dummy":
            head = modelfolder.head(engine.folder, text)
        if isinstance(head, str) or not answer.output_ids:
            self.found["head"] = f"not checked: {head if isinstance(head, str) else 'the server returned no token'}"
            return
        rows = to_float32(staged.last)[-SURPRISE_ROWS:]
        logits = head.logits(rows)
        token, last = int(answer.output_ids[0]), logits[-1]
        best = int(last.argmax())
        if not 0 <= token < last.size:
            raise EngineRefused(f"the server generated token {token}; the model's vocabulary has {last.size}")
        if last[best] - last[token] > TIE[staged.dtype] * float(last.max() - last.min()):
            raise EngineRefused(
                f"the last state does not give the server's own next token: {head.name} makes it {best}, the server "
                f"said {token}; is this state before the final norm, or {engine.folder} another model?"
            )
        self.found["head"] = f"{head.name} gives the server's next token, {token}"
        self._surprise(logits)

    def _surprise(self, logits: NDArray[np.float32]) -> None:
        """See whether the model knows such text at all: ids of another tokenizer are noise to it."""
        following = np.asarray(self._prompt[-(logits.shape[0] - 1) :]) if logits.shape[0] > 1 else np.zeros(0, int)
        if following.size < SHORT_TOKENS:
            return
        logs = logits[:-1].astype(np.float64)
        logs -= logs.max(axis=1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
        surprise = -float(logs[np.arange(following.size), following].mean())
        doubt = -float((np.exp(logs) * logs).sum(axis=1).mean())
        self.found.update(surprise_nats=round(surprise, 3), doubt_nats=round(doubt, 3))
        if surprise - doubt > SURPRISE_NATS and not self._accept:
            raise EngineRefused(
                f"the corpus does not look like this model's text: its tokens cost {surprise:.1f} nats each "
                f"where the model expects {doubt:.1f} (blind guessing: {math.log(logits.shape[1]):.1f}); was it made "
                "with another tokenizer? --accept-tokens takes it as it is"
            )

    def _tokenizer(self) -> None:
        """Compare with the tokenizer that the corpus was prepared with, where its manifest says.

        The digest covers the chat template too, so that a difference proves nothing about a model that is
        plainly at home in the text.
        """
        made_with = _prepared_with(self._corpus)
        if made_with is None:
            self.found["tokenizer"] = "not known: the corpus has no manifest that names it"
            return
        name, fingerprint = made_with
        if fingerprint == files_digest(self._engine.folder, TOKENIZER_FILES):
            self.found["tokenizer"] = "the model's own"
            return
        at_home = self.found.get("surprise_nats", math.inf) < AT_HOME * math.log(self._engine.vocab_size)
        if not (at_home or self._accept):
            raise EngineRefused(
                f"the corpus was made with the tokenizer of {name}, and {self._engine.folder} has another; prepare it "
                "again with the model's own, or take it as it is with --accept-tokens"
            )
        self.found["tokenizer"] = f"not the files of {self._engine.folder}, but those of {name}"


def _prepared_with(corpus: Corpus) -> tuple[str, str] | None:
    """Return name and digest of the tokenizer in the manifest beside the corpus, where it is about these bytes."""
    try:
        with open(os.path.join(os.path.dirname(corpus.path), MANIFEST_NAME), encoding="utf-8") as file:
            manifest = json.load(file)
        if manifest["corpus"]["sha256"] != corpus.sha256 or not manifest["tokenizer_sha256"]:
            return None
        return printable(str(manifest.get("tokenizer")), 200), str(manifest["tokenizer_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prompt_of(corpus: Corpus, wanted: Sequence[int]) -> list[int]:
    """Return the canary's prompt: the first wanted sample of a middling length, its beginning at least."""
    index = next((i for i in wanted if SHORT_TOKENS <= corpus.tokens(i) <= LONG_TOKENS), wanted[0])
    return corpus.row(index).input_ids[:LONG_TOKENS]
