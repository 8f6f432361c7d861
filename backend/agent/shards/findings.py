"""What can be wrong with a file, each kind under a code that does not change: the audit counts by them."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

INFO, WARNING, ERROR = "info", "warning", "error"


class Finding(NamedTuple):
    """One thing found in a file. `subject` is the tensor's key or the record's name; empty: the whole file."""

    code: str
    level: str
    text: str
    subject: str = ""

    def as_note(self) -> Dict[str, Any]:
        """Return it as a reply holds it."""
        return dict(self._asdict())


MEANINGS: Dict[str, str] = {
    # the file
    "empty-file": "it has no bytes",
    "zero-filled": "it begins with zeros only",
    "truncated": "it ends early; says which size is expected and how much is whole",
    "trailing-bytes": "bytes follow its end",
    "sparse": "parts of it were never written and read as zeros (holes)",
    "zero-pages": "whole pages of a floating-point tensor are zero (deep)",
    "changed": "it was written to while it was read",
    "lfs-pointer": "a Git LFS pointer in place of the file",
    "unsupported-format": "a format that is known and not read here",
    "unknown-format": "no format that is known",
    "bad-json": "a JSON file that is none, or says a name twice",
    "too-large": "its description is longer than is read here",
    "too-deep": "its structure is deeper than is followed",
    # zip containers
    "bad-directory": "the directory at its end is damaged or does not fit",
    "duplicate-record": "a record is there twice: readers differ on which counts",
    "two-data-pkl": "it holds two descriptions: readers differ on which counts",
    "record-outside": "a record does not fit before the directory",
    "record-overlap": "two records share bytes",
    "bad-local-header": "a record's own header is damaged: torch.load(mmap=True) reads garbage without an error",
    "header-mismatch": "a record's own header and the directory disagree on how it is packed",
    "name-mismatch": "a record's own header says another name than the directory",
    "encrypted-flag": "a record is marked as encrypted: readers differ",
    "bad-record": "a record cannot be unpacked",
    "crc-mismatch": "a record's bytes are not those that were written: flipped bits, lost pages",
    "no-checksum": "it was written without checksums, so flipped bits cannot be found (deep)",
    "misaligned": "a storage does not start where torch.save puts it",
    "compressed-storage": "a storage is compressed: it cannot be mapped",
    "not-written": "a record's place is still zero",
    "not-torch": "a zip archive that torch.save did not write",
    "not-checked": "more storages than are looked at",
    # the description
    "bad-pickle": "no pickle that torch.save writes",
    "pickle-tail": "bytes hide behind the end of the description",
    "bad-tensor": "a tensor's description makes no sense",
    "bad-storage": "a storage's description makes no sense",
    "storage-missing": "a storage that the description names is not there",
    "storage-size": "a storage has another size than the description says",
    "unreferenced-record": "a storage that no tensor uses",
    "view-outside-storage": "a tensor reaches beyond its storage",
    "cut-tensor": "a tensor's bytes are not all there",
    "shape-overflow": "a shape of more elements than can be counted",
    "unknown-type": "an element type that is not known here",
    "two-types": "tensors of different types share a storage",
    "shared-storage": "tensors share a storage",
    "oversized-storage": "a storage far larger than what is used of it",
    "big-endian": "its numbers are big-endian",
    "not-a-container": "it holds one object, not tensors by name",
    # safety
    "unknown-global": "loading it would import and call what is no part of a tensor file",
    "torchscript": "it holds code",
    "bare-pickle": "a pickle of its own: loading it runs what it says",
    # safetensors and numpy
    "bad-header": "a header that cannot be read",
    "bad-entry": "a tensor's entry in the header makes no sense",
    "bad-metadata": "metadata that the reference loader refuses",
    "duplicate-key": "a tensor is there twice",
    "overlap": "two tensors share bytes",
    "hole": "bytes between tensors belong to none",
    # gzip
    "bad-gzip": "a compressed stream that is damaged",
    "gzip-size": "the compressed stream holds another size than its contents need: cut off or damaged",
    # bounds of a reply
    "values-left-out": "more values than are listed",
    "notes-left-out": "more findings than are listed",
}
"""Every code and what it means; tests hold the readers to this list."""
