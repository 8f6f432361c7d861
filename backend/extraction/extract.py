"""The extraction: a corpus in, shards out, resumable at any moment.

Exit codes: 0 every sample asked for is in the folder (with --rehearse: go); 1 it failed, or some samples could
not be extracted (they are listed), or no-go; 2 usage; 128 + the signal's number where SIGTERM or SIGINT stopped
it: what was in flight was finished and everything written was committed, so that the same command goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from backend.extraction import rehearsal
from backend.extraction.arguments import options, parser, settings
from backend.extraction.canary import Canary
from backend.extraction.corpus import Corpus, CorpusError
from backend.extraction.durable import DiskFull
from backend.extraction.engines import EngineRefused, open_engine
from backend.extraction.engines.sglang import SglangEngine
from backend.extraction.journal import (
    FolderLock,
    Header,
    Journal,
    JournalError,
    forget_missing,
    remove_leftovers,
)
from backend.extraction.ledger import Ledger
from backend.extraction.pipeline import Pipeline
from backend.extraction.progress import Reporter
from backend.extraction.selection import SelectionError, choose, rehearsed
from backend.extraction.sequential import Sequential
from backend.shardfmt import layout

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from backend.extraction.engines import Computing, Engine


def extract(args: argparse.Namespace, reporter: Reporter) -> tuple[dict[str, Any], int]:
    """Run one extraction; return its result and exit code. Raises what `main` turns into a message."""
    began = time.monotonic()
    reporter.tell("starting", "checking the corpus")
    with contextlib.ExitStack() as stack:
        engine: Computing | SglangEngine = (
            SglangEngine(settings(args)) if args.engine == SglangEngine.name else open_engine(args.engine)
        )
        stack.callback(engine.close)
        index = os.path.join(args.out, layout.INDEX_NAME)
        corpus = Corpus(args.corpus, engine.vocab_size, args.skip_bad, index)
        stack.callback(corpus.close)
        wanted = choose(corpus, args.only, args.order, args.limit)
        for bad in corpus.skipped:
            reporter.say(f"left out: {args.corpus}:{bad.line}: {bad.problem}")
        os.makedirs(args.out, exist_ok=True)
        stack.callback(FolderLock(args.out).release)
        journal = _journal(args, engine, corpus, reporter)
        stack.callback(journal.close)
        _keep_index(corpus, index, reporter)
        ledger = Ledger(engine, corpus, args.out, journal, reporter, wanted)
        if args.rehearse:
            ledger.wanted = rehearsed(ledger.missing)
        ledger.count()
        if isinstance(engine, SglangEngine) and ledger.missing:
            _canary(engine, corpus, ledger.missing, reporter, args.accept_tokens)
        started = time.monotonic()
        state, stopped_by = _run(args, engine, ledger)
        seconds = time.monotonic() - started
        result = _result(ledger, reporter, state, time.monotonic() - began)
        if args.rehearse:
            verdict = rehearsal.judge(ledger, wanted, state, seconds, bool(stopped_by))
            reporter.say(rehearsal.line(verdict))
            result["rehearsal"] = verdict
            state = "done" if verdict["go"] else "failed"
    if stopped_by and result["state"] == "stopped":
        return result, 128 + stopped_by
    return result, 0 if state == "done" else 1


def _journal(args: argparse.Namespace, engine: Engine, corpus: Corpus, reporter: Reporter) -> Journal:
    header = Header(
        corpus=os.path.abspath(corpus.path),
        corpus_sha256=corpus.sha256,
        corpus_bytes=corpus.bytes,
        corpus_lines=corpus.lines,
        engine=engine.name,
        model=engine.model,
        hidden_size=engine.hidden_size,
        capture_points=list(engine.capture_points),
        suffix=args.suffix,
    )
    journal = Journal(os.path.join(args.out, layout.JOURNAL_NAME), header)
    remove_leftovers(args.out)
    for entry in forget_missing(journal, args.out):
        reporter.say(f"{entry.file} is gone or has another size than the journal says: extracting it again")
    return journal


def _keep_index(corpus: Corpus, path: str, reporter: Reporter) -> None:
    """Spare the next start the check of the corpus; a full disk may spoil that and nothing else."""
    try:
        corpus.save_index(path)
    except (OSError, DiskFull) as error:
        reporter.say(f"{path} was not written, so that a resume checks the corpus again: {error}")


def _canary(
    engine: SglangEngine, corpus: Corpus, wanted: Sequence[int], reporter: Reporter, accept_tokens: bool
) -> None:
    reporter.tell("starting", "checking the server with one prompt, twice")
    canary = Canary(engine, corpus, wanted, accept_tokens)
    canary.check()
    engine.canary = canary.found
    reporter.say(f"canary: {json.dumps(canary.found)}")


def _run(args: argparse.Namespace, engine: Computing | SglangEngine, ledger: Ledger) -> tuple[str, int]:
    try:
        if isinstance(engine, SglangEngine):
            return Pipeline(engine, ledger, options(args)).run(args.throttle)
        return Sequential(engine, ledger).run(args.throttle)
    except BaseException as error:
        ledger.reporter.tell("failed", f"{type(error).__name__}: {error}", force=True)
        raise


def _result(ledger: Ledger, reporter: Reporter, state: str, seconds: float) -> dict[str, Any]:
    """Say what is in the folder. `samples`, `tokens` and `bytes` count resumed ones too."""
    p = reporter.progress
    return {
        "state": state,
        "samples": p.samples_done,
        "samples_wanted": p.samples_total,
        "tokens": p.tokens_done,
        "bytes": p.bytes_written,
        "shards": p.samples_done,
        "resumed": ledger.resumed,
        "failed": ledger.failed,
        "repeated": p.requests_repeated,
        "message": p.message,
        "skipped_lines": [bad.line for bad in ledger.corpus.skipped],
        "out": os.path.abspath(ledger.out),
        "seconds": round(seconds, 3),
    }


def main(argv: Sequence[str]) -> int:
    """Extract, as the command line says, and return the exit code (see the top of this file)."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as usage:
        return int(usage.code or 0)
    reporter = Reporter(args.out, quiet=args.json)
    try:
        result, code = extract(args, reporter)
    except (CorpusError, SelectionError, EngineRefused, JournalError, DiskFull, OSError) as error:
        text = f"the disk is full: {error}" if isinstance(error, DiskFull) else str(error)
        reporter.tell("failed", text, force=True)
        print(f"extract: {text}", file=sys.stderr, flush=True)
        result, code = {"state": "failed", "error": text, "out": os.path.abspath(args.out)}, 1
    if args.json:
        print(json.dumps(result), flush=True)
    return code
