"""Small files as torch.save writes them, without torch: tensors of a vocabulary map, or counts."""

from __future__ import annotations

import pickle
import zlib
from typing import TYPE_CHECKING

from backend.shardfmt import torchzip
from backend.shardfmt.torchpickle import TensorSpec, pickle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


def tensors_file(name: str, tensors: dict[str, NDArray[np.generic]]) -> bytes:
    """Return a file of this name with a dictionary of tensors."""
    specs = [TensorSpec(key, str(values.dtype), values.shape) for key, values in tensors.items()]
    return _archive(name, pickle_of(specs), [values.tobytes() for values in tensors.values()])


def counts_file(name: str, counts: dict[int, int]) -> bytes:
    """Return a file of this name with a dictionary of whole numbers."""
    return _archive(name, pickle.dumps(counts, 2), [])


def _archive(name: str, pickled: bytes, storages: Sequence[bytes]) -> bytes:
    sizes = [(str(number), len(data)) for number, data in enumerate(storages)]
    placed = torchzip.plan(torchzip.archive_name(name), len(pickled), sizes)
    heads = [data for _, data in torchzip.HEAD_RECORDS]
    bodies = [pickled, *heads, *storages, torchzip.VERSION_RECORD[1], b"0" * torchzip.ID_BYTES]
    out, directory = bytearray(), b""
    for number, record in enumerate(placed):
        crc = zlib.crc32(bodies[number])
        out += torchzip.local_header(record) + bodies[number] + torchzip.descriptor(record, crc)
        directory += torchzip.central_entry(record, crc)
    return bytes(out) + directory + torchzip.end_records(len(placed), len(directory), len(out))
