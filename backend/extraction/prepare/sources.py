"""Reading datasets: JSON lines, one JSON array, or parquet, record by record.

Lines end at LF and nowhere else: U+2028, NEL and a lone CR are text (case D1). A byte order mark is skipped,
blank lines are no records, and gzip is read as what is in it. One pass reads, hashes and counts.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from backend.extraction.corpus import MAX_LINE_BYTES
from backend.wire import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BOM = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_BATCH_ROWS = 256
_BLOCK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


class PrepareError(Exception):
    """A preparation that cannot be done as asked; the text names what is wrong and what to do."""


class Dataset(NamedTuple):
    """One dataset: its name in the manifest, and its file."""

    name: str
    path: str


class Found(NamedTuple):
    """One record, or what is wrong with it. `place` names it for people: PATH:LINE, or PATH: record N."""

    place: str
    number: int
    record: dict[str, Any]
    problem: str = ""


def named(words: Sequence[str]) -> list[Dataset]:
    """Read NAME=PATH or PATH, named after the file. Raises PrepareError for a name that is there twice."""
    datasets: list[Dataset] = []
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or os.sep in name:
            name, path = os.path.basename(word).split(".", 1)[0], word
        if not name or name in (dataset.name for dataset in datasets):
            raise PrepareError(f"{word}: the name {name!r} is taken; write NAME={path} with another one")
        datasets.append(Dataset(name, path))
    return datasets


class Reader:
    """Reads one dataset once. `bytes_read` and `sha256` are of the file as it lies on the disk."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.bytes_read = 0
        self._size = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the digest of what was read, which is all of it at the end."""
        return self._digest.hexdigest()

    @property
    def percent(self) -> int:
        """Return how much of the file was read."""
        return 100 * self.bytes_read // max(self._size, self.bytes_read, 1)

    def records(self) -> Iterator[Found]:
        """Read every record. Raises PrepareError where the file itself cannot be read."""
        path = self.dataset.path
        try:
            with open(path, "rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                magic = file.read(4)
                if magic == _PARQUET:
                    yield from self._rows(file)
                    return
                file.seek(0)
                counted: Any = io.BufferedReader(_Counted(file, self))
                text: Any = gzip.GzipFile(fileobj=counted) if magic[:2] == _GZIP else counted
                yield from self._text(text)
                while counted.read(1 << 20):
                    pass
        except (OSError, EOFError) as error:
            said = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise PrepareError(f"{path}: {said}") from None

    def count(self, block: bytes | memoryview) -> None:
        """Take note of bytes that were read."""
        self.bytes_read += len(block)
        self._digest.update(block)

    def _text(self, file: BinaryIO) -> Iterator[Found]:
        number, first = 0, True
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            raw = raw[3:] if number == 1 and raw.startswith(_BOM) else raw
            text = raw.strip(b" \t\r\n")
            if first and text.startswith(b"["):
                yield from self._array(raw, file)
                return
            if len(raw) > MAX_LINE_BYTES:
                limit = MAX_LINE_BYTES >> 20
                raise PrepareError(f"{self.dataset.path}:{number}: over {limit} MiB: is this JSON lines?")
            if text:
                first = False
                yield _parsed(f"{self.dataset.path}:{number}", number, text)

    def _array(self, start: bytes, file: BinaryIO) -> Iterator[Found]:
        number = 0
        try:
            for number, item in enumerate(array_items(start, file), 1):
                yield _checked(f"{self.dataset.path}: record {number}", number, item)
        except (ValueError, RecursionError) as error:
            said = f"after record {number} it is no JSON array: {printable(str(error), 200)}"
            raise PrepareError(f"{self.dataset.path}: {said}; mend it, or turn it into JSON lines") from None

    def _rows(self, file: BinaryIO) -> Iterator[Found]:
        path = self.dataset.path
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise PrepareError(
                f"{path}: parquet is read with pyarrow, which {sys.executable} has not; install it there "
                "(pip install pyarrow), or turn the file into JSON lines"
            ) from None
        file.seek(0)
        while block := file.read(1 << 20):
            self.count(block)
        try:
            number = 0
            for batch in parquet.ParquetFile(path).iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield _checked(f"{path}: record {number}", number, row)
        except ArrowException as error:
            raise PrepareError(f"{path}: {printable(str(error), 200)}") from None


def array_items(start: bytes, file: BinaryIO) -> Iterator[Any]:
    """Read a JSON array item by item, holding one item and a block. Raises ValueError where it is none."""
    decode, text = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")()
    buffer, at, ended, wanted = text.decode(start).lstrip(), 1, False, _BLOCK_BYTES
    comma = False
    while True:
        at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]  # it matches nothing at least
        sign = buffer[at : at + 1]
        if sign == "]":
            if (buffer[at + 1 :] + text.decode(file.read(), True)).strip():
                raise ValueError("something follows its end")
            return
        if sign == "," and comma:
            at, comma = at + 1, False
            continue
        if sign and comma:
            raise ValueError("a comma is missing between two records")
        try:
            item, end = decode(buffer, at) if sign else (None, len(buffer))
        except ValueError:
            if ended or len(buffer) - at > MAX_LINE_BYTES:
                raise
            end = len(buffer)
        if end < len(buffer):
            yield item
            at, comma, wanted = end, True, _BLOCK_BYTES
            continue
        if ended:
            raise ValueError("it ends before its end")
        block = file.read(wanted)
        buffer, at, ended, wanted = buffer[at:] + text.decode(block, not block), 0, not block, 2 * wanted


class _Counted(io.RawIOBase):
    """A file that tells its reader what is read."""

    def __init__(self, file: BinaryIO, reader: Reader) -> None:
        self._file, self._reader = file, reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self._reader.count(block)
        return len(block)


def _parsed(place: str, number: int, text: bytes) -> Found:
    try:
        return _checked(place, number, json.loads(text.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Found(place, number, {}, f"not UTF-8 at byte {error.start}")
    except RecursionError:
        return Found(place, number, {}, "nested too deeply")
    except ValueError as error:
        return Found(place, number, {}, f"not JSON: {printable(str(error), 200)}")


def _checked(place: str, number: int, item: Any) -> Found:
    if isinstance(item, dict):
        return Found(place, number, item)
    return Found(place, number, {}, "not a JSON object")
