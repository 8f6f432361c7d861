"""How many bytes a stage will write, before it starts: an extraction from its corpus, an export from its shards."""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from typing import Any, Dict, NamedTuple, Optional, Tuple

from backend.agent import serverlook
from backend.agent.gates import places
from backend.agent.gates.model import locate
from backend.shardfmt import layout
from backend.wire import Gate

MARGIN = 1.05
"""Beside what is predicted: 5 % for the filesystem's own and for what else is written meanwhile."""

FILE_BYTES = 4096
"""What a sample's file takes beside its tensors: the zip's parts and the last block (2 to 3 KB measured)."""

MANIFEST = "manifest.json"
PROBES, PROBE_BYTES = 64, 256 << 10
INNER = ("text_config", "language_config", "llm_config", "thinker_config")


class Unknown(Exception):
    """What cannot be predicted, and why."""


class Samples(NamedTuple):
    """How much of a corpus there is to do. Estimated where no manifest lies beside it."""

    samples: int
    tokens: int
    source: str


def check(predict: Dict[str, Any]) -> Optional[Gate]:
    """Check the disk of a stage's folder against what it will write.

    `predict` is {out, shards} for a copy of shards, or {out, corpus, limit, shape: [hidden size, points] or null,
    server}. None where the corpus or the server is absent: those are gates of their own.
    """
    out = str(predict["out"])
    needed: float
    try:
        if predict.get("shards"):
            needed, words = committed_bytes(str(predict["shards"])), "as the shards"
        else:
            corpus = os.path.expanduser(str(predict["corpus"]))
            if not os.path.isfile(corpus):
                return None
            needed, words = _extraction(predict, corpus, out)
    except (OSError, http.client.HTTPException) as error:
        if predict.get("server"):
            return None
        raise error
    except Unknown as why:
        return Gate("disk %s" % out, None, "what will be written is not known: %s" % why, "say it with `disk_gib`")
    return places.room(out, int(needed * MARGIN), "%s, and 5 %%" % words)


def committed_bytes(folder: str) -> int:
    """Return the bytes of the samples that a folder's journal holds."""
    total = 0
    try:
        with open(os.path.join(os.path.expanduser(folder), layout.JOURNAL_NAME), "rb") as file:
            for line in file:
                try:
                    total += int(json.loads(line).get("bytes") or 0)
                except (ValueError, TypeError, AttributeError):
                    continue  # the head, or the line that a crash tore
    except FileNotFoundError:
        return 0
    return total


def _extraction(predict: Dict[str, Any], corpus: str, out: str) -> Tuple[float, str]:
    corpus_has = _samples(corpus)
    hidden, points = _shape(predict, out)
    share = 1.0
    if predict.get("limit") and corpus_has.samples:
        share = min(1.0, int(predict["limit"]) / corpus_has.samples)
    token_bytes = (points + 1) * hidden * 2 + 16
    whole = share * (corpus_has.tokens * token_bytes + corpus_has.samples * FILE_BYTES)
    there = committed_bytes(out)
    words = "%d tokens (%s) of %d bytes" % (share * corpus_has.tokens, corpus_has.source, token_bytes)
    return max(0.0, whole - there), words + (", %.1f GiB are there" % (there / (1 << 30)) if there else "")


def _samples(corpus: str) -> Samples:
    try:
        with open(os.path.join(os.path.dirname(corpus), MANIFEST), "rb") as file:
            said = json.load(file)
        if said["corpus"]["file"] == os.path.basename(corpus) and said["corpus"]["bytes"] == os.path.getsize(corpus):
            return Samples(int(said["samples"]), int(said["tokens"]), "its manifest")
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a corpus from elsewhere
    return _estimate(corpus)


def _estimate(corpus: str) -> Samples:
    """Read some of the corpus, evenly spread, and take the rest for the same."""
    size = os.path.getsize(corpus)
    step = max(PROBE_BYTES, size // PROBES)
    seen = lines = tokens = 0
    with open(corpus, "rb") as file:
        for begin in range(0, size, step):
            file.seek(begin)
            if begin:
                file.readline()  # the rest of a line that began before
            end = file.tell() + PROBE_BYTES
            while file.tell() < end:
                line = file.readline()
                if not line:
                    break
                seen += len(line)
                try:
                    tokens += len(json.loads(line)["input_ids"])
                    lines += 1
                except (ValueError, KeyError, TypeError):
                    continue  # the extraction says which line is bad
    if not lines:
        raise Unknown("%s holds no records of input_ids" % corpus)
    if seen >= size:
        return Samples(lines, tokens, "counted")
    return Samples(int(lines * size / seen), int(tokens * size / seen), "estimated from %d lines" % lines)


def _shape(predict: Dict[str, Any], out: str) -> Tuple[int, int]:
    """Return (hidden size, capture points): as the stage says, as the folder's journal does, or as the server does."""
    if predict.get("shape"):
        hidden, points = predict["shape"]
        return int(hidden), int(points)
    try:
        with open(os.path.join(os.path.expanduser(out), layout.JOURNAL_NAME), "rb") as file:
            head = json.loads(file.readline())
        return int(head["hidden_size"]), len(head["capture_points"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing was extracted there yet
    if predict.get("server"):
        return _served(str(predict["server"]))
    raise Unknown("nobody says the hidden size and the capture points")


def _served(url: str) -> Tuple[int, int]:
    parts = urllib.parse.urlsplit(url)
    info = serverlook.info(parts.hostname or "", parts.port or 80)
    points, folder = serverlook.points_of(info), locate(str(info.get("model_path")), {})
    if not points or not folder:
        raise Unknown("the server's model is not on this host")
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8-sig") as file:
            config = json.load(file)
        while any(isinstance(config.get(name), dict) for name in INNER):
            config = next(config[name] for name in INNER if isinstance(config.get(name), dict))
        return int(config["hidden_size"]), len(points)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unknown("%s/config.json gives no hidden size: %r" % (folder, error)) from None
