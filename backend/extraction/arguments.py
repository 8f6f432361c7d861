"""The command line of the extraction."""

from __future__ import annotations

import argparse

from backend.extraction.engines import NAMES
from backend.extraction.engines.sglang import Settings
from backend.extraction.selection import REHEARSED, order_of
from backend.extraction.watch import Options
from backend.shardfmt import layout


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    words = argparse.ArgumentParser(
        prog="extract", description="Extract hidden states of a corpus into shards; the same command resumes."
    )
    words.add_argument("--engine", choices=NAMES, default="embedded", help="what computes the states")
    words.add_argument("--corpus", required=True, help="JSON lines of input_ids, loss_mask (optional), id (optional)")
    words.add_argument("--out", required=True, help="the folder of the shards; made where absent")
    words.add_argument("--suffix", choices=layout.SUFFIXES, default=layout.SUFFIXES[0],
                       help="what shards' names end with; SpecForge reads .ckpt only")  # fmt: skip
    words.add_argument("--skip-bad", action="store_true", help="leave out bad lines and list them")
    words.add_argument("--throttle", type=_positive_float, metavar="SAMPLES_PER_S", help="a rate limit")
    words.add_argument("--json", action="store_true", help="print one JSON object at the end; all else to stderr")
    _choice(words.add_argument_group("which samples"))
    _server(words.add_argument_group("with --engine sglang"))
    return words


def _choice(words: argparse._ArgumentGroup) -> None:
    words.add_argument("--only", metavar="FILE-OR-IDS",
                       help="ids or #INDEX, with commas between, or a file of them, such as failed.jsonl")  # fmt: skip
    words.add_argument("--order", type=order_of, default="corpus", help="corpus, shortest, longest, or seed:N")
    words.add_argument("--limit", type=_positive_int, help="only the first N samples of that order")
    words.add_argument("--rehearse", action="store_true",
                       help=f"extract {REHEARSED} samples, then say rate, time, bytes, and go or no-go")  # fmt: skip


def _server(words: argparse._ArgumentGroup) -> None:
    server, trying = Settings(), Options()
    words.add_argument("--server", default=server.url, metavar="URL", help="default: %(default)s")
    words.add_argument("--staging", default="", help="the staging folder, where it is not what the server says")
    words.add_argument("--model", default="", help="the model's folder, where it is not what the server says")
    words.add_argument("--points", type=_points, default=(), metavar="N,N,N",
                       help="capture points that the server must have; default: those it has")  # fmt: skip
    words.add_argument("--max-new-tokens", type=int, choices=(0, 1), default=server.max_new_tokens)
    words.add_argument("--request-timeout", type=_positive_float, default=server.request_timeout_s, metavar="S")
    words.add_argument("--concurrency", type=_positive_int, default=trying.concurrency, help="requests in flight")
    words.add_argument("--writers", type=_positive_int, default=trying.writers, help="threads that write shards")
    words.add_argument("--retries", type=_whole, default=trying.retries, help="of one sample, before it is listed")
    words.add_argument("--server-wait", type=_positive_float, default=trying.server_wait_s, metavar="S",
                       help="how long to wait for a server that is gone")  # fmt: skip
    words.add_argument("--record-wait", type=_positive_float, default=trying.record_wait_s, metavar="S",
                       help="how long after an answer its states may come")  # fmt: skip
    words.add_argument("--drain", type=_positive_float, default=trying.drain_s, metavar="S",
                       help="how long a stop may take to finish what is in flight")  # fmt: skip
    words.add_argument("--stall", type=_positive_float, default=trying.stall_s, metavar="S",
                       help="how long nothing may come before it is called stalled")  # fmt: skip
    words.add_argument("--accept-tokens", action="store_true",
                       help="go on although the model does not seem to know such text")  # fmt: skip


def settings(args: argparse.Namespace) -> Settings:
    """Return how to reach the server."""
    return Settings(args.server, args.staging, args.model, args.points, args.request_timeout, args.max_new_tokens)


def options(args: argparse.Namespace) -> Options:
    """Return how hard to try."""
    return Options(
        args.concurrency,
        args.writers,
        args.retries,
        args.server_wait,
        args.record_wait,
        args.drain,
        args.stall,
    )


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _points(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
