"""One resolution of the record: rows into a tail file, full blocks into segments, old segments dropped first.

The tail holds the rows of the block that is not full yet, a JSON line each: its first line is the block's serial, a
list of texts names the columns from there on, a list that begins with a number is a row. A row that a crash tore is
left out. Once a block lies in a segment the tail is emptied; a crash in between leaves both, with the same serial, and
the tail is then ignored.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Tuple

from backend.agent.files import sync_folder
from backend.agent.flight.segments import SUFFIX, cut_torn, newest_segment, segment_names
from backend.wire.flight import FAILED, Row, Value, encode_block, read_head

TAIL = "tail"
BLOCKS_A_SEGMENT = 60
BLOCK_BYTES = 128 * 1024
"""A block that comes out larger is halved: in base64 it must fit a line of the wire."""


class Level:
    """The rows of one step, written by the one recorder. `span_s` is what a block covers, aligned to the clock.

    `append` raises OSError where the disk takes nothing; the row is then lost and the record whole.
    """

    def __init__(self, folder: str, step_s: int, span_s: int) -> None:
        self.step_s, self._span_s = step_s, span_s
        self._folder = os.path.join(folder, str(step_s))
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._segment, serial = newest_segment(self._folder)
        self._blocks = cut_torn(os.path.join(self._folder, self._segment)) if self._segment else 0
        self._serial = serial + 1
        self._rows: List[Row] = []
        left, rows = read_tail(self._folder)
        if rows and left > serial:
            self._serial, self._rows = left, rows
        self._names: List[str] = []
        self._renew_tail()

    @property
    def rows(self) -> List[Row]:
        """Return the rows that no block holds yet."""
        return self._rows

    def append(self, at: float, values: Dict[str, Value]) -> None:
        """Add a row. One that is no later than the row before begins a new block: the clock was set back."""
        if self._rows and (at <= self._rows[-1][0] or at // self._span_s != self._rows[-1][0] // self._span_s):
            self.flush()
        self._rows.append((at, values))
        try:
            self._write_row(at, values)
        except OSError:
            self._rows.pop()
            raise

    def flush(self) -> None:
        """Write the rows so far as a block."""
        rows, self._rows = self._rows, []
        try:
            for data in _blocks(self.step_s, self._serial, rows):
                self._append_block(data)
        finally:
            self._serial += 1
            os.close(self._tail)
            self._renew_tail()

    def close(self) -> None:
        """Let go of the tail, whose rows stay in it."""
        os.close(self._tail)

    def drop_oldest(self) -> int:
        """Delete the oldest segment that is not being written. Returns its bytes, 0 where there is none."""
        for name in segment_names(self._folder):
            if name != self._segment:
                path = os.path.join(self._folder, name)
                size = os.stat(path).st_size
                os.unlink(path)
                return size
        return 0

    def size_bytes(self) -> int:
        """Return what the segments take on disk."""
        return sum(os.stat(os.path.join(self._folder, name)).st_size for name in segment_names(self._folder))

    def _append_block(self, data: bytes) -> None:
        head = read_head(data)
        if not self._segment or self._blocks >= BLOCKS_A_SEGMENT:
            self._segment, self._blocks = "%012d-%08d%s" % (head.first, self._serial, SUFFIX), 0
        path = os.path.join(self._folder, self._segment)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        times = os.fstat(fd)
        before = times.st_size
        try:
            _write_all(fd, data)
            os.fsync(fd)
            newest = max(head.last, times.st_mtime) if before else head.last
            os.utime(fd, (newest, newest))  # a reader passes over a file that ends before what it looks for
        except OSError:
            os.ftruncate(fd, before)
            raise
        finally:
            os.close(fd)
        if not before:
            sync_folder(self._folder)
        self._blocks += 1

    def _renew_tail(self) -> None:
        """Begin a tail with the rows at hand, in the place of the old one."""
        path = os.path.join(self._folder, TAIL)
        self._tail = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._names = []
        self._write(b"%d\n" % self._serial)
        for at, values in self._rows:
            self._write_row(at, values)
        os.replace(path + ".new", path)

    def _write_row(self, at: float, values: Dict[str, Value]) -> None:
        lines = b""
        if len(values) != len(self._names) or any(name not in values for name in self._names):
            self._names = list(values)
            lines = json.dumps(self._names).encode("ascii") + b"\n"
        row: List[Any] = [at, *(values[name] for name in self._names)]
        self._write(lines + json.dumps(row).encode("ascii") + b"\n")

    def _write(self, data: bytes) -> None:
        """Write to the tail all of it or nothing."""
        before = os.lseek(self._tail, 0, os.SEEK_CUR)
        try:
            _write_all(self._tail, data)
        except OSError:
            os.ftruncate(self._tail, before)
            os.lseek(self._tail, before, os.SEEK_SET)
            self._names = []
            raise


def read_tail(folder: str) -> Tuple[int, List[Row]]:
    """Read (serial, rows) of a tail, as far as it makes sense; (0, []) where there is none."""
    try:
        with open(os.path.join(folder, TAIL), "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0, []
    serial = 0
    names: List[str] = []
    rows: List[Row] = []
    for line in lines:
        record = _parsed(line)
        if isinstance(record, int):
            serial, rows = record, []
        elif isinstance(record, list) and record and isinstance(record[0], str):
            names = record
        elif isinstance(record, list) and len(record) == len(names) + 1 and isinstance(record[0], (int, float)):
            rows.append((record[0], dict(zip(names, record[1:]))))
    return serial, rows


def tail_blocks(folder: str, step_s: int) -> Tuple[int, List[bytes]]:
    """Return a tail's serial and its rows as blocks; none where it is empty."""
    serial, rows = read_tail(folder)
    return serial, _blocks(step_s, serial, rows) if rows else []


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None  # torn by a crash


def _blocks(step_s: int, serial: int, rows: List[Row]) -> List[bytes]:
    """Encode rows as one block, or as several where one would be too large for the wire."""
    data = encode_block(step_s, serial, rows)
    if len(data) <= BLOCK_BYTES:
        return [data]
    if len(rows) == 1:
        return [encode_block(step_s, serial, [(rows[0][0], {"too_large": FAILED})])]
    middle = len(rows) // 2
    return [*_blocks(step_s, serial, rows[:middle]), *_blocks(step_s, serial, rows[middle:])]


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
