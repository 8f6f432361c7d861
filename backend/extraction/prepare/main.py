"""The command line of the prepare stage.

Exit codes: 0 the corpus is written (whether the extraction fits the disk is said, not judged: the old cache may be
retired first); 1 it was refused or failed, and nothing was written; 2 usage; 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from backend.extraction.durable import DiskFull
from backend.extraction.journal import FolderLock, JournalError
from backend.extraction.prepare.account import needs_line, size_words
from backend.extraction.prepare.masks import POLICIES
from backend.extraction.prepare.preparation import CORPUS_NAME, NOTES_NAME, Choices, Preparation
from backend.extraction.prepare.sources import PrepareError, named
from backend.extraction.prepare.tokenise import BYTES, model_config, open_tokenizer
from backend.extraction.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

MARKED = ("cut", "dropped", "untrained", "duplicate", "refused", "reported", "renamed")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    words = argparse.ArgumentParser(prog="prepare", description="Merge datasets into one shuffled corpus of token ids.")
    words.add_argument("datasets", nargs="+", metavar="[NAME=]FILE", help="JSON lines, a JSON array, or parquet")
    words.add_argument("--out", required=True, help=f"the folder of {CORPUS_NAME} and its manifest; made where absent")
    words.add_argument("--tokenizer", help=f"the model's folder, or `{BYTES}`; not needed for records of token ids")
    words.add_argument("--trust-code", action="store_true", help="run the tokenizer's own code from the model's folder")
    words.add_argument("--template-args", type=_object, default={}, metavar="JSON", help="for the chat template")
    words.add_argument("--seed", type=int, default=0, help="of the shuffle (default 0)")
    words.add_argument("--order", choices=("shuffled", "given"), default="shuffled")
    words.add_argument("--max-tokens", type=_positive, help="the longest sample")
    words.add_argument("--too-long", choices=POLICIES, default="cut", help="what is done with a longer one")
    words.add_argument("--skip-bad", action="store_true", help="leave out records that cannot be used")
    words.add_argument("--skip-untrained", action="store_true", help="leave out records that would train on nothing")
    words.add_argument("--keep-duplicates", action="store_true", help="keep records that are there twice")
    words.add_argument("--vocab-size", type=_positive, default=0, help="of the model (default: of the tokenizer)")
    words.add_argument("--hidden-size", type=_positive, default=0, help="of the model, to say what extraction needs")
    words.add_argument("--points", type=_points, default=3, help="capture points: how many, or which (default 3)")
    words.add_argument("--shards-on", default="", metavar="DIR", help="where the shards will be (default: --out)")
    words.add_argument("--replace", action="store_true", help="replace another corpus in the folder")
    words.add_argument("--json", action="store_true", help="print the manifest at the end; all else to stderr")
    return words


def main(argv: Sequence[str]) -> int:
    """Prepare, as the command line says, and return the exit code (see the top of this file)."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as usage:
        return int(usage.code or 0)
    os.makedirs(args.out, exist_ok=True)
    reporter = Reporter(args.out, quiet=args.json)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        manifest = _prepare(args, reporter)
    except (PrepareError, JournalError, DiskFull, OSError) as error:
        text = f"the disk is full: {error}; nothing was written" if isinstance(error, DiskFull) else str(error)
        reporter.tell("failed", text.partition("\n")[0], force=True)
        print(f"prepare: {text}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as interrupt:
        number = int(interrupt.args[0]) if interrupt.args else int(signal.SIGINT)
        reporter.tell("stopped", "nothing was written", force=True)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in summary(manifest):
        reporter.say(line)
    if args.json:
        print(json.dumps(manifest), flush=True)
    return 0


def _prepare(args: argparse.Namespace, reporter: Reporter) -> dict[str, Any]:
    tokenizer = open_tokenizer(args.tokenizer, args.template_args, args.trust_code) if args.tokenizer else None
    config = model_config(args.tokenizer) if args.tokenizer and args.tokenizer != BYTES else {}
    names = ("out", "seed", "order", "max_tokens", "too_long", "skip_bad", "skip_untrained", "keep_duplicates",
             "vocab_size", "points", "shards_on", "replace", "template_args")  # fmt: skip
    choices = Choices(
        datasets=named(args.datasets),
        hidden_size=args.hidden_size or int(config.get("hidden_size") or 0),
        **{name: getattr(args, name) for name in names},
    )
    lock = FolderLock(args.out)
    try:
        return Preparation(choices, tokenizer, reporter).run()
    finally:
        lock.release()


def summary(manifest: dict[str, Any]) -> list[str]:
    """Say what was prepared, in lines."""
    lines = []
    for source in manifest["sources"]:
        left = [f"{source[what]:,} {what}" for what in MARKED if source[what]]
        lines.append(f"{source['name']}: {source['samples']:,} of {source['records']:,} records, "
                     f"{source['tokens']:,} tokens" + (f" ({', '.join(left)})" if left else ""))  # fmt: skip
    lines.append(
        f"{manifest['samples']:,} samples, {manifest['tokens']:,} tokens ({manifest['trained_tokens']:,} trained on), "
        f"the longest {manifest['longest_tokens']:,}; {CORPUS_NAME} {size_words(manifest['corpus']['bytes'])}"
    )
    if manifest["notes"]["lines"]:
        lines.append(f"{manifest['notes']['lines']:,} notes, record by record, in {NOTES_NAME}")
    lines.append(needs_line(manifest["extraction"]) if manifest["extraction"] else
                 "say --hidden-size (and --points) to hear what the extraction will need")  # fmt: skip
    return lines


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _points(text: str) -> int:
    """Read how many capture points there are: a number, or a list of them."""
    return len(set(map(int, text.split(",")))) if "," in text else _positive(text)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value
