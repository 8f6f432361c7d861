"""A reader of .ckpt files of its own, for tests that must not believe ours: zipfile, a closed unpickler, numpy."""

from __future__ import annotations

import collections
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

KINDS = {"LongStorage": np.dtype("<i8"), "BFloat16Storage": np.dtype("<u2")}
"""The storages that a shard may have; bfloat16 is read as its 16-bit words."""


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name. Fails on anything that a shard does not hold."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, f"{path}: a member's CRC is wrong"
        top = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("/data.pkl")
        with archive.open(f"{top}/data.pkl") as file:
            found = _Unpickler(file, archive, top).load()
    assert isinstance(found, dict)
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, top: str) -> None:
        super().__init__(file)
        self._archive, self._top = archive, top

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        assert module == "torch", f"{module}.{name} has no place in a shard"
        return KINDS[name]

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        word, kind, key, place, count = pid
        assert (word, place) == ("storage", "cpu")
        data = np.frombuffer(self._archive.read(f"{self._top}/data/{key}"), kind)
        assert data.size == count
        return data


def _tensor(storage: NDArray[Any], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    steps = tuple(step * storage.itemsize for step in stride)
    assert offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) < storage.size
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)
