"""One preparation: every record read, judged and spooled, then written in its final order with a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.extraction.corpus import parse
from backend.extraction.durable import discard, replace_file, sync_folder
from backend.extraction.prepare.account import REFUSALS, Account, extraction_needs, histogram
from backend.extraction.prepare.chat import conversation, has_ids
from backend.extraction.prepare.corpusfile import Spool
from backend.extraction.prepare.masks import judge
from backend.extraction.prepare.permutation import shuffled
from backend.extraction.prepare.sources import Dataset, Found, PrepareError, Reader
from backend.extraction.prepare.tokenise import Encoded
from backend.wire import SCHEMA, printable

if TYPE_CHECKING:
    from backend.extraction.prepare.tokenise import Tokenizer
    from backend.extraction.progress import Reporter

CORPUS_NAME, MANIFEST_NAME, NOTES_NAME = "corpus.jsonl", "manifest.json", "notes.jsonl"
_SPOOL, _PART = ".corpus.spool.tmp", ".corpus.part.tmp"
_MAX_ID_CHARS = 160


@dataclass(frozen=True)
class Choices:
    """What the operator chose. `points` counts the capture points, without the last state."""

    datasets: list[Dataset]
    out: str
    seed: int = 0
    order: str = "shuffled"
    max_tokens: int | None = None
    too_long: str = "cut"
    skip_bad: bool = False
    skip_untrained: bool = False
    keep_duplicates: bool = False
    vocab_size: int = 0
    hidden_size: int = 0
    points: int = 3
    shards_on: str = ""
    replace: bool = False
    template_args: dict[str, Any] = field(default_factory=dict)


class Preparation:
    """Reads every dataset once and writes one corpus."""

    def __init__(self, choices: Choices, tokenizer: Tokenizer | None, reporter: Reporter) -> None:
        self.account = Account(choices.datasets)
        self._choices, self._tokenizer, self._reporter = choices, tokenizer, reporter
        self._vocab_size = choices.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
        self._names: set[bytes] = set()
        self._seen: set[bytes] = set()
        self._lengths = array("Q")
        self._sources: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Prepare, and return the manifest. Raises PrepareError, DiskFull or OSError; then nothing was changed."""
        out = self._choices.out
        spool = Spool(os.path.join(out, _SPOOL))
        try:
            for dataset in self._choices.datasets:
                self._read(dataset, spool)
            self._refuse()
            manifest = self._write(spool)
        finally:
            spool.close()
            discard(os.path.join(out, _PART))
        self._reporter.tell("done", "", force=True)
        return manifest

    def _read(self, dataset: Dataset, spool: Spool) -> None:
        reader, progress = Reader(dataset), self._reporter.progress
        for found in reader.records():
            self._take(dataset.name, found, spool)
            progress.samples_done = progress.samples_total = len(spool)
            progress.tokens_total = progress.tokens_done
            self._reporter.tell("running", f"reading {dataset.name}: {reader.percent} %")
        self._sources.append({"name": dataset.name, "path": os.path.abspath(dataset.path), "bytes": reader.bytes_read,
                              "sha256": reader.sha256, **self.account.source(dataset.name)})  # fmt: skip

    def _take(self, source: str, found: Found, spool: Spool) -> None:
        try:
            encoded, notes = self._encode(found)
        except ValueError as error:
            self.account.take(source, found, "refused", str(error))
            return
        for note in notes:
            self.account.note(source, found, "reported", note)
        self.account.counts[source]["reported"] += bool(notes)
        if self._again(encoded):
            self.account.take(source, found, "duplicate", "the same tokens and mask as an earlier record")
            return
        verdict = judge(encoded.input_ids, encoded.loss_mask, self._choices.max_tokens, self._choices.too_long)
        self.account.take(source, found, verdict.what, verdict.why)
        if verdict.what not in ("kept", "cut"):
            return
        name = self._name(source, found)
        ids, mask = verdict.input_ids, verdict.loss_mask
        spool.add({"id": name, "source": source, "input_ids": ids, "loss_mask": mask})
        self._lengths.append(len(ids))
        self.account.sample(source, len(ids), sum(mask))
        self._reporter.progress.tokens_done += len(ids)

    def _encode(self, found: Found) -> tuple[Encoded, list[str]]:
        """Return ids and mask, and what is odd. Raises ValueError saying why the record cannot be used."""
        if found.problem:
            raise ValueError(found.problem)
        record = found.record
        if has_ids(record):
            if not self._vocab_size:
                raise ValueError("it brings token ids; say how many there are with --vocab-size, or name the tokenizer")
            row = parse(json.dumps({**record, "id": None}).encode(), self._vocab_size)
            assert row is not None
            return Encoded(row.input_ids, row.loss_mask), []
        chat = conversation(record)
        if self._tokenizer is None:
            raise ValueError("it is text; name the model's folder with --tokenizer")
        return self._tokenizer.encode(chat.messages, chat.tools), chat.notes

    def _again(self, encoded: Encoded) -> bool:
        """Say whether the same sample came before. A digest a record is kept, not the record."""
        if self._choices.keep_duplicates:
            return False
        body = array("Q", encoded.input_ids).tobytes() + bytes(encoded.loss_mask)
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False

    def _name(self, source: str, found: Found) -> str:
        """Return the sample's own id, or one with its source before it where there is none or it is taken."""
        own = found.record.get("id", found.record.get("conversation_id"))
        usable = isinstance(own, (str, int)) and not isinstance(own, bool) and printable(str(own), _MAX_ID_CHARS)
        wanted = name = str(usable) if usable else f"{source}:{found.number}"
        if self._taken(name):
            name = f"{source}:{found.number}:{wanted}" if self._taken(f"{source}:{wanted}") else f"{source}:{wanted}"
        while self._taken(name):
            name += "+"
        self._names.add(_digest(name))
        if usable and name != wanted:
            self.account.counts[source]["renamed"] += 1
            self.account.note(source, found, "renamed", f"another record has the id {wanted!r}: this one is {name!r}")
        return name

    def _taken(self, name: str) -> bool:
        return _digest(name) in self._names

    def _refuse(self) -> None:
        choices = self._choices
        for what, skip, option in ((REFUSALS[0], choices.skip_bad, "--skip-bad"),
                                   (REFUSALS[1], choices.skip_untrained, "--skip-untrained")):  # fmt: skip
            if self.account.total(what) and not skip:
                kind = "that cannot be used" if what == "refused" else "that would train on nothing"
                head = f"records {kind}: {self.account.total(what):,}; nothing was written"
                raise PrepareError("\n".join([head, *self.account.refusals(what),
                                              f"mend them, or leave them out with {option}"]))  # fmt: skip
        if not self._lengths:
            raise PrepareError("there is no sample in these datasets; nothing was written")

    def _write(self, spool: Spool) -> dict[str, Any]:
        out, count = self._choices.out, len(spool)
        self._reporter.tell("running", "writing the corpus", force=True)
        order = shuffled(count, self._choices.seed) if self._choices.order == "shuffled" else range(count)
        size, sha256 = spool.copy(os.path.join(out, _PART), order)
        lengths = [self._lengths[number] for number in order]
        manifest = self._manifest(lengths, size, sha256)
        self._keep_other(sha256)
        discard(os.path.join(out, MANIFEST_NAME))  # it must not speak of another corpus, whenever this ends
        os.rename(os.path.join(out, _PART), os.path.join(out, CORPUS_NAME))
        sync_folder(out)
        replace_file(os.path.join(out, NOTES_NAME), self.account.notes_file())
        replace_file(os.path.join(out, MANIFEST_NAME), json.dumps(manifest, indent=1).encode("ascii") + b"\n")
        return manifest

    def _keep_other(self, sha256: str) -> None:
        """Refuse to replace another corpus: an extraction may have begun with it."""
        path = os.path.join(self._choices.out, CORPUS_NAME)
        if self._choices.replace or not os.path.exists(path):
            return
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != sha256:
            raise PrepareError(f"{path}: another corpus is there; use another folder, or replace it with --replace")

    def _manifest(self, lengths: list[int], size: int, sha256: str) -> dict[str, Any]:
        choices, account, tokenizer = self._choices, self.account, self._tokenizer
        names = ("kept", "cut", "dropped", "untrained", "duplicate", "refused", "reported", "renamed", "trained_tokens")
        needs = None
        if choices.hidden_size:
            shards_on = choices.shards_on or choices.out
            needs = extraction_needs(lengths, choices.hidden_size, choices.points, shards_on)
        return {
            "schema": SCHEMA,
            "at": time.time(),
            "corpus": {"file": CORPUS_NAME, "bytes": size, "sha256": sha256},
            "samples": len(lengths),
            "tokens": sum(lengths),
            **{name: account.total(name) for name in names},
            "longest_tokens": max(lengths),
            "lengths": histogram(lengths),
            "order": choices.order,
            "seed": choices.seed if choices.order == "shuffled" else None,
            "max_tokens": choices.max_tokens,
            "too_long": choices.too_long if choices.max_tokens else None,
            "tokenizer": tokenizer.name if tokenizer else None,
            "tokenizer_sha256": tokenizer.fingerprint if tokenizer else None,
            "template_args": choices.template_args,
            "vocab_size": self._vocab_size,
            "sources": self._sources,
            "notes": {"file": NOTES_NAME, "lines": len(account.notes)},
            "extraction": needs,
        }


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
