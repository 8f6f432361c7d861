"""Writing a flight to a file: JSON lines, CSV, or Parquet where pyarrow is installed. A block at a time.

JSON lines are nested, {"at", "gpu": {"0": {...}}, "host": {...}, "run": {ID: {...}}}, with events among them as
{"at", "event": {...}}. CSV and Parquet have a column a name and a row a time. A reading that failed is "failed" in JSON
and CSV; Parquet has numbers and nulls only, and names the columns that failed in `failed`.
"""

from __future__ import annotations

import csv
import json
from typing import IO, TYPE_CHECKING, Any

from backend.wire.flight import FAILED, as_number, column_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from backend.wire.flight import Block, FlightEvent, Row, Value

FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


class NoPyarrow(Exception):
    """Parquet was asked for and pyarrow is not installed."""


def rows_between(blocks: Sequence[Block], start: float, end: float) -> Iterator[Row]:
    """Yield the rows of a span, oldest first."""
    for block in sorted(blocks, key=lambda block: block.head.first):
        for at, values in block.rows():
            if start <= at <= end:
                yield at, values


def write_jsonl(file: IO[str], rows: Iterator[Row], events: Sequence[FlightEvent]) -> int:
    """Write rows and events in the order of their times. Returns how many rows were written."""
    left, count = sorted(events, key=lambda event: event.at), 0
    for at, values in rows:
        while left and left[0].at <= at:
            _event(file, left.pop(0))
        file.write(json.dumps({"at": at, **nested(values)}, separators=(",", ":")) + "\n")
        count += 1
    for event in left:
        _event(file, event)
    return count


def write_csv(file: IO[str], rows: Iterator[Row], names: Sequence[str]) -> int:
    """Write rows under a line of names; what was not recorded is empty. Returns how many rows were written."""
    table, count = csv.writer(file), 0
    table.writerow(["at", *names])
    for at, values in rows:
        table.writerow([at, *(values.get(name) for name in names)])
        count += 1
    return count


def write_parquet(path: Path, rows: Iterator[Row], names: Sequence[str], each: int = 3600) -> int:
    """Write rows as 64-bit floats, a row group for `each` of them. Returns how many rows were written.

    Raises NoPyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise NoPyarrow("Parquet needs pyarrow: pip install 'eightzeros[export]'") from None
    fields = [("at", pa.float64()), *((name, pa.float64()) for name in names), ("failed", pa.list_(pa.string()))]
    schema, count = pa.schema(fields), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(rows, each):
            table: dict[str, list[Any]] = {"at": [at for at, _ in group]}
            table |= {name: [as_number(values.get(name)) for _, values in group] for name in names}
            table["failed"] = [[name for name, value in values.items() if value == FAILED] for _, values in group]
            writer.write_table(pa.table(table, schema=schema))
            count += len(group)
    return count


def column_names(blocks: Sequence[Block]) -> list[str]:
    """List every column of some blocks, the same reading of all GPUs side by side."""
    return sorted({name for block in blocks for name in block.names}, key=column_order)


def nested(values: dict[str, Value]) -> dict[str, Any]:
    """Set `gpu0.power_w` under gpu, 0, power_w."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        group, _, key = name.partition(".")
        if group.startswith("gpu") and group[3:].isdigit():
            result.setdefault("gpu", {}).setdefault(group[3:], {})[key] = value
        elif group == "run":
            run_id, _, key = key.rpartition(".")
            result.setdefault("run", {}).setdefault(run_id, {})[key] = value
        else:
            result.setdefault(group, {})[key] = value
    return result


def _event(file: IO[str], event: FlightEvent) -> None:
    file.write(json.dumps({"at": event.at, "event": vars(event)}, separators=(",", ":")) + "\n")


def _groups(rows: Iterator[Row], each: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) >= each:
            yield group
            group = []
    if group:
        yield group
