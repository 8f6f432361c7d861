"""The command line of the exports: our shards for other trainers.

`export speculators SHARDS OUT` writes a whole data folder. `export specforge SHARDS` writes the vocabulary map
alone: SpecForge reads our shards as they are. Exit codes as of the extraction; a stopped or failed export goes on
where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from backend.extraction.durable import DiskFull, replace_file
from backend.extraction.formats import arrow
from backend.extraction.formats.finalnorm import FORMS, final_norm
from backend.extraction.formats.speculators import ORDERS, SpeculatorsExport, Wishes
from backend.extraction.formats.torchfile import tensors_file
from backend.extraction.formats.vocabulary import count_trained, vocabulary_map
from backend.extraction.journal import JournalError
from backend.extraction.progress import Reporter
from backend.extraction.readshard import ShardError, ShardFolder
from backend.extraction.stop import Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

MAP_PATH = os.path.join("vocab_mapping", "vocab_mapping.pt")
"""Where SpecForge's own writer puts the map, below the data."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    words = argparse.ArgumentParser(prog="export", description="Write our shards for other trainers.")
    formats = words.add_subparsers(dest="format", required=True, metavar="FORMAT")
    one = formats.add_parser("speculators", help="a data folder of speculators 0.9")
    one.add_argument("shards", help="the folder of an extraction")
    one.add_argument("out", help="the data folder to make; it must not be there yet")
    one.add_argument("--model", default="", help="the model's folder, for the final norm (default: what was served)")
    one.add_argument("--norm-key", default="", help="the final norm's name in the weights, where it is not plain")
    one.add_argument("--norm", choices=FORMS, default="auto", help="is it times weight, or times 1 + weight")
    one.add_argument("--order", choices=ORDERS, default="corpus", help="of the rows (prepare has shuffled the corpus)")
    one.add_argument("--seed", type=int, default=0, help="of --order shuffled")
    two = formats.add_parser("specforge", help="the vocabulary map, beside the shards")
    two.add_argument("shards", help="the folder of an extraction")
    two.add_argument("--out", default="", help=f"the file to write (default: SHARDS/{MAP_PATH})")
    for command in (one, two):
        command.add_argument("--draft-vocab-size", type=int, default=0, metavar="N", help="make the maps of a draft")
        command.add_argument("--partial", action="store_true", help="although samples of the corpus are missing")
        command.add_argument("--json", action="store_true", help="print one JSON object at the end; all else to stderr")
    return words


def main(argv: Sequence[str]) -> int:
    """Export, as the command line says, and return the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as usage:
        return int(usage.code or 0)
    if args.draft_vocab_size < 0 or (args.format == "specforge" and not args.draft_vocab_size):
        print("export: --draft-vocab-size: a number of 1 or more is needed", file=sys.stderr, flush=True)
        return 2
    reporter = Reporter(os.path.dirname(os.path.abspath(args.out or args.shards)), quiet=args.json)
    with Stop() as stop:
        try:
            folder = _folder(args)
            record = _speculators(args, folder, reporter, stop) if args.format == "speculators" else _map(args, folder)
        except (ShardError, JournalError, DiskFull, OSError, ValueError) as error:
            full = f"the disk is full ({error}); make room and give the same command again: it goes on"
            text = full if isinstance(error, DiskFull) else str(error)
            reporter.tell("failed", text, force=True)
            print(f"export: {text}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            reporter.tell("stopped", "stopped; give the same command again to go on", force=True)
            return 128 + stop.signal
    reporter.say(f"{record['samples']:,} samples, {record['tokens']:,} tokens: {args.out or record['file']}")
    if args.json:
        print(json.dumps(record), flush=True)
    return 0


def _folder(args: argparse.Namespace) -> ShardFolder:
    folder = ShardFolder(args.shards)
    if not folder.complete and not args.partial:
        state, samples = folder.config.get("state"), len(folder.entries)
        raise ShardError(
            f"{args.shards}: the extraction is {state}: {samples:,} samples are there; finish it, or export "
            "what is there with --partial"
        )
    return folder


def _speculators(args: argparse.Namespace, folder: ShardFolder, reporter: Reporter, stop: Stop) -> dict[str, Any]:
    arrow.need_pyarrow()
    if args.draft_vocab_size > folder.vocab_size:
        raise ShardError(f"--draft-vocab-size {args.draft_vocab_size}: the model has {folder.vocab_size} tokens")
    norm = final_norm(folder, args.model, args.norm_key, args.norm)
    wishes = Wishes(args.out, args.order, args.seed, args.draft_vocab_size)
    return SpeculatorsExport(folder, norm, wishes, reporter, stop.asked).run()


def _map(args: argparse.Namespace, folder: ShardFolder) -> dict[str, Any]:
    maps = vocabulary_map(count_trained(folder), args.draft_vocab_size)
    path = args.out or os.path.join(args.shards, MAP_PATH)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    replace_file(path, tensors_file(os.path.basename(path), {"d2t": maps.d2t, "t2d": maps.t2d}))
    tokens = sum(entry.tokens for entry in folder.entries)
    return {"file": path, "samples": len(folder.entries), "tokens": tokens, "draft_vocab_size": args.draft_vocab_size,
            "draft_vocab_covers": round(maps.covered, 6)}  # fmt: skip
