"""What stands beside the shards: data_config.json, sample_lengths.json, our journal and its list of failures.

The files of other programs are read too: speculators' data_config.json says the hidden size, the layers and how many
samples there are (facts: shards, section 0).
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from backend.agent.shards.audit.faults import WARNING, Faults
from backend.shardfmt import layout

LENGTHS_NAME = "sample_lengths.json"
MAX_JSON_BYTES = 256 << 20
MAX_SAMPLES = 50_000_000
TOKENS = "tokens"
"""How data_config.json writes the token axis of a shape."""

Shape = Tuple[Any, ...]


class Committed(NamedTuple):
    """A line of our journal."""

    file: str
    bytes: int
    tokens: int
    crc32: int
    id: str


class Said:
    """What a folder says of itself. What it does not say is None, or empty."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.faults = Faults()
        self.hidden_size: Optional[int] = None
        self.layers: Optional[int] = None
        self.vocab_size: Optional[int] = None
        self.samples: Optional[int] = None
        self.tensors: Dict[str, Tuple[str, Shape]] = {}
        self.lengths: Dict[int, int] = {}
        self.journal: Optional[Dict[int, Committed]] = None
        self.failed: Set[int] = set()
        self.state = ""
        self.corpus: Dict[str, Any] = {}
        self._config(self._object(layout.CONFIG_NAME))
        self._lengths(self._object(LENGTHS_NAME))
        self._journal()
        self._failed()

    def _object(self, name: str) -> Dict[str, Any]:
        path = os.path.join(self.root, name)
        try:
            with open(path, "rb") as file:
                found = json.loads(file.read(MAX_JSON_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.faults.add("bad-json", "%s cannot be read: %s" % (name, error), name)
            return {}
        if not isinstance(found, dict):
            self.faults.add("bad-json", "%s is not a JSON object" % name, name)
            return {}
        return found

    def _config(self, config: Dict[str, Any]) -> None:
        model, hidden = _table(config, "model"), _table(config, "hidden_states")
        self.hidden_size = _number(config, "hidden_size") or _number(model, "hidden_size")
        points, layers = config.get("capture_points"), hidden.get("layer_ids")
        if isinstance(points, list):
            self.layers = len(points) + 1  # and the last, after the norm
        elif isinstance(layers, list) and layers:
            self.layers = len(layers)
        self.vocab_size = _number(config, "vocab_size")
        self.corpus = _table(config, "corpus")
        self.samples = _number(_table(config, "data"), "num_samples") or _number(self.corpus, "samples")
        if self.samples is not None and self.samples > MAX_SAMPLES:
            self.samples = None
        self.state = str(config.get("state") or "")
        for key, stated in _table(config, "tensors").items():
            shape = stated.get("shape") if isinstance(stated, dict) else None
            if isinstance(shape, list):
                self.tensors[key] = str(stated.get("dtype")), tuple(shape)
        for record in config.get("failed") or []:
            self._fails(record)

    def _lengths(self, lengths: Dict[str, Any]) -> None:
        for key, value in lengths.items():
            if key.isdigit() and len(key) <= 12 and isinstance(value, int):
                self.lengths[int(key)] = value

    def _journal(self) -> None:
        try:
            with open(os.path.join(self.root, layout.JOURNAL_NAME), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            self.faults.add("bad-journal", "it cannot be read: %s" % error.strerror, layout.JOURNAL_NAME)
            return
        self.journal = {}
        lines = data.split(b"\n")[:-1]  # a torn last line is not there
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    self.corpus.setdefault("sha256", record["corpus_sha256"])
                    self.corpus["path"] = record["corpus"]
                    continue
                self.journal[int(record["index"])] = Committed(
                    str(record["file"]), int(record["bytes"]), int(record["tokens"]), int(record["crc32"]),
                    str(record["id"]),
                )  # fmt: skip
            except (ValueError, TypeError, KeyError):
                self.faults.add("bad-journal", "line %d is no line of a journal" % number, layout.JOURNAL_NAME)

    def _failed(self) -> None:
        try:
            with open(os.path.join(self.root, layout.FAILED_NAME), "rb") as file:
                lines = file.read().split(b"\n")
        except OSError:
            return
        for line in lines:
            try:
                self._fails(json.loads(line))
            except ValueError:
                continue  # a list for people: the extraction reads it the same way

    def _fails(self, record: Any) -> None:
        index = record.get("index") if isinstance(record, dict) else None
        if isinstance(index, int):
            self.failed.add(index)

    @property
    def holes(self) -> Set[int]:
        """Return the numbers that are rightly not there: listed as failed, and not extracted later."""
        return self.failed - set(self.journal or ())

    def wanted(self, have: Set[int], ranges: Set[Tuple[int, int]]) -> Set[int]:
        """Return the numbers that should be there.

        Our journal says it. Without one: all from the least to the most, full folders but the last, and what
        data_config.json and sample_lengths.json say.
        """
        if self.journal is not None:
            all_of_it = self.state == "complete" and self.samples
            return set(self.journal) | (set(range(self.samples or 0)) if all_of_it else set())
        wanted = set(range(min(have), max(have) + 1)) if have else set()
        for first, after in sorted(ranges)[:-1]:
            if after - first <= MAX_SAMPLES:
                wanted |= set(range(first, after))
        return wanted | set(self.lengths) | set(range(self.samples or 0))

    def note_unfinished(self) -> None:
        """Say that an extraction has not come to its end: what is not there is no fault then."""
        if self.journal is None or self.state == "complete" or not self.samples:
            return
        left = self.samples - len(self.journal) - len(self.holes)
        if left > 0:
            text = "%d of %d samples of the corpus are not extracted; %s says %s"
            words = text % (left, self.samples, layout.CONFIG_NAME, self.state or "nothing")
            self.faults.add("not-extracted", words, level=WARNING)

    def skipped_lines(self) -> List[int]:
        """Return the lines of the corpus that the extraction left out."""
        lines = self.corpus.get("skipped_lines")
        return [line for line in lines if isinstance(line, int)] if isinstance(lines, list) else []


def _table(record: Dict[str, Any], name: str) -> Dict[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _number(record: Dict[str, Any], name: str) -> Optional[int]:
    found = record.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
