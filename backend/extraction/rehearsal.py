"""Fifty samples, and then: how fast, how long, how many bytes, and whether to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.extraction import ledger as accounts
from backend.wire import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.extraction.ledger import Ledger

STAGING_SHARE = 0.9
WAIT_SHARE = 0.1
"""Where the server's passes waited for the reader longer than this share of the time, the reader is the limit."""


def judge(ledger: Ledger, wanted: Sequence[int], state: str, seconds: float, stopped: bool) -> dict[str, Any]:
    """Judge a rehearsal of a run that wants `wanted`. Rates are over `seconds`; bytes are exact.

    `go` is false with `reasons`; `remarks` are what to know and no reason against it.
    """
    p, entries = ledger.reporter.progress, ledger.journal.entries
    left = [index for index in wanted if index not in entries]
    samples, tokens = p.samples_done, p.tokens_done
    bytes_needed = sum(ledger.size_bytes(index) for index in left)
    tokens_left = sum(ledger.corpus.tokens(index) for index in left)
    free = accounts.free_bytes(ledger.out)
    rate = tokens / seconds if seconds > 0 else 0.0
    found = {
        "samples": samples, "tokens": tokens, "seconds": round(seconds, 3),
        "samples_per_s": round(samples / seconds, 3) if seconds > 0 else 0.0,
        "tokens_per_s": round(rate, 1),
        "bytes_per_s": round(p.bytes_written / seconds) if seconds > 0 else 0,
        "samples_left": len(left), "tokens_left": tokens_left,
        "eta_s": round(tokens_left / rate, 3) if rate else (0.0 if not left else None),
        "bytes_needed": bytes_needed, "disk_free_bytes": free,
        "staging_high_bytes": p.staging_high_bytes, "staging_bound_bytes": p.staging_bound_bytes,
        "capture_wait_s": round(p.capture_wait_s, 3), "requests_repeated": p.requests_repeated,
    }  # fmt: skip
    reasons = []
    if ledger.failed:
        first = ledger.failed[0]
        reasons.append(f"{len(ledger.failed)} samples could not be extracted, the first, {first['index']}, because: "
                       f"{first['reason']}")  # fmt: skip
    if bytes_needed > free:
        reasons.append(
            f"the disk of {ledger.out} has {free / GIB:.2f} GiB free, {bytes_needed / GIB:.2f} GiB are needed: "
            f"{(bytes_needed - free) / GIB:.2f} GiB too few"
        )
    if left and not samples and not ledger.failed:
        reasons.append("nothing was extracted, so that there is no rate")
    if state != "done" and not ledger.failed:
        reasons.append("it was stopped before its end" if stopped else f"it ended before its time: {p.message}")
    remarks = []
    if p.staging_bound_bytes and p.staging_high_bytes > STAGING_SHARE * p.staging_bound_bytes:
        remarks.append(f"the staging folder was filled to {p.staging_high_bytes / GIB:.2f} GiB of "
                       f"{p.staging_bound_bytes / GIB:.2f} GiB: the disk is slower than the server")  # fmt: skip
    if seconds > 0 and p.capture_wait_s > WAIT_SHARE * seconds:
        remarks.append(f"the server waited {p.capture_wait_s:.1f} s of {seconds:.1f} s for states to be taken")
    if p.requests_repeated:
        remarks.append(f"{p.requests_repeated} requests were sent again")
    return {**found, "go": not reasons, "reasons": reasons, "remarks": remarks}


def line(verdict: dict[str, Any]) -> str:
    """Say a verdict in one line."""
    word = "go" if verdict["go"] else "no-go: " + "; ".join(verdict["reasons"])
    eta = verdict["eta_s"]
    return (
        f"rehearsal: {verdict['tokens_per_s']:,.0f} tokens/s, {verdict['samples_per_s']:g} samples/s; left: "
        f"{verdict['samples_left']:,} samples, {verdict['bytes_needed'] / GIB:.2f} GiB of "
        f"{verdict['disk_free_bytes'] / GIB:.2f} GiB free, "
        f"{'unknown time' if eta is None else f'{eta / 3600:.2f} h'}; {'; '.join([word, *verdict['remarks']])}"
    )
