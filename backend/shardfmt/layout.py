"""The folders and names of shards, `rows_A-B/data_N.ckpt` in groups of 2,000, and what lies beside them."""

from __future__ import annotations

import re
from typing import Optional, Tuple

GROUP = 2000
"""Samples a folder (SpecForge's own writer; its reader walks the tree and reads no meaning into names)."""

INPUT_IDS = "input_ids"  # int64 [L]
LOSS_MASK = "loss_mask"  # int64 [L], 0 or 1
AUX_HIDDEN_STATE = "aux_hidden_state"  # bfloat16 [1, L, 3 H], capture points side by side, lowest first
HIDDEN_STATE = "hidden_state"  # bfloat16 [1, L, H], after the final norm
CANONICAL_KEYS = (INPUT_IDS, LOSS_MASK, AUX_HIDDEN_STATE, HIDDEN_STATE)

CONFIG_NAME = "data_config.json"
JOURNAL_NAME = "journal.jsonl"
LOCK_NAME = ".eightzeros.lock"
FAILED_NAME = "failed.jsonl"
INDEX_NAME = ".corpus.index"
SUFFIXES = (".ckpt", ".pt")
"""What a sample's file may end with. SpecForge's reader takes `.ckpt` alone (facts: extraction, 2a)."""

_NUMBER = r"(0|[1-9][0-9]{0,11})"
_SHARD = re.compile(r"(?:data_%s\.(?:pt|ckpt|ckpt\.gz)|hs_%s\.safetensors)" % (_NUMBER, _NUMBER))
_ROWS = re.compile(r"rows_%s-%s" % (_NUMBER, _NUMBER))
_TENSOR_FILE = re.compile(r"[^.~][^~]*\.(?:pt|pth|ckpt|safetensors|ckpt\.gz)")
_LEFTOVER = re.compile(r".*(?:\.tmp|\.part|\.lock|\.incomplete|~)|\..*")
_DIGITS = re.compile(r"[0-9]+")
_OURS = re.compile(r"\.data_%s\.(?:pt|ckpt)\.tmp" % _NUMBER)


def rows_folder(index: int) -> str:
    """Return the folder of a sample."""
    first = index // GROUP * GROUP
    return "rows_%d-%d" % (first, first + GROUP)


def shard_name(index: int, suffix: str = SUFFIXES[0]) -> str:
    """Return the file name of a sample."""
    return "data_%d%s" % (index, suffix)


def shard_path(index: int, suffix: str = SUFFIXES[0]) -> str:
    """Return a sample's file, relative to the output folder."""
    return rows_folder(index) + "/" + shard_name(index, suffix)


def temporary_name(index: int, suffix: str = SUFFIXES[0]) -> str:
    """Return a sample's name while it is written: hidden, so that no reader takes it for a shard."""
    return "." + shard_name(index, suffix) + ".tmp"


def is_our_temporary(name: str) -> bool:
    """Say whether a file is what a killed writer of ours left."""
    return _OURS.fullmatch(name) is not None


def is_rows_folder(name: str) -> bool:
    """Say whether a folder's name is that of a group of samples."""
    return _ROWS.fullmatch(name) is not None


def sample_index(name: str) -> Optional[int]:
    """Return the number of a sample, or None where the name is no sample's (`data_01.ckpt`, a copy)."""
    match = _SHARD.fullmatch(name)
    return int(match.group(1) or match.group(2)) if match else None


def file_kind(name: str) -> str:
    """Classify a file by its name alone: shard (a tensor file that can be shown), leftover or other.

    Any tensor file is a shard here, sample or not (a vocabulary mapping, an optimizer's state): it can be
    shown. Leftovers are what writers, editors and systems leave behind: hidden, temporary, lock and backup
    files.
    """
    if _TENSOR_FILE.fullmatch(name):
        return "shard"
    return "leftover" if _LEFTOVER.fullmatch(name) else "other"


def natural_key(name: str) -> Tuple[str, str]:
    """Return a sort key that reads digits as numbers, so that data_10 follows data_9."""
    return _DIGITS.sub(_by_length, name.lower()), name


def _by_length(digits: "re.Match[str]") -> str:
    """Return what sorts as the number does: how many digits it has, as a control character, and these."""
    number = digits.group().lstrip("0")
    return chr(len(number)) + number
