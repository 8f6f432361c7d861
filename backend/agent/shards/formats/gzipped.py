"""gzip of a tensor file, as SpecForge writes with --compress: read by inflating its head alone.

Whether the stream is whole follows from two numbers: the size that the description needs, and the one that the
last four bytes of the file state.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple

from backend.agent.shards.formats import legacy, numpyfile, safetensors, salvage, torchzip
from backend.agent.shards.inflated import Inflated
from backend.agent.shards.pickles.nodes import EndsEarly, Unreadable
from backend.agent.shards.report import Report
from backend.agent.shards.source import Source

MAGIC = b"\x1f\x8b"

Reader = Callable[[Source, Report], None]


def _read_zip(source: Source, report: Report) -> None:
    report.format = "torch zip"
    salvage.add_whole(report, salvage.salvage(source))


_READERS: Dict[Reader, Tuple[Callable[[Source], int], Reader]] = {
    torchzip.read: (lambda source: salvage.salvage(source).size_bytes, _read_zip),
    legacy.read: (lambda source: legacy.layout(source).size_bytes, legacy.read),
    safetensors.read: (safetensors.needed_bytes, safetensors.read),
    numpyfile.read: (numpyfile.needed_bytes, numpyfile.read),
}
"""For each reader: the size of a whole file, and how it is read from its head alone."""


def read(source: Source, report: Report, reader_of: Callable[[Source], Optional[Reader]]) -> None:
    """Fill the report. `reader_of` finds the reader of the inflated contents. Raises Unreadable."""
    report.format = "gzip"
    content = Inflated(source)
    report.content = content
    if not content.head:
        raise Unreadable("truncated", "a compressed file that ends before its contents begin")
    inner = _READERS.get(reader_of(content) or read)  # type: ignore[arg-type]
    if inner is None:
        raise Unreadable("unsupported-format", "a file compressed by gzip that holds no tensor file which is read here")
    needed, read_inner = inner
    try:
        total = needed(content)
    except EndsEarly:
        raise Unreadable("truncated", "the compressed file ends inside its description") from None
    content.size_bytes = total
    read_inner(content, report)
    report.format = "gzip of " + report.format
    if content.stated_bytes != total & 0xFFFFFFFF:
        for row in report.entries:
            row["whole"] = False
        text = "its contents need %d bytes and its end states another size: cut off, damaged, or of several members"
        report.note("gzip-size", (text + "; a deep look inflates it to tell") % total)
