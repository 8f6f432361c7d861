"""What is in one tensor file, at once, as one reply: see `describe` for how it is read."""

from __future__ import annotations

from typing import Any, Dict

from backend.agent.shards.describe import describe
from backend.agent.shards.findings import ERROR, INFO
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source


def show(
    path: str, deep: bool = False, values: bool = False, only: str = "", all_values: bool = False
) -> Dict[str, Any]:
    """Describe one file; with `deep`, after reading every byte; with `values`, with statistics of its tensors.

    Returns a dictionary that fits one message:

    - path, bytes, modified_at (wall seconds), format ("torch zip", "safetensors", or what else it is)
    - ok: whether no note is an error
    - tensors: how many there are; entries: those listed, in the file's order; truncated: whether fewer
    - each entry: key, dtype (torch's name), shape, bytes (of all its elements; None where uncountable),
      stride (in elements), offset (of its first element, in bytes from the start of the file, or of what
      a gzipped file inflates to; None where unknown), storage (the name of the one it views), contiguous,
      whole (all its bytes are there), note
    - logical_bytes: the sum of the entries' bytes; stored_bytes: each storage once
    - values: {key, text} of what is no tensor; metadata: texts of a safetensors header
    - statistics: None without `values`, else what `values.statistics` says of the tensors that match `only`,
      over a sample or `all_values`
    - notes: {code, level: info | warning | error, text, subject}; `findings.MEANINGS` lists the codes

    All texts are safe to show. Raises wire.Refused (not-found, is-folder, not-a-file, forbidden, unreadable)
    where there is nothing to describe; whatever is in the file, it raises nothing else.
    """
    source = Source(path)
    try:
        report = describe(source, deep)
        told = _values(source, report, only, all_values) if values else None
        return dict(_result(source, report), statistics=told)
    finally:
        source.close()


def _values(source: Source, report: Report, only: str, all_values: bool) -> Dict[str, Any]:
    from backend.agent.shards.values.statistics import statistics  # half of all imports, and few ask for values

    return statistics(source, report, only, all_values)


def _result(source: Source, report: Report) -> Dict[str, Any]:
    left = report.findings_left_out
    notes = [finding.as_note() for finding in report.findings]
    if report.values_left_out:
        text = "%d more values are not listed" % report.values_left_out
        notes.append({"code": "values-left-out", "level": INFO, "text": text, "subject": ""})
    if left:
        text = "%d more findings of these kinds" % left
        notes.append({"code": "notes-left-out", "level": ERROR, "text": text, "subject": ""})
    return {
        "path": source.path,
        "format": report.format,
        "bytes": source.size_bytes,
        "modified_at": source.modified_at,
        "ok": report.ok and not left,
        "tensors": report.tensors,
        "entries": report.entries,
        "truncated": len(report.entries) < report.tensors,
        "logical_bytes": report.logical_bytes,
        "stored_bytes": report.stored_bytes,
        "values": report.values,
        "metadata": report.metadata,
        "notes": notes,
    }
