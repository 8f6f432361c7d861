"""The batch lines of SGLang's log, as six generations of it wrote them (2025 to 2026).

Fields come in any order and number; what has neither a queue nor a number of running requests is a line that was
cut short. Every rank of a tensor-parallel group writes the same batch, so it is counted from the lowest one only.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Optional, Tuple

WINDOW_S = 60.0

_LINE = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?((?: [A-Z]{2}\d+)*)\] (Prefill|Decode) batch(?: \[(\d+)\])?[.,] (.*)"
)
_FIELD = re.compile(r"([#\w][\w #().,/-]*?): ?(-?[\w.%]+)(?:, |,? *$)")


@dataclass
class Batch:
    """One line. `at` is wall time of the server's clock; what a generation does not write is None."""

    at: float
    kind: str  # prefill, decode
    rank: str
    new_tokens: int = 0
    cached_tokens: int = 0
    queue: int = 0
    running: int = 0
    pending_tokens: Optional[int] = None
    tokens_per_s: Optional[float] = None
    iteration: Optional[int] = None


def parse(line: str) -> Optional[Batch]:
    """Read a line, or return None where it is no batch's or was cut short."""
    found = _LINE.search(line)
    if found is None:
        return None
    second, fraction, ranks, kind, iteration, rest = found.groups()
    fields = dict(_FIELD.findall(rest))
    running, queue = _whole(fields, "#running-req"), _whole(fields, "#queue-req")
    if running is None or queue is None:
        return None
    try:
        at = time.mktime(time.strptime(second, "%Y-%m-%d %H:%M:%S")) + float(fraction or 0.0)
    except (ValueError, OverflowError):
        return None
    name = "input throughput (token/s)" if kind == "Prefill" else "gen throughput (token/s)"
    return Batch(
        at, kind.lower(), ranks.strip(), _whole(fields, "#new-token") or 0, _whole(fields, "#cached-token") or 0,
        queue, running, _whole(fields, "#pending-token"), _number(fields, name), int(iteration) if iteration else None,
    )  # fmt: skip


def _whole(fields: Dict[str, str], name: str) -> Optional[int]:
    value = fields.get(name, "")
    return int(value) if value.isdigit() else None


def _number(fields: Dict[str, str], name: str) -> Optional[float]:
    try:
        return float(fields[name])
    except (KeyError, ValueError):
        return None


class Counter:
    """Counts what a server prefilled, each batch once, over the last minute of the log's own time."""

    def __init__(self) -> None:
        self._lowest: Dict[str, int] = {}
        self._seen: Deque[Tuple[float, int]] = deque()
        self._newest: Dict[str, Batch] = {}
        self.new_tokens = 0
        self.cached_tokens = 0
        self.newest_at = 0.0

    def take(self, line: str) -> Optional[Batch]:
        """Count a line. Returns its batch, or None where it is none or another rank's of one already counted."""
        batch = parse(line)
        if batch is None:
            return None
        ranks = dict(re.findall(r"([A-Z]{2})(\d+)", batch.rank))
        group, tensor = ranks.get("DP", "0"), int(ranks.get("TP", 0))
        if tensor > self._lowest.setdefault(group, tensor) or ranks.get("PP", "0") != "0":
            return None
        self._lowest[group] = tensor
        self._newest[group] = batch
        self.newest_at = batch.at
        if batch.kind == "prefill":
            self.new_tokens += batch.new_tokens
            self.cached_tokens += batch.cached_tokens
            self._seen.append((batch.at, batch.new_tokens))
            while self._seen[0][0] < batch.at - WINDOW_S:
                self._seen.popleft()
        return batch

    @property
    def window_tokens(self) -> int:
        """Return the tokens that were prefilled in the minute before the newest batch."""
        return sum(tokens for _, tokens in self._seen)

    def tokens_per_s(self, now: float) -> float:
        """Return the rate over the last minute before `now`, on the server's clock; 0 where nothing came."""
        recent = [(at, tokens) for at, tokens in self._seen if at > now - WINDOW_S]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(1.0, min(WINDOW_S, now - recent[0][0]))

    def waiting(self) -> Tuple[int, int]:
        """Return (requests in the queue, requests running) of all data-parallel groups."""
        newest = list(self._newest.values())
        return sum(batch.queue for batch in newest), sum(batch.running for batch in newest)
