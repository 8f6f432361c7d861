"""Tensor files to the byte, without torch: any structure, any view, and the damage that machines do."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.shardfmt import torchzip as fmt
from backend.shardfmt.dtypes import CLASS_OF, ITEM_BYTES

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(eq=False)
class Storage:
    """Bytes of one storage; shared by every tensor that is given it."""

    dtype: str
    numel: int
    data: bytes = b""
    key: str = ""

    def __post_init__(self) -> None:
        self.data = self.data or b"\x3f" * (self.numel * ITEM_BYTES[self.dtype])


@dataclass(eq=False)
class T:
    """A tensor to be written: contiguous and alone in its storage unless told otherwise."""

    dtype: str
    shape: tuple[int, ...]
    storage: Storage | None = None
    offset: int = 0
    stride: tuple[int, ...] | None = None

    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(eq=False)
class Call:
    """module.name(*args) in the pickle."""

    module: str
    name: str
    args: tuple[Any, ...] = ()


@dataclass
class Pickled:
    """A pickle under construction and the storages it has met."""

    data: bytearray = field(default_factory=lambda: bytearray(b"\x80\x02"))
    storages: list[Storage] = field(default_factory=list)

    def value(self, value: Any) -> None:
        if isinstance(value, T):
            self._tensor(value)
        elif isinstance(value, Call):
            self.data += f"c{value.module}\n{value.name}\n".encode()
            self.value(value.args)
            self.data += b"R"
        elif isinstance(value, dict):
            self.data += b"}("
            for key, item in value.items():
                self.value(key)
                self.value(item)
            self.data += b"u"
        elif isinstance(value, (list, tuple)):
            self.data += b"](" if isinstance(value, list) else b"("
            for item in value:
                self.value(item)
            self.data += b"e" if isinstance(value, list) else b"t"
        else:
            self.data += scalar(value)

    def _tensor(self, tensor: T) -> None:
        if tensor.storage is None:
            tensor.storage = Storage(tensor.dtype, tensor.numel())
        held = tensor.storage
        if held not in self.storages:
            held.key = str(len(self.storages))
            self.storages.append(held)
        stride = tensor.stride if tensor.stride is not None else strides(tensor.shape)
        classic = tensor.dtype in CLASS_OF
        self.data += b"ctorch._utils\n_rebuild_tensor_" + (b"v2\n" if classic else b"v3\n") + b"((" + scalar("storage")
        kind = f"ctorch\n{CLASS_OF[tensor.dtype]}\n" if classic else "ctorch.storage\nUntypedStorage\n"
        self.data += kind.encode() + scalar(held.key) + scalar("cpu")
        self.data += scalar(len(held.data) // (ITEM_BYTES[tensor.dtype] if classic else 1)) + b"tQ"
        for part in (tensor.offset, tensor.shape, stride, False, Call("collections", "OrderedDict")):
            self.value(part)
        self.data += b"" if classic else f"ctorch\n{tensor.dtype}\n".encode()
        self.data += b"tR"


def scalar(value: Any) -> bytes:
    """Pickle a value that holds no other."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    raw = value.encode("utf-8")
    return b"X" + struct.pack("<I", len(raw)) + raw


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.insert(0, step)
        step *= max(size, 1)
    return tuple(found)


def save(path: Path, value: Any, archive: str = "", crc: bool = True) -> None:
    """Write a structure as torch.save would."""
    pickled = Pickled()
    pickled.value(value)
    save_pickle(path, bytes(pickled.data) + b".", [(s.key, s.data) for s in pickled.storages], archive, crc)


def save_pickle(
    path: Path, pickle: bytes, storages: list[tuple[str, bytes]], archive: str = "", crc: bool = True
) -> None:
    """Write any data.pkl with its storages."""
    placed = fmt.plan(archive or fmt.archive_name(path.name), len(pickle), [(k, len(d)) for k, d in storages])
    bodies = [
        pickle,
        *(d for _, d in fmt.HEAD_RECORDS),
        *(d for _, d in storages),
        fmt.VERSION_RECORD[1],
        b"0" * 40,
    ]
    with path.open("wb") as file:
        directory = b""
        for record, body in zip(placed, bodies, strict=True):
            check = zlib.crc32(body) if crc else 0
            file.write(fmt.local_header(record) + body + fmt.descriptor(record, check))
            directory += fmt.central_entry(record, check)
        file.write(directory + fmt.end_records(len(placed), len(directory), placed[-1].next_at))


def save_sparse(path: Path, tensors: list[T]) -> None:
    """Write a file whose storages are holes, of any size, without checksums."""
    pickled = Pickled()
    holes = []
    for number, tensor in enumerate(tensors):
        tensor.storage = Storage(tensor.dtype, 0, b"\0")
        holes.append((str(number), tensor.numel() * ITEM_BYTES[tensor.dtype]))
    pickled.data += b"]("
    for number, tensor in enumerate(tensors):
        size = tensor.numel()
        pickled.data += b"ctorch._utils\n_rebuild_tensor_v2\n((" + scalar("storage")
        pickled.data += f"ctorch\n{CLASS_OF[tensor.dtype]}\n".encode() + scalar(str(number)) + scalar("cpu")
        pickled.data += scalar(size) + b"tQ"
        for part in (0, tensor.shape, strides(tensor.shape), False, Call("collections", "OrderedDict")):
            pickled.value(part)
        pickled.data += b"tR"
    data = bytes(pickled.data) + b"e."
    placed = fmt.plan(fmt.archive_name(path.name), len(data), holes)
    bodies: list[bytes | None] = [data, *(d for _, d in fmt.HEAD_RECORDS), *(None for _ in holes)]
    bodies += [fmt.VERSION_RECORD[1], b"0" * 40]
    with path.open("wb") as file:
        directory = b""
        for record, body in zip(placed, bodies, strict=True):
            file.seek(record.header_at)
            file.write(fmt.local_header(record) + (body or b""))
            file.seek(record.data_at + record.size_bytes)
            file.write(fmt.descriptor(record, 0))
            directory += fmt.central_entry(record, 0)
        file.write(directory + fmt.end_records(len(placed), len(directory), placed[-1].next_at))
    assert os.path.getsize(path) == fmt.file_bytes(placed)


def save_safetensors(path: Path, header: Any, data: bytes = b"", pad: int = 0, length: int | None = None) -> None:
    """Write a header (an object, or bytes as they are) and the data behind it."""
    raw = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
