"""A corpus of token ids: JSON lines of {"input_ids": [...]}, with "loss_mask": [...] and "id" where wanted.

Lines end at LF and nowhere else: U+2028 and its kind are text (case D1). One checking pass before anything
starts finds every bad line, totals samples and tokens, and keeps only where each sample lies in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from backend.extraction.durable import replace_file
from backend.wire import SCHEMA, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINE_BYTES = 64 << 20
MAX_ID_CHARS = 200
_DIGEST_BYTES = 32
MAX_LISTED = 20
"""Bad lines that an error names one by one; the rest is counted."""


class BadLine(NamedTuple):
    """A line that is no sample, counted from 1, and what is wrong with it."""

    line: int
    problem: str


class CorpusError(Exception):
    """A corpus that cannot be extracted; the text names file, lines and what is wrong."""


@dataclass(frozen=True)
class Row:
    """One sample. `loss_mask` is all ones where the corpus has none."""

    index: int
    id: str
    input_ids: list[int]
    loss_mask: list[int]


class Corpus:
    """A checked corpus. `skipped` are the bad lines left out on request."""

    def __init__(self, path: str, vocab_size: int, skip_bad: bool = False, index: str = "") -> None:
        """Check every line. Raises CorpusError where it cannot be read, has no sample, or has bad lines.

        `index` is what `save_index` wrote for this same content: a resume then only reads and hashes the file.
        """
        self.path, self._vocab_size = path, vocab_size
        self.lines = 0
        self.sha256 = ""
        self.skipped: list[BadLine] = []
        self._starts = array("Q")
        self._tokens = array("Q")
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (kept for `row`)
        except OSError as error:
            raise CorpusError(f"{path}: {os.strerror(error.errno or 0)}") from None
        try:
            if not (index and self._load_index(index)):
                self._check()
            self.bytes = os.fstat(self._file.fileno()).st_size
            self._refuse(skip_bad)
        except OSError as error:
            self.close()
            raise CorpusError(f"{path}: {os.strerror(error.errno or 0)}") from None
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._starts)

    def tokens(self, index: int) -> int:
        """Return the number of tokens of one sample."""
        return self._tokens[index]

    def row(self, index: int) -> Row:
        """Read one sample again. Raises CorpusError where the file is not what was checked."""
        self._file.seek(self._starts[index])
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        try:
            sample = parse(raw, self._vocab_size)
        except ValueError as error:
            sample, problem = None, str(error)
        else:
            problem = f"{len(sample.input_ids) if sample else 0} tokens, not {self._tokens[index]}"
        if sample is None or len(sample.input_ids) != self._tokens[index]:
            raise CorpusError(f"{self.path}: sample {index} changed since the corpus was checked: {problem}")
        return replace(sample, index=index, id=sample.id or str(index))

    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return max(self._tokens)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def save_index(self, path: str) -> None:
        """Keep where each sample lies, for the next time. Raises DiskFull or OSError."""
        head = {"schema": SCHEMA, "sha256": self.sha256, "lines": self.lines, "vocab_size": self._vocab_size,
                "samples": len(self), "skipped": self.skipped}  # fmt: skip
        data = json.dumps(head).encode("ascii") + b"\n" + self._starts.tobytes() + self._tokens.tobytes()
        replace_file(path, data + hashlib.sha256(data).digest(), durable=False)

    def _load_index(self, path: str) -> bool:
        """Take over what was found out earlier, where it was about these same bytes; say whether."""
        try:
            with open(path, "rb") as file:
                data = file.read()
            line, _, arrays = data[:-_DIGEST_BYTES].partition(b"\n")
            head = json.loads(line)
            if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
                return False
        except (OSError, ValueError):
            return False
        if (head["schema"], head["vocab_size"]) != (SCHEMA, self._vocab_size) or head["sha256"] != self._hash():
            return False
        half = head["samples"] * self._starts.itemsize
        self._starts.frombytes(arrays[:half])
        self._tokens.frombytes(arrays[half:])
        self.sha256, self.lines = head["sha256"], head["lines"]
        self.skipped = [BadLine(*bad) for bad in head["skipped"]]
        return True

    def _hash(self) -> str:
        digest = hashlib.sha256()
        while block := self._file.read(1 << 20):
            digest.update(block)
        self._file.seek(0)
        return digest.hexdigest()

    def _check(self) -> None:
        digest, start = hashlib.sha256(), 0
        for raw in _lines(self._file):
            self.lines += 1
            digest.update(raw)
            if len(raw) > MAX_LINE_BYTES:
                raise CorpusError(f"{self.path}:{self.lines}: over {MAX_LINE_BYTES >> 20} MiB: is this JSON lines?")
            skip = 3 if start == 0 and raw.startswith(b"\xef\xbb\xbf") else 0
            try:
                sample = parse(raw[skip:], self._vocab_size)
            except ValueError as error:
                self.skipped.append(BadLine(self.lines, str(error)))
            else:
                if sample is not None:
                    self._starts.append(start + skip)
                    self._tokens.append(len(sample.input_ids))
            start += len(raw)
        self.sha256 = digest.hexdigest()

    def _refuse(self, skip_bad: bool) -> None:
        if self.skipped and not skip_bad:
            listed = [f"{self.path}:{bad.line}: {bad.problem}" for bad in self.skipped[:MAX_LISTED]]
            more = len(self.skipped) - len(listed)
            listed += [f"and {more} more"] if more else []
            listed += ["nothing was extracted; mend these lines, or leave them out with --skip-bad"]
            raise CorpusError("\n".join(listed))
        if not len(self):
            raise CorpusError(f"{self.path}: there is no sample in it")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline(MAX_LINE_BYTES + 1):
        yield raw


def parse(raw: bytes, vocab_size: int) -> Row | None:
    """Read one line, without its index; None where it is blank. Raises ValueError saying what is wrong."""
    if not raw.strip(b" \t\r\n"):
        return None
    try:
        record = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {printable(str(error), 200)}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    ids = _ids(record.get("input_ids"), vocab_size)
    return Row(-1, _id(record.get("id")), ids, _mask(record.get("loss_mask"), len(ids)))


def _ids(ids: Any, vocab_size: int) -> list[int]:
    if ids is None:
        raise ValueError('no "input_ids"')
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise ValueError('"input_ids" is not a flat list of whole numbers')
    if not ids:
        raise ValueError('"input_ids" is empty')
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(f"token {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
    return ids


def _mask(mask: Any, length: int) -> list[int]:
    if mask is None:
        return [1] * length
    if not isinstance(mask, list) or set(map(type, mask)) - {int, bool} or set(mask) - {0, 1}:
        raise ValueError('"loss_mask" is not a flat list of 0 and 1')
    if len(mask) != length:
        raise ValueError(f'"loss_mask" has {len(mask)} values for {length} tokens')
    return [int(value) for value in mask]


def _id(value: Any) -> str:
    """Return the sample's own name, safe to show: an id is whatever some program wrote."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError('"id" is neither text nor a whole number')
    return printable(str(value), MAX_ID_CHARS)
