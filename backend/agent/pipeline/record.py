"""Where a chain's state lies: in the folder of the run that drives it, in two slots that are written in turn.

A slot is one line: number, CRC-32 and the record as JSON, padded to a fixed size that was taken on the disk at the
start. So the newest whole slot is the truth after any crash, and a full disk does not keep the next one from being
written.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import List, Optional, Tuple

from backend.wire import Gate, Pipeline, Step, from_dict

SLOTS = ("pipeline.0", "pipeline.1")
SLOT_BYTES = 64 * 1024


class Record:
    """Writes a chain's state; `problem` says why the newest is not on the disk yet."""

    def __init__(self, run_dir: str) -> None:
        """Take the space of both slots. Raises OSError where the disk has none."""
        self._paths = [os.path.join(run_dir, name) for name in SLOTS]
        self._number = 0
        self.problem = ""
        for path in self._paths:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, SLOT_BYTES)
            finally:
                os.close(fd)

    def write(self, chain: Pipeline) -> None:
        """Write the state and sync it. What cannot be written now is noted in `problem`, and tried at the next call."""
        body = json.dumps(chain, default=vars, separators=(",", ":")).encode("ascii")
        line = b"%d %08x %s" % (self._number + 1, zlib.crc32(body), body)
        try:
            if len(line) >= SLOT_BYTES:
                raise OSError("a record of %d bytes does not fit its slot" % len(line))
            fd = os.open(self._paths[self._number % 2], os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(fd, line.ljust(SLOT_BYTES - 1) + b"\n", 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.problem = "the chain's record could not be written: %s" % error
            return
        self._number += 1
        self.problem = ""


def read(run_dir: str) -> Optional[Pipeline]:
    """Return the newest state that is whole, or None where there is none."""
    found = [slot for slot in (_slot(os.path.join(run_dir, name)) for name in SLOTS) if slot is not None]
    return max(found, key=lambda slot: slot[0])[1] if found else None


def _slot(path: str) -> Optional[Tuple[int, Pipeline]]:
    try:
        with open(path, "rb") as file:
            number, crc, body = file.read(SLOT_BYTES).rstrip().split(b" ", 2)
        if zlib.crc32(body) != int(crc, 16):
            return None
        data = json.loads(body)
        chain = from_dict(Pipeline, data)
        steps: List[Step] = [from_dict(Step, row) for row in data["steps"]]
        gates: List[Gate] = [from_dict(Gate, row) for row in data["gates"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    chain.steps, chain.gates = steps, gates
    return int(number), chain
