"""The zip layout that torch.save writes, to the byte.

Every record is stored, and its data starts on a multiple of 64 by an `FB` extra field of Zs. Local headers
hold no sizes (a descriptor follows the data), so sizes come from the directory at the end or from the
pickle. All of it is deterministic: from the names and sizes of the records follow every offset and the size
of the file. Checked against torch 2.13 byte for byte (tests/test_shardfmt.py).
"""

from __future__ import annotations

import struct
from typing import List, NamedTuple, Sequence, Tuple

ALIGNMENT = 64
U32 = 0xFFFFFFFF
"""A size or an offset from here on is written in zip64 fields (miniz compares with >=)."""

LOCAL_MAGIC = b"PK\x03\x04"
DESCRIPTOR_MAGIC = b"PK\x07\x08"
CENTRAL_MAGIC = b"PK\x01\x02"
END64_MAGIC = b"PK\x06\x06"
LOCATOR_MAGIC = b"PK\x06\x07"
END_MAGIC = b"PK\x05\x06"
LOCAL_BYTES, CENTRAL_BYTES, END64_BYTES, LOCATOR_BYTES, END_BYTES = 30, 46, 56, 20, 22

_UTF8_NAME = 0x0800
_DESCRIPTOR_FOLLOWS = 0x0008
_MADE_BY = 798  # version 30 of the format, made on Unix: what miniz states in the zip64 end record

PICKLE = "data.pkl"
HEAD_RECORDS: Tuple[Tuple[str, bytes], ...] = (
    (".format_version", b"1"),
    (".storage_alignment", b"64"),
    ("byteorder", b"little"),
)
"""What follows the pickle; older versions of torch leave out some of these."""

HEAD_SIZES = tuple((name, len(data)) for name, data in HEAD_RECORDS)
VERSION_RECORD = ("version", b"3\n")
ID_RECORD = ".data/serialization_id"
ID_BYTES = 40


class Placed(NamedTuple):
    """Where a record lies: its local header, its data, its size, and where the next local header starts."""

    name: str
    header_at: int
    data_at: int
    size_bytes: int
    next_at: int


def archive_name(file_name: str) -> str:
    """Return the folder that torch.save puts every record in: the file's name without its last extension."""
    return file_name.rsplit(".", 1)[0] if "." in file_name else file_name


def place(name: str, header_at: int, size_bytes: int, alignment: int = ALIGNMENT) -> Placed:
    """Place one record whose local header starts at `header_at`."""
    start = header_at + LOCAL_BYTES + len(name.encode("utf-8")) + _zip64_bytes(header_at, size_bytes) + 4
    start += -start % alignment
    wide = size_bytes >= U32 or header_at >= U32
    descriptor = 0 if size_bytes == 0 else 24 if wide else 16
    return Placed(name, header_at, start, size_bytes, start + size_bytes + descriptor)


def plan(
    archive: str,
    pickle_bytes: int,
    storages: Sequence[Tuple[str, int]],
    head: Sequence[Tuple[str, int]] = HEAD_SIZES,
    alignment: int = ALIGNMENT,
) -> List[Placed]:
    """Place every record, in torch.save's order. `storages` are (key, bytes), as the pickler met them.

    `head` are the small records after the pickle, for files of a torch that writes fewer of them.
    """
    sizes = [(PICKLE, pickle_bytes), *head]
    sizes += [("data/" + key, size) for key, size in storages]
    sizes += [(VERSION_RECORD[0], len(VERSION_RECORD[1])), (ID_RECORD, ID_BYTES)]
    placed: List[Placed] = []
    at = 0
    for name, size in sizes:
        placed.append(place(archive + "/" + name, at, size, alignment))
        at = placed[-1].next_at
    return placed


def file_bytes(placed: Sequence[Placed]) -> int:
    """Return the exact size of the finished file."""
    directory = sum(
        CENTRAL_BYTES + len(r.name.encode("utf-8")) + _zip64_bytes(r.header_at, r.size_bytes) for r in placed
    )
    return placed[-1].next_at + directory + END64_BYTES + LOCATOR_BYTES + END_BYTES


def local_header(record: Placed) -> bytes:
    """Return a record's local header with the padding that leads to its data."""
    name = record.name.encode("utf-8")
    zip64 = _zip64(record)
    pad = record.data_at - record.header_at - LOCAL_BYTES - len(name) - len(zip64) - 4
    extra = zip64 + b"FB" + struct.pack("<H", pad) + b"Z" * pad
    flags = _flags(record)
    return LOCAL_MAGIC + struct.pack("<5H3I2H", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(record: Placed, crc32: int) -> bytes:
    """Return what follows a record's data; an empty record has none."""
    if record.size_bytes == 0:
        return b""
    wide = record.size_bytes >= U32 or record.header_at >= U32
    form = "<IQQ" if wide else "<III"
    return DESCRIPTOR_MAGIC + struct.pack(form, crc32, record.size_bytes, record.size_bytes)


def central_entry(record: Placed, crc32: int) -> bytes:
    """Return a record's entry in the directory."""
    name, zip64 = record.name.encode("utf-8"), _zip64(record)
    size, at = min(record.size_bytes, U32), min(record.header_at, U32)
    fields = struct.pack(
        "<6H3I5H2I", 0, 0, _flags(record), 0, 0, 0, crc32, size, size, len(name), len(zip64), 0, 0, 0, 0, at
    )
    return CENTRAL_MAGIC + fields + name + zip64


def end_records(count: int, directory_bytes: int, directory_at: int) -> bytes:
    """Return the three end records. torch always writes the zip64 pair, whatever the size."""
    end64 = struct.pack("<QHHIIQQQQ", 44, _MADE_BY, 45, 0, 0, count, count, directory_bytes, directory_at)
    locator = struct.pack("<IQI", 0, directory_at + directory_bytes, 1)
    short = min(count, 0xFFFF)
    end = struct.pack("<4H2IH", 0, 0, short, short, min(directory_bytes, U32), min(directory_at, U32), 0)
    return END64_MAGIC + end64 + LOCATOR_MAGIC + locator + END_MAGIC + end


def _flags(record: Placed) -> int:
    return _UTF8_NAME | (_DESCRIPTOR_FOLLOWS if record.size_bytes else 0)


def _zip64_bytes(header_at: int, size_bytes: int) -> int:
    big, far = size_bytes >= U32, header_at >= U32
    return (4 + 16 * big + 8 * far) if big or far else 0


def _zip64(record: Placed) -> bytes:
    body = struct.pack("<QQ", record.size_bytes, record.size_bytes) if record.size_bytes >= U32 else b""
    body += struct.pack("<Q", record.header_at) if record.header_at >= U32 else b""
    return struct.pack("<HH", 1, len(body)) + body if body else b""
