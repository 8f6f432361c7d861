"""The arrow dataset beside exported states, in the layout that `datasets` gives a folder saved to disk.

The files were compared with what datasets 5.1.0 writes; speculators asks for 4.0 to 5.1. pyarrow is imported here
alone.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from backend.extraction.durable import DiskFull, replace_file
from backend.extraction.readshard import ShardError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

DATA_NAME = "data-00000-of-00001.arrow"
_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
FEATURES = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}}
_BATCH_ROWS = 256


def need_pyarrow() -> None:
    """Raise ShardError saying what to install where pyarrow is missing: it is noticed before hours of work."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ShardError(
            f"the dataset is written with pyarrow, which {sys.executable} has not: install it there "
            "(pip install pyarrow, or eightzeros[export]); speculators needs it as well"
        ) from None


def write_dataset(folder: str, rows: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], fingerprint: str) -> None:
    """Write ids, mask and length of each row, in order, as torch tensors to be. Raises DiskFull or OSError."""
    import pyarrow as pa

    schema = pa.schema(
        [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
    )
    try:
        with open(os.path.join(folder, DATA_NAME), "wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                batch: list[tuple[Any, Any]] = []
                for row in rows:
                    batch.append(row)
                    if len(batch) == _BATCH_ROWS:
                        stream.write_batch(_batch(pa, schema, batch))
                        batch = []
                if batch:
                    stream.write_batch(_batch(pa, schema, batch))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(os.strerror(error.errno)) from error
        raise
    info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_NAME}], "_fingerprint": fingerprint, "_format_columns": None,
        "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    for name, record in (("dataset_info.json", info), ("state.json", state)):
        replace_file(os.path.join(folder, name), json.dumps(record, indent=2).encode("ascii") + b"\n")


def _batch(pa: Any, schema: Any, rows: list[tuple[Any, Any]]) -> Any:
    offsets = [0]
    for ids, _ in rows:
        offsets.append(offsets[-1] + len(ids))
    columns = []
    for number in (0, 1):
        flat = pa.concat_arrays([pa.array(row[number], pa.int64()) for row in rows])
        columns.append(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat))
    columns.append(pa.array([len(ids) for ids, _ in rows], pa.int64()))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
